"""One checkpoint for every engine: written under any of them and any number of processes, read under any other.

    save_checkpoint("run/checkpoint", binmask)
    load_checkpoint("run/checkpoint", binmask)

A folder with `checkpoint.json` (settings, and which files hold the tensors) and safetensors files with entries such as
`param:layer1.0.conv1.weight`, `latent:layer1.0.conv1.weight` or `momentum_buffer:fc.bias`: whole tensors, by parameter
name, in the optimizer's precision. Nothing is pickled. Replacing `checkpoint.json` is what makes a new checkpoint
current, so an interrupted save leaves the one before. Both calls are collective.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from binmask_dist.engines.checkpoint_files import (
    FORMAT,
    INDEX,
    CheckpointError,
    StoredTensors,
    read_index,
    remove_other_files,
    write_tensors,
)
from binmask_dist.engines.json_values import from_json, to_json
from binmask_dist.files import write_atomically
from binmask_dist.method import readout
from binmask_dist.method.layout import Fragment, Placement, in_model, local_part, placements, reshard
from binmask_dist.method.wrapper import MaskedOptimizer, innermost

# what describes the process and not the training: the next one may run on other engines, which clip in their own way,
# and on other devices
NOT_SETTINGS = ("params", "param_names", "grad_norm", "max_grad_norm", "compile", "fused", "foreach")
# which state they keep for a matrix and for a vector differs
SHAPE_DEPENDENT = ("Adafactor", "Muon")


def save_checkpoint(folder: str | os.PathLike, binmask: MaskedOptimizer, extra: dict[str, Any] | None = None) -> None:
    """Write model and optimizer, masks included. `extra` is kept in the JSON and returned by `load_checkpoint`."""
    folder, binmask = Path(folder), _masked(binmask)
    where = placements(binmask.param_groups, binmask.model)
    entries = _agree_on_entries(binmask, where)
    inner = type(binmask.inner).__name__
    index: dict[str, Any] = {
        "format": FORMAT,
        "optimizer": inner,
        "groups": [
            {"names": group["param_names"], "settings": _settings(inner, group)} for group in binmask.param_groups
        ],
        "scalars": {name: _scalars(of_name) for name, of_name in entries.items()},
        "entries": {name: sorted(of_name.keys() - _scalars(of_name)) for name, of_name in entries.items()},
        "flips": list(readout.flip_state(binmask)),
        "extra": extra or {},
    }
    tensors = _whole_tensors(binmask, where, entries)
    error = None
    if _rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            index["files"] = write_tensors(folder, tensors)
            write_atomically(folder / INDEX, json.dumps(index, indent=1, sort_keys=True))
            remove_other_files(folder, set(index["files"]))
        except Exception as failure:  # of any kind: the other ranks are waiting
            error = f"the checkpoint could not be written to {folder}: {failure}"
    try:
        for _ in tensors:  # the other ranks' part of gathering; on rank 0 what a failure left over
            pass
    except Exception as failure:
        error = error or f"the checkpoint could not be gathered: {failure}"
    _raise_on_every_rank(error)


def load_checkpoint(folder: str | os.PathLike, binmask: MaskedOptimizer) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote into a model and optimizer made the same way. Returns `extra`."""
    folder, binmask = Path(folder), _masked(binmask)
    where = placements(binmask.param_groups, binmask.model)
    error: str | None = None
    index: dict[str, Any] = {}
    stored: Any = None
    try:
        index = read_index(folder)
        stored = StoredTensors(folder, index)
        _check_fits(index, stored, binmask, where)
    except (CheckpointError, OSError) as failure:
        error = str(failure)
    except (KeyError, ValueError, TypeError, AttributeError, SafetensorError) as failure:
        error = f"{folder} holds a damaged checkpoint ({type(failure).__name__}: {failure})"
    _raise_on_every_rank(error)
    _load_model(stored, binmask, where)
    _load_state(stored, index, binmask, where)
    for group, saved in zip(binmask.param_groups, index["groups"], strict=True):
        device = next(param.device for param in group["params"]) if group["params"] else torch.device("cpu")
        group.update({key: from_json(value, device) for key, value in saved["settings"].items()})
    return index["extra"]


def _masked(optimizer: Any) -> MaskedOptimizer:
    inside = innermost(optimizer)
    if not isinstance(inside, MaskedOptimizer):
        raise TypeError(f"give what patch returned, or what prepare made of it, not {type(optimizer).__name__}")
    return inside


# -- writing


def _agree_on_entries(binmask: MaskedOptimizer, where: dict[str, Placement]) -> dict[str, dict[str, Any]]:
    """Name -> key -> dtype of a tensor laid out like the parameter, or the value of a scalar.

    A rank that holds nothing of a parameter learns from the others what will be gathered.
    """
    mine, error = {}, None
    try:
        mine = {name: _describe(binmask, place) for name, place in where.items()}
    except CheckpointError as failure:
        error = str(failure)
    _raise_on_every_rank(error)
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return {name: next((theirs[name] for theirs in everyone if theirs[name]), {}) for name in mine}


def _describe(binmask: MaskedOptimizer, place: Placement) -> dict[str, Any]:
    described: dict[str, Any] = {}
    inner = type(binmask.inner).__name__
    for key, value in binmask.state.get(place.holder, {}).items() if place.holder is not None else ():
        if key == "flips":
            continue
        if not isinstance(value, Tensor) or value.ndim == 0:
            described[key] = {"value": _json_of(inner, key, value)}
        elif isinstance(place, Fragment) and (value.shape != place.holder.shape or inner in SHAPE_DEPENDENT):
            raise CheckpointError(
                f"{inner} keeps state that depends on a weight's shape, which ZeRO's flat partitions turn into "
                "something that no other engine can read; use accelerator.save_state"
            )
        elif value.shape == place.holder.shape:
            described[key] = {"dtype": value.dtype}
        else:
            described[key] = {"dtype": value.dtype, "own_shape": True}
    return described


def _whole_tensors(
    binmask: MaskedOptimizer, where: dict[str, Placement], entries: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Tensor]]:
    """Entry name -> whole tensor on the CPU, one after the other: no rank holds more than one of them."""
    for name, place in where.items():
        state = binmask.state.get(place.holder, {}) if place.holder is not None else {}
        yield f"param:{name}", _gather(place, None if place.holder is None else place.holder.detach(), torch.float32)
        for key, entry in sorted(entries[name].items()):
            if entry.get("own_shape"):
                value = state[key]
                yield f"{key}:{name}", (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
            elif "dtype" in entry:
                yield f"{key}:{name}", _gather(place, state.get(key), entry["dtype"])
    for name, tensor in _outside_the_optimizer(binmask, where):
        place = in_model(name, tensor)
        yield f"outside:{name}", _gather(place, place.holder.detach(), tensor.dtype)


def _gather(place: Placement, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
    return place.gather(None if tensor is None else place.local(tensor), dtype).detach().cpu().contiguous()


def _outside_the_optimizer(binmask: MaskedOptimizer, where: dict[str, Placement]) -> Iterator[tuple[str, Tensor]]:
    """What the model keeps beside what is trained: buffers that are saved, and frozen parameters."""
    if binmask.model is None:
        raise CheckpointError("this BinMask was copied or unpickled and has lost its model; save the original")
    saved = binmask.model.state_dict().keys()
    for name, tensor in (*binmask.model.named_parameters(), *binmask.model.named_buffers()):
        if name not in where and name in saved:
            yield name, tensor


# -- reading


def _check_fits(
    index: dict[str, Any], stored: StoredTensors, binmask: MaskedOptimizer, where: dict[str, Placement]
) -> None:
    """Everything that could go wrong is found here, before anything is changed."""
    inner = type(binmask.inner).__name__
    if index["optimizer"] != inner:
        raise CheckpointError(f"the checkpoint is of {index['optimizer']}, not of {inner}; make the same optimizer")
    ours = [set(group["param_names"]) for group in binmask.param_groups]
    theirs = [set(group["names"]) for group in index["groups"]]
    if ours != theirs:
        different = sorted(set().union(*ours) ^ set().union(*theirs)) or ["the groups"]
        raise CheckpointError(
            f"the checkpoint is of another model or other targets: they differ in {different[0]!r}"
            + (f" and {len(different) - 1} more" if len(different) > 1 else "")
        )
    for section in ("entries", "scalars"):
        if set(index[section]) != set(where):
            different = sorted(set(index[section]) ^ set(where))
            raise CheckpointError(f"the checkpoint's {section} are damaged: they differ in {different[0]!r}")
    wanted = {f"param:{name}": list(place.shape) for name, place in where.items()}
    for name, keys in index["entries"].items():
        wanted.update({f"{key}:{name}": stored.shape(f"{key}:{name}") for key in keys})
        ours_alone = set(keys) & set(binmask.state_keys)
        wanted.update({f"{key}:{name}": list(where[name].shape) for key in ours_alone})
    index["extra"]  # is there, or a KeyError
    if len(index["flips"]) != 2 or not all(type(count) is int for count in index["flips"]):
        raise CheckpointError(f"the checkpoint's flips are {index['flips']}, not two whole numbers; it is damaged")
    for values in (*index["scalars"].values(), *(group["settings"] for group in index["groups"])):
        for value in values.values():
            from_json(value, torch.device("cpu"))
    for name, tensor in _outside_the_optimizer(binmask, where):
        wanted[f"outside:{name}"] = list(getattr(tensor, "ds_shape", tensor.shape))
    for entry in stored.files:
        key, name = entry.split(":", 1)
        own_shape = key != "outside" and stored.shape(entry) != list(where[name].shape)
        if own_shape and key != "param" and where[name].process_groups:
            raise CheckpointError(
                f"{inner} keeps {key!r} in a shape of its own, which cannot be sharded; load it unsharded"
            )
    unknown = sorted(set(stored.files) - set(wanted))
    if unknown:
        raise CheckpointError(f"the checkpoint holds {unknown[0]!r}, of which its index says nothing; it is damaged")
    for entry, shape in wanted.items():
        if entry not in stored.files:
            raise CheckpointError(f"the checkpoint lacks {entry!r}; it is damaged or of another model")
        if stored.shape(entry) != shape:
            raise CheckpointError(f"{entry!r} has shape {stored.shape(entry)} in the checkpoint, not {shape}")


@torch.no_grad()
def _load_model(stored: StoredTensors, binmask: MaskedOptimizer, where: dict[str, Placement]) -> None:
    assert binmask.model is not None  # `_check_fits` has looked into it
    reshard(binmask.model)
    for name, place in where.items():
        full = stored[f"param:{name}"]
        if place.holder is not None:
            place.put(full)
        if isinstance(place, Fragment):  # the model's own copy, which ZeRO refreshes only at the next step
            in_model(name, place.param).put(full)
    for name, tensor in _outside_the_optimizer(binmask, where):
        in_model(name, tensor).put(stored[f"outside:{name}"])


@torch.no_grad()
def _load_state(
    stored: StoredTensors, index: dict[str, Any], binmask: MaskedOptimizer, where: dict[str, Placement]
) -> None:
    binmask.state.clear()
    group_of = {name: group for group in binmask.param_groups for name in group["param_names"]}
    for name, place in where.items():
        if place.holder is not None:
            scalars = {key: from_json(value, place.device) for key, value in index["scalars"][name].items()}
            _load_state_of(place, group_of[name], stored, index["entries"][name], scalars, binmask)
    _load_flips(index["flips"], binmask)


def _load_state_of(
    place: Placement,
    group: dict[str, Any],
    stored: StoredTensors,
    keys: list[str],
    scalars: dict[str, Any],
    binmask: MaskedOptimizer,
) -> None:
    state = binmask.state[place.holder]
    if "latent" in keys and "latent" not in state:
        state.update(binmask.new_state(place.holder, group))
    has_learnt = "latent_step" not in scalars or scalars["latent_step"] > 0 or group["from_zeros"]
    for key in keys:
        entry = f"{key}:{place.name}"
        # in the precision of the weight, which may be another one here, or in one of its own
        of_weight = key == "weight" or (
            key not in binmask.state_keys and stored.dtype(entry) == stored.dtype(f"param:{place.name}")
        )
        if key == "weight" and not has_learnt:  # W is p until then
            entry = f"param:{place.name}"
        full = stored[entry]
        _load_entry(state, key, full.to(place.holder.dtype) if of_weight else full, place)
    if group.get("fused") and isinstance(scalars.get("step"), Tensor):
        scalars["step"] = scalars["step"].to(place.device)
    if isinstance(place, Fragment):
        # One partition holds many weights, and one number of steps: that of those that took most. With another, masks
        # that have learnt would be taken for ones that have not.
        for key in scalars.keys() & state.keys() & {"step", "latent_step"}:
            scalars[key] = max(scalars[key], state[key])
    state.update(scalars)


def _load_entry(state: dict[str, Any], key: str, full: Tensor, place: Placement) -> None:
    if full.shape != place.shape:  # an optimizer's own shape; the engine shards it as it likes
        state[key] = full.to(place.device)
        return
    if key not in state or state[key].dtype != full.dtype:
        state[key] = torch.zeros_like(place.holder, dtype=full.dtype, requires_grad=False)
    place.local(state[key]).copy_(place.cut(full.to(place.holder.device)))


def _load_flips(flips: list[int], binmask: MaskedOptimizer) -> None:
    """Only the totals over parameters and ranks mean anything: they go to the first place that counts."""
    counters = {}  # by holder: a ZeRO partition counts for all its parameters together
    for place in placements(binmask.masked_groups, binmask.model).values():
        state = binmask.state.get(place.holder, {}) if place.holder is not None else {}
        if "flips" in state:
            counters[id(place.holder)] = (place, local_part(state["flips"]))
    for place, counts in counters.values():
        first = all(dist.get_rank(group) == 0 for group in place.process_groups)
        counts.copy_(torch.tensor(flips if first else [0, 0]))
        flips = [0, 0]


# -- small things


def _settings(inner: str, group: dict[str, Any]) -> dict[str, Any]:
    return {key: _json_of(inner, key, value) for key, value in group.items() if key not in NOT_SETTINGS}


def _json_of(inner: str, key: str, value: Any) -> Any:
    as_json = to_json(value)
    try:
        json.dumps(as_json)
    except TypeError:
        raise CheckpointError(
            f"{inner} keeps {key!r}, a {type(value).__name__} that JSON cannot hold; use accelerator.save_state"
        ) from None
    return as_json


def _scalars(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: entry["value"] for key, entry in entries.items() if "value" in entry}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _raise_on_every_rank(error: str | None) -> None:
    """One rank's error is everyone's: the others would wait for it for ever."""
    if dist.is_initialized():
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        error = next((text for text in errors if text), None)
    if error:
        raise CheckpointError(error)
