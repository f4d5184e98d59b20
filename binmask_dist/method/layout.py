"""Where a parameter's elements lie: whole on every rank, in a DTensor (FSDP2), or in ZeRO's flat partitions.

The optimizer's step does not care: it is element-wise. Counting, gathering and checkpoints do. A `Placement` answers
for one parameter: which tensor (the `holder`) has its elements here, which part of that is real and not padding, and
how the ranks' parts become one tensor. `placements` tells it of the optimizer's tensors, `in_model` of the model's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

NOT_IN_MODEL = "not_in_model."  # begins the names of parameters that the optimizer has and the model has not


@dataclass(frozen=True)
class Placement:
    """A parameter that lies whole on every rank (one process, DDP)."""

    name: str
    holder: Any  # of the optimizer's tensors the key of its state; None: no element lies on this rank

    @property
    def shape(self) -> torch.Size:
        return self.holder.shape

    @property
    def device(self) -> torch.device:
        """Where collective calls about this parameter take place; an offloaded holder may lie elsewhere."""
        return self.holder.device

    @property
    def process_groups(self) -> tuple[Any, ...]:
        """The process groups whose ranks each have a different part of the elements."""
        return ()

    def local(self, tensor: Any) -> Tensor:
        """The part of `tensor`, which is laid out like the holder, that belongs to this parameter."""
        return tensor

    def gather(self, local: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The whole tensor on every rank, from what `local` returned on each (None: nothing here)."""
        assert local is not None
        return local

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a whole tensor: the inverse of `gather`."""
        return full

    def put(self, full: Tensor) -> None:
        """Write this rank's part of a whole tensor to the holder."""
        self.local(self.holder.detach()).copy_(self.cut(full.to(self.holder.device)))


@dataclass(frozen=True)
class Sharded(Placement):
    """A DTensor of FSDP2."""

    @property
    def process_groups(self) -> tuple[Any, ...]:
        return shard_groups(self.holder)

    def local(self, tensor: Any) -> Tensor:
        return tensor.to_local()

    def gather(self, local: Any, dtype: torch.dtype) -> Tensor:
        # shape and stride are given because they cannot be told from uneven shards
        shape, stride = self.holder.shape, self.holder.stride()
        whole = DTensor.from_local(
            local, self.holder.device_mesh, self.holder.placements, run_check=False, shape=shape, stride=stride
        )
        return whole.full_tensor()

    def cut(self, full: Tensor) -> Tensor:
        mesh, placements = self.holder.device_mesh, self.holder.placements
        return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()


@dataclass(frozen=True)
class Fragment(Placement):
    """A run of elements inside a flat partition of DeepSpeed ZeRO."""

    param: Any  # the model's own parameter, to which DeepSpeed adds attributes
    start: int  # in the holder
    offset: int  # in the flattened parameter
    length: int
    group: Any

    @property
    def shape(self) -> torch.Size:
        return getattr(self.param, "ds_shape", self.param.shape)

    @property
    def device(self) -> torch.device:
        return self.param.device

    @property
    def process_groups(self) -> tuple[Any, ...]:
        return (self.group,)

    def local(self, tensor: Any) -> Tensor:
        return tensor.narrow(0, self.start, self.length)

    def gather(self, local: Tensor | None, dtype: torch.dtype) -> Tensor:
        full = torch.zeros(self.shape, dtype=dtype, device=self.param.device).view(-1)
        if local is not None:
            full.narrow(0, self.offset, self.length).copy_(local)
        # Every element is set on one rank only, so adding bit patterns moves them unchanged; adding
        # floats would turn -0.0 into 0.0. Not every backend has integers of two bytes.
        dist.all_reduce(full.view(torch.int32 if dtype.itemsize == 4 else torch.uint8), group=self.group)
        return full.view(self.shape)

    def cut(self, full: Tensor) -> Tensor:
        return full.reshape(-1).narrow(0, self.offset, self.length)


def local_part(tensor: Any) -> Tensor:
    """A DTensor's elements on this rank; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_groups(tensor: Tensor) -> tuple[Any, ...]:
    """The process groups over which a DTensor is cut up; none for any other tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(i) for i, place in enumerate(tensor.placements) if not place.is_replicate())


def sharded_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Give `local`, which differs between ranks where `tensor` is sharded, that sharding: DCP then saves each."""
    if not isinstance(tensor, DTensor):
        return local
    # not is_shard: what FSDP2 makes of a tensor that tensor parallelism has cut up already is none
    places = [place if place.is_replicate() else Shard(0) for place in tensor.placements]
    return DTensor.from_local(local, tensor.device_mesh, places, run_check=False)


def parameter_names(model: nn.Module | None, params: Sequence[Tensor], group: int) -> list[str]:
    """The model's names of the parameters of a group; names of our own for those that are not in it."""
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    return [names.get(id(param), f"{NOT_IN_MODEL}{group}.{place}") for place, param in enumerate(params)]


def placements(param_groups: Sequence[dict], model: Any) -> dict[str, Placement]:
    """Placement of every named parameter of the optimizer, in the order of its groups."""
    zero = runs_under_zero(param_groups, model)
    found: dict[str, Placement] = {}
    for group in param_groups:
        names = group["param_names"]
        if zero:
            found.update((name, _fragment(name, model.get_parameter(name), group)) for name in names)
            continue
        for name, param in zip(names, group["params"], strict=True):
            found[name] = Sharded(name, param) if isinstance(param, DTensor) else Placement(name, param)
    return found


def in_model(name: str, tensor: Any) -> Placement:
    """Placement of what the model computes with: a parameter, trained or frozen, or a buffer.

    Its precision may be another than the optimizer's. `reshard` comes before writing there.
    """
    if isinstance(tensor, DTensor):
        return Sharded(name, tensor)
    if not hasattr(tensor, "ds_tensor"):
        return Placement(name, tensor)
    part = tensor.ds_tensor
    if part.final_location == "nvme" or not part.is_floating_point():
        raise ValueError(
            f"ZeRO-3 keeps {name!r} on NVMe or quantized, where only DeepSpeed itself can read it; "
            "offload parameters to the CPU, and leave zero_quantized_nontrainable_weights out"
        )
    offset, length = _part_under_zero3(tensor)
    return Fragment(name, part, tensor, 0, offset, length, tensor.ds_process_group)


def reshard(model: nn.Module) -> None:
    """Drop what FSDP2 and ZeRO-3 keep gathered: it would hide what is written to the shards.

    The next forward pass gathers it anew, what ZeRO-3 always keeps gathered (small parameters) included.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    params: list[Any] = list(model.parameters())
    zero = next((param._z3_optimizer for param in params if hasattr(param, "_z3_optimizer")), None)
    if zero is not None:
        zero.parameter_offload.partition_all_parameters()
        for param in params:
            param.ds_secondary_tensor = None  # ZeRO++'s copy within a host; DeepSpeed itself never drops a frozen one's


def runs_under_zero(param_groups: Sequence[dict], model: nn.Module | None) -> bool:
    """Whether DeepSpeed ZeRO has taken over the optimizer's parameters: the first of the model's like all others."""
    if model is None:
        return False
    for name in (name for group in param_groups for name in group["param_names"]):
        try:
            param = model.get_parameter(name)
        except AttributeError:  # it never was in the model, or its module was taken out (LoRA, when it is merged)
            continue
        return hasattr(param, "_hp_mapping") or hasattr(param, "_z3_optimizer")
    return False


def _fragment(name: str, param: Any, group: dict) -> Fragment:
    if hasattr(param, "_z3_optimizer"):
        zero = param._z3_optimizer
        index, start, _ = zero.grad_position[zero.get_param_id(param)]
        offset, length = _part_under_zero3(param)
        holder = zero.fp32_partitioned_groups_flat[index]
        return Fragment(name, holder, param, start, offset, length, zero.dp_process_group)
    mapping = param._hp_mapping
    if mapping is None:  # all of it lies on other ranks
        return Fragment(name, None, param, 0, 0, 0, param._dp_group)
    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Fragment(name, group["params"][0], param, here.start, there.start, here.numel, param._dp_group)


def _part_under_zero3(param: Any) -> tuple[int, int]:
    """(offset, length): rank r has elements [r * n, (r + 1) * n) of the flattened parameter, padded at the end."""
    size = param.ds_tensor.ds_numel
    offset = min(dist.get_rank(param.ds_process_group) * size, param.ds_numel)
    return offset, min(size, param.ds_numel - offset)


def sum_over_ranks(values: dict[str, Tensor], where: dict[str, Placement]) -> dict[str, Tensor]:
    """Add up small per-parameter results over the ranks that share a parameter: one all-reduce for each sharing."""
    by_groups: dict[tuple[Any, ...], list[str]] = {}
    for name in values:
        by_groups.setdefault(where[name].process_groups, []).append(name)
    total: dict[str, Tensor] = {}
    for groups, names in by_groups.items():
        stacked = torch.stack([values[name] for name in names])
        for group in groups:
            dist.all_reduce(stacked, group=group)
        total.update(zip(names, stacked.unbind(), strict=True))
    return total
