"""Runs the functions of `algorithm.py` over tensors of any shape: compiled, or eagerly in cache-sized pieces."""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from binmask_dist.method import algorithm
from binmask_dist.method.algorithm import Scalars

EAGER_PIECE = 2**18  # elements; temporaries then stay in the processor's cache, and small next to any large weight
COMPILED_PIECE = 2**30  # flips are counted in 32 bits

# torch.compile guards sizes 0 and 1, which would be further graphs.
SMALLEST_COMPILED = 2

# Left alone, inductor would work out the new latents twice: for the count of flips, and once more, in a second loop
# over all memory, to store them. Realised intermediates keep both in one loop, where they stay in registers.
ONE_LOOP: dict[str, Any] = {"realize_opcount_threshold": 3}

_compiler_failed = False
_has_run: set[Callable] = set()


def learn_(tensors: Sequence[Tensor], scalars: Scalars, compiled: bool) -> Tensor | None:
    """Update (grad, weight, latent, exp_avg, exp_avg_sq) before U. Returns how many masks flipped."""
    return _run(algorithm.learn_, algorithm.learn_eagerly_, tensors, compiled, scalars)


def learn_and_update_(
    update: Callable, tensors: Sequence[Tensor], scalars: Scalars, update_scalars: list[float]
) -> Tensor | None:
    """Update (grad, weight, latent, exp_avg, exp_avg_sq, param, what U keeps...) in one pass, if that can be compiled.

    Returns how many masks flipped; None, and has changed nothing, if it cannot.
    """
    flat = _flat_views(tensors)
    if _compiler_failed or flat is None or tensors[0].numel() < SMALLEST_COMPILED:
        return None
    device = tensors[0].device
    extra = (_scalar_tensor(scalars, device), _update_scalar_tensor(tuple(update_scalars), device))
    _, flips = _run_compiled(_compiled_with(update), flat, extra)
    return flips


def product_(tensors: Sequence[Tensor], compiled: bool) -> None:
    """Set param from (param, weight, latent)."""
    _run(algorithm.product_, algorithm.product_eagerly_, tensors, compiled)


def mask_gradient_(tensors: Sequence[Tensor], scalars: Scalars, compiled: bool) -> None:
    """Mask grad in (grad, latent)."""
    _run(algorithm.mask_gradient_, algorithm.mask_gradient_eagerly_, tensors, compiled, scalars)


def masked_square_sum(tensors: Sequence[Tensor], compiled: bool) -> Tensor | None:
    """Sum of squares of g_W from (grad, latent)."""
    return _run(algorithm.masked_square_sum, algorithm.masked_square_sum, tensors, compiled)


def compilation_is_off() -> bool:
    """Whether torch.compile is switched off on this host, by TORCH_COMPILE_DISABLE or torch's configuration."""
    return bool(torch._dynamo.config.disable)


def _run(
    to_compile: Callable, eager: Callable, tensors: Sequence[Tensor], compiled: bool, scalars: Scalars | None = None
) -> Tensor | None:
    """Apply one of two forms of a function, piece by piece; results of the pieces are added up."""
    compiled = compiled and not _compiler_failed and tensors[0].numel() >= SMALLEST_COMPILED
    flat = _flat_views(tensors)
    if compiled and flat is not None:
        extra = () if scalars is None else (_scalar_tensor(scalars, tensors[0].device),)
        ran, result = _run_compiled(_compiled(to_compile), flat, extra)
        if ran:
            return result
    eager_extra = () if scalars is None else (scalars,)
    if flat is None:  # the tensors do not share a memory order: element by element, in their own shape
        return _add_up(eager, [tuple(tensors)], eager_extra)
    size = EAGER_PIECE if tensors[0].device.type == "cpu" else COMPILED_PIECE
    return _add_up(eager, _pieces(flat, size), eager_extra)


def _run_compiled(function: Callable, flat: Sequence[Tensor], extra: tuple) -> tuple[bool, Tensor | None]:
    """Whether it ran, and the result. Only a first call compiles: an error of a later one is not a compiler's."""
    global _compiler_failed
    first_call = function not in _has_run
    try:
        result = _add_up(function, _pieces(flat, COMPILED_PIECE), extra)
    except Exception as error:  # what a missing or broken compiler raises differs between torch's back ends
        if not first_call:
            raise
        _compiler_failed = True
        warnings.warn(
            "BinMask's step could not be compiled and runs eagerly: same maths, slower. "
            f"Install a C++ compiler, or pass compile=False to patch. ({type(error).__name__})",
            stacklevel=2,
        )
        return False, None
    _has_run.add(function)
    return True, result


def compiler_failed() -> bool:
    """Whether this process has given up compiling: a rank that has rounds differently from one that has not."""
    return _compiler_failed


def _add_up(function: Callable, pieces: Iterable[Sequence[Tensor]], extra: tuple) -> Tensor | None:
    total = None
    for piece in pieces:
        result = function(*piece, *extra)
        total = result if total is None or result is None else total + result
    return total


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True, fullgraph=True, options=ONE_LOOP)


@functools.cache
def _compiled_with(update: Callable) -> Callable:
    # A function of its own for each U: torch.compile would count them all as recompilations of one.
    def learn_and_update_(*arguments: Tensor) -> Tensor:
        return algorithm.learn_and_update_(update, *arguments)

    return torch.compile(learn_and_update_, dynamic=True, fullgraph=True, options=ONE_LOOP)


@functools.lru_cache(maxsize=8)  # all weights of a group share one in nearly every step
def _scalar_tensor(scalars: Scalars, device: torch.device) -> Tensor:
    return scalars.tensor(device)


@functools.lru_cache(maxsize=8)
def _update_scalar_tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _pieces(flat: Sequence[Tensor], size: int) -> Iterable[Sequence[Tensor]]:
    """The 1-D tensors, cut in the same places; empty ones give none."""
    if len(flat[0]) == 0:
        return []
    if len(flat[0]) <= size:  # nearly always, and split takes as long as a small weight
        return [[tensor.data for tensor in flat]]
    columns = zip(*(tensor.split(size) for tensor in flat), strict=True)
    # .data: torch.compile guards the base of a view too, whose shapes differ
    return ([piece.data for piece in column] for column in columns)


def _flat_views(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """1-D views in the memory order of the first tensor (channels_last, say), or None if another one differs."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(-1) for tensor in tensors]
    strides = tensors[0].stride()
    order = sorted(range(tensors[0].ndim), key=lambda dim: -strides[dim])
    views = [tensor.permute(order) for tensor in tensors]
    if not all(view.is_contiguous() for view in views):
        return None
    return [view.view(-1) for view in views]
