"""What the masks say, over all ranks: counts, flips, whole masks, agreement. All of it is collective."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from binmask_dist.method import graphs
from binmask_dist.method.layout import Placement, in_model, local_part, placements, reshard, sum_over_ranks

if TYPE_CHECKING:
    from binmask_dist.method.wrapper import MaskedOptimizer

COUNTED_AT_ONCE = 2**22  # latents: counting takes several times the memory of what is counted
WRAPPERS = ("module.", "_orig_mod.")  # what DDP, AveragedModel and torch.compile put in front of names


def zeros_and_sizes(binmask: "MaskedOptimizer") -> dict[str, tuple[int, int]]:
    """How many elements of each masked weight are off, and how many there are: no padding, no whole tensor."""
    where = placements(binmask.masked_groups, binmask.model)
    zeros = {}
    for name, place in where.items():
        keep = _local_keep(binmask, place)
        zeros[name] = torch.zeros((), dtype=torch.int64, device=place.device)
        if keep is not None:
            zeros[name] += torch.count_nonzero(~keep).to(place.device)
    total = sum_over_ranks(zeros, where)
    return {name: (int(total[name]), where[name].shape.numel()) for name in where}


def flip_counts(binmask: "MaskedOptimizer") -> tuple[int, int]:
    """(on to off, off to on) since the start.

    Steps count flips of either kind. The difference between the kinds is how many more masks are off now.
    """
    flips, starts_off = flip_state(binmask)
    more_off = sum(zeros for zeros, _ in zeros_and_sizes(binmask).values()) - starts_off
    return (flips + more_off) // 2, (flips - more_off) // 2


def flip_state(binmask: "MaskedOptimizer") -> tuple[int, int]:
    """(flips of either kind since the start, how many masks started off)."""
    where = placements(binmask.masked_groups, binmask.model)
    counted: set[int] = set()  # a ZeRO partition counts for all its parameters together
    counts = {}
    for name, place in where.items():
        counts[name] = torch.zeros(2, dtype=torch.int64, device=place.device)
        state = binmask.state.get(place.holder, {}) if place.holder is not None else {}
        if "flips" not in state:
            keep = _local_keep(binmask, place)
            counts[name][1] = 0 if keep is None else keep.numel() - int(keep.count_nonzero())
        elif id(place.holder) not in counted:
            counted.add(id(place.holder))
            counts[name].copy_(local_part(state["flips"]))
    total = torch.stack([count.cpu() for count in sum_over_ranks(counts, where).values()]).sum(0)
    flips, starts_off = total.tolist()
    return flips, starts_off


def latent_histogram(binmask: "MaskedOptimizer", edges: Sequence[float]) -> list[int]:
    """How many latents lie in each of the bins between `edges`, of which the last one includes its upper edge."""
    where = placements(binmask.masked_groups, binmask.model)
    counts = {}
    for name, place in where.items():
        counts[name] = torch.zeros(len(edges) - 1, dtype=torch.int64, device=place.device)
        latent = _local_latent(binmask, place)
        if latent is not None:
            counts[name] += _count_between(latent, edges).to(place.device)
    total = torch.stack([count.cpu() for count in sum_over_ranks(counts, where).values()]).sum(0)
    return total.tolist()


def expected_sparsity(binmask: "MaskedOptimizer", movement: float) -> float:
    """Sparsity after Adam's steps have added up to `movement`, if each latent goes on as its moments say."""
    where = placements(binmask.masked_groups, binmask.model)
    zeros = {}
    for name, place in where.items():
        zeros[name] = torch.zeros((), dtype=torch.int64, device=place.device)
        latent = _local_latent(binmask, place)
        if latent is not None:
            zeros[name] += torch.count_nonzero(latent < movement * _direction(binmask, place)).to(place.device)
    total = sum_over_ranks(zeros, where)
    return sum(map(int, total.values())) / sum(place.shape.numel() for place in where.values())


def _direction(binmask: "MaskedOptimizer", place: Placement) -> Tensor | float:
    """Adam's last step of each latent downwards, over its learning rate: from -1 to 1 where gradients are steady."""
    state = binmask.state.get(place.holder, {})
    steps = float(state.get("latent_step", 0.0))
    if not steps:
        return 0.0
    group = next(group for group in binmask.masked_groups if place.name in group["param_names"])
    beta1, beta2 = group["mask_betas"]
    mean = place.local(state["latent_exp_avg"]) / (1 - beta1**steps)
    spread = (place.local(state["latent_exp_avg_sq"]) / (1 - beta2**steps)).sqrt_()
    return mean / (spread + group["mask_eps"])


def _count_between(values: Tensor, edges: Sequence[float]) -> Tensor:
    limits = torch.tensor(edges, dtype=torch.float32, device=values.device)
    limits[-1] = torch.nextafter(limits[-1], torch.full_like(limits[-1], torch.inf))
    counts = torch.zeros(len(edges) + 1, dtype=torch.int64, device=values.device)  # with those below and above
    for part in values.reshape(-1).split(COUNTED_AT_ONCE):
        counts += torch.bincount(torch.bucketize(part, limits, out_int32=True, right=True), minlength=len(counts))
    return counts[1:-1]


def masks(binmask: "MaskedOptimizer") -> dict[str, Tensor]:
    """Name -> bool tensor, whole, on every rank."""
    where = placements(binmask.masked_groups, binmask.model)
    return {name: _whole_mask(binmask, place) for name, place in where.items()}


def smoothed_masks(binmask: "MaskedOptimizer") -> dict[str, Tensor]:
    """Name of an input mask -> its average over the last steps, whole, on every rank."""
    groups = [group for group in binmask.masked_groups if group.get("fixed")]
    gathered = {}
    for name, place in placements(groups, binmask.model).items():
        smoothed = None
        if place.holder is not None:
            kept = binmask.state.get(place.holder, {}).get("smoothed")
            smoothed = place.local(torch.zeros_like(place.holder, dtype=torch.float32) if kept is None else kept)
        gathered[name] = place.gather(smoothed, torch.float32).detach().clone()
    return gathered


def _whole_mask(binmask: "MaskedOptimizer", place: Placement) -> Tensor:
    keep = _local_keep(binmask, place)
    return place.gather(None if keep is None else keep.to(torch.uint8), torch.uint8).bool()


def _local_keep(binmask: "MaskedOptimizer", place: Placement) -> Tensor | None:
    latent = _local_latent(binmask, place)
    return None if latent is None else latent >= 0


def _local_latent(binmask: "MaskedOptimizer", place: Placement) -> Tensor | None:
    if place.holder is None:
        return None
    latent = binmask.state.get(place.holder, {}).get("latent")
    if latent is not None:
        return place.local(latent)
    local = place.local(place.holder.detach())
    group = next(group for group in binmask.masked_groups if place.name in group["param_names"])
    starts = torch.full_like(local, group["alpha0"], dtype=torch.float32)
    return starts.masked_fill_(local == 0, -group["alpha1"]) if group["from_zeros"] else starts


@torch.no_grad()
def apply_masks_(binmask: "MaskedOptimizer", model: nn.Module) -> None:
    """Mask the model or a copy of it, whatever wraps it. No rank holds more than one whole mask at a time."""
    reshard(model)
    params = dict(model.named_parameters())
    where = placements(binmask.masked_groups, binmask.model)
    # by their own names first: a model may itself have what wrappers put in front
    while not where.keys() <= params.keys() and any(name.startswith(WRAPPERS) for name in params):
        params = {_without_wrapper(name): param for name, param in params.items()}
    missing = sorted(set(where) - set(params))
    if missing:
        raise ValueError(f"the model has no parameter {missing[0]!r}, which is masked; give a copy of the same model")
    targets = {name: in_model(name, params[name]) for name in where}
    for name, target in targets.items():
        if target.shape != where[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(target.shape)} and not {tuple(where[name].shape)}; give a copy of the same "
                "model (under ZeRO-3 the model itself: parameters of a copy are empty)"
            )
    for name, target in targets.items():
        mask = _whole_mask(binmask, where[name])
        target.local(target.holder).mul_(target.cut(mask.to(target.holder.device)))


def _without_wrapper(name: str) -> str:
    return name.split(".", 1)[1] if name.startswith(WRAPPERS) else name


def check_sync(binmask: "MaskedOptimizer") -> None:
    """Raise if ranks that should agree do not: on hyper-parameters, and on what each of them holds whole."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine: dict[str, Any] = {"whether the step could be compiled": graphs.compiler_failed()}
    for index, group in enumerate(binmask.masked_groups):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "grad_norm")}
        mine[f"the settings of group {index}"] = repr(sorted(settings.items()))
    for name, place in placements(binmask.masked_groups, binmask.model).items():
        if not place.process_groups:
            state = binmask.state.get(place.holder, {})
            mine[name] = [_digest(state[key]) for key in ("weight", "latent") if key in state]
            mine[name].append(_digest(place.holder.detach()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name in mine:
        # the majority is presumed right; with two ranks both are named
        values = [theirs.get(name) for theirs in everyone]
        usual = max(values, key=values.count)
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            ranks = list(range(len(values))) if values.count(usual) == 1 or len(values) == 2 else odd
            raise RuntimeError(
                f"ranks {ranks} disagree on {name}; all ranks must start from the same weights, "
                "see the same averaged gradients and call set_epoch with the same epoch"
            )


def _digest(tensor: Tensor) -> tuple[int, int]:
    """Two sums over the bit patterns, the second of them sensitive to order."""
    bits = local_part(tensor).reshape(-1).contiguous().view(torch.uint8)
    bits = bits.view(torch.int16 if tensor.element_size() == 2 else torch.int32).to(torch.int64)
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    return int(bits.sum()), int((bits * places).sum())
