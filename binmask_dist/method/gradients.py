"""The norm of what U is given: for gradient clipping, and to find gradients that are not finite."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from binmask_dist.method import kernels
from binmask_dist.method.joining import Row
from binmask_dist.method.layout import local_part, shard_groups

SMALL = 2**12  # elements; to copy more takes as long as to dispatch a reduction


def gradient_norm(param_groups: list[dict[str, Any]], state: dict, of_masked: bool) -> float:
    """Norm of all gradients over all ranks; not finite if one of them is not.

    `of_masked`: of g_W, which masked entries do not count in, instead of g.
    """
    norm = _norm(param_groups, state, of_masked, exact=False)
    # squares of large but finite gradients overflow in fp32
    return norm if math.isfinite(norm) else _norm(param_groups, state, of_masked, exact=True)


@dataclass
class _Gradients:
    """Those that share their sharding: plain ones, and masked ones with their latents."""

    device: torch.device
    plain: list[Tensor] = field(default_factory=list)
    masked: list[Row] = field(default_factory=list)
    compiled: bool = False


def _norm(param_groups: list[dict[str, Any]], state: dict, of_masked: bool, exact: bool) -> float:
    # Every rank takes part in every sum, also one whose shards are all empty: in the order of the groups, which all
    # ranks share.
    by_shards: dict[tuple[Any, ...], _Gradients] = {}
    for group in param_groups:
        by_mask = of_masked and group.get("masked")
        for param in group["params"]:
            if param.grad is None:
                continue
            grad, shards = local_part(param.grad), shard_groups(param)
            if shards not in by_shards:
                by_shards[shards] = _Gradients(grad.device)
            of_shards = by_shards[shards]
            if grad.numel() == 0:
                continue
            latent = state.get(param, {}).get("latent") if by_mask else None
            if by_mask and latent is None and group["from_zeros"]:  # before a first step the masks are p's zeros
                grad = grad * (local_part(param) != 0)
            if by_mask and group.get("fixed"):  # an input mask has no g_W, but may have a gradient that is not finite
                of_shards.plain.append(grad * 0)
            elif latent is None:
                of_shards.plain.append(grad)
            elif exact:
                of_shards.plain.append(grad * (local_part(latent) >= 0))
            else:
                of_shards.masked.append((grad, local_part(latent)))
                of_shards.compiled = group["compile"]
    return sum(_sum_over_ranks(of_shards, shards, exact) for shards, of_shards in by_shards.items()) ** 0.5


def _sum_over_ranks(of_shards: _Gradients, process_groups: tuple[Any, ...], exact: bool) -> float:
    """Sum of squares of all elements, those on other ranks included."""
    squares = [_square_sum(grad, exact) for grad in _joined(of_shards.plain)]
    squares += kernels.masked_square_sum(of_shards.masked, of_shards.compiled)
    if squares:
        part = torch.stack(squares).double().sum()
    else:
        part = torch.zeros((), dtype=torch.float64, device=of_shards.device)
    for process_group in process_groups:
        dist.all_reduce(part, group=process_group)
    return part.item()


def _joined(grads: list[Tensor]) -> Iterator[Tensor]:
    """The same elements, those of small gradients end to end: some hundred biases and norms are one reduction."""
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads:
        if grad.numel() <= SMALL and not grad.is_sparse and grad.is_contiguous():
            small.setdefault((grad.dtype, grad.device), []).append(grad.view(-1))
        else:
            yield grad
    yield from (torch.cat(together) for together in small.values())


def _square_sum(grad: Tensor, exact: bool) -> Tensor:
    if grad.is_sparse:  # an embedding's, say
        grad = grad.coalesce().values()
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    if exact or grad.dtype == torch.float64:
        return torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    if grad.dtype == torch.float32 and grad.device.type == "cpu" and grad.is_contiguous():
        flat = grad.view(-1)
        return torch.dot(flat, flat)  # the one reduction that reads at the speed of memory there
    return torch.linalg.vector_norm(grad, dtype=torch.float32).square()


def scale(grads: list[Any], clip: float) -> None:
    if clip != 1.0 and grads:
        torch._foreach_mul_([local_part(grad) for grad in grads], clip)
