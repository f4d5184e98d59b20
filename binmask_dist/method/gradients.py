"""The norm of what U is given: for gradient clipping, and to find gradients that are not finite."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from binmask_dist.method import kernels
from binmask_dist.method.joining import LARGEST as SMALL
from binmask_dist.method.joining import Row
from binmask_dist.method.layout import local_part, shard_groups


def gradient_norm(param_groups: list[dict[str, Any]], state: dict, of_masked: bool) -> float:
    """Norm of all gradients over all ranks; not finite if one of them is not.

    `of_masked`: of g_W, which masked entries do not count in, instead of g.
    """
    norm = _norm(param_groups, state, of_masked, exact=False)
    # squares of large but finite gradients overflow in fp32
    return norm if math.isfinite(norm) else _norm(param_groups, state, of_masked, exact=True)


def _norm(param_groups: list[dict[str, Any]], state: dict, of_masked: bool, exact: bool) -> float:
    by_shards: dict[tuple[Any, ...], list[Tensor]] = {}
    for group in param_groups:
        plain: dict[tuple[Any, ...], list[Tensor]] = {}
        masked: dict[tuple[Any, ...], list[Row]] = {}
        for param in group["params"]:
            if param.grad is None or local_part(param.grad).numel() == 0:
                continue
            grad = local_part(param.grad)
            latent = state.get(param, {}).get("latent") if of_masked and group.get("masked") else None
            if of_masked and group.get("fixed"):  # an input mask has no g_W, but may have a gradient that is not finite
                plain.setdefault(shard_groups(param), []).append(grad * 0)
            elif latent is None:
                plain.setdefault(shard_groups(param), []).append(grad)
            elif exact:
                plain.setdefault(shard_groups(param), []).append(grad * (local_part(latent) >= 0))
            else:
                masked.setdefault(shard_groups(param), []).append((grad, local_part(latent)))
        for shards, grads in plain.items():
            by_shards.setdefault(shards, []).extend(_square_sum(grad, exact) for grad in _joined(grads))
        for shards, rows in masked.items():
            by_shards.setdefault(shards, []).extend(kernels.masked_square_sum(rows, group["compile"]))
    return _sum_over_shards(param_groups, by_shards) ** 0.5


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
    if exact or grad.dtype == torch.float64:
        return torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    if grad.dtype == torch.float32 and grad.device.type == "cpu" and grad.is_contiguous():
        flat = grad.view(-1)
        return torch.dot(flat, flat)  # the one reduction that reads at the speed of memory there
    return torch.linalg.vector_norm(grad, dtype=torch.float32).square()


def _sum_over_shards(param_groups: list[dict[str, Any]], by_shards: dict[tuple[Any, ...], list[Tensor]]) -> float:
    total = 0.0
    # Every rank takes part in every sum, also one whose shards are all empty: in the order of the groups,
    # which all ranks share.
    shardings = dict.fromkeys(
        shard_groups(param) for group in param_groups for param in group["params"] if param.grad is not None
    )
    for groups in shardings:
        squares = by_shards.get(groups)
        part = (
            torch.stack([square.double() for square in squares]).sum()
            if squares
            else torch.zeros((), dtype=torch.float64, device=_device(param_groups))
        )
        for process_group in groups:
            dist.all_reduce(part, group=process_group)
        total += part.item()
    return total


def _device(param_groups: list[dict[str, Any]]) -> torch.device:
    return next(local_part(param).device for group in param_groups for param in group["params"])


def scale(grads: list[Any], clip: float) -> None:
    if clip != 1.0 and grads:
        torch._foreach_mul_([local_part(grad) for grad in grads], clip)
