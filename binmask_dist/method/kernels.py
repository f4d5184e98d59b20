"""Runs the functions of `algorithm.py` over tensors of any shape: compiled, or eagerly in cache-sized pieces."""

import functools
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

EAGER_PIECE = 2**16  # eager temporaries then stay in the processor's cache, and small next to any large weight
COMPILED_PIECE = 2**30  # flips are counted in 32 bits

# torch.compile guards sizes 0 and 1, which would be further graphs.
SMALLEST_COMPILED = 2

_compiler_failed = False


def run(function: Callable, tensors: Iterable[Tensor], scalars: Tensor | None, compiled: bool) -> Tensor | None:
    """Apply `function` to `tensors` (all of one shape) and `scalars`; results of the pieces are added up."""
    tensors = list(tensors)
    extra = () if scalars is None else (scalars,)
    total = None
    for pieces in _pieces(tensors, compiled and not _compiler_failed):
        result = _call(function, pieces, extra, compiled)
        total = result if total is None or result is None else total + result
    return total


def _call(function: Callable, tensors: tuple[Tensor, ...], extra: tuple[Tensor, ...], compiled: bool) -> Tensor | None:
    global _compiler_failed
    if not compiled or _compiler_failed or tensors[0].ndim != 1 or len(tensors[0]) < SMALLEST_COMPILED:
        return function(*tensors, *extra)
    try:
        # .data: torch.compile guards the base of a view too, and shapes differ there
        return _compiled(function)(*(tensor.data for tensor in tensors), *extra)
    except Exception as error:  # what a missing or broken compiler raises differs between torch's back ends
        _compiler_failed = True
        warnings.warn(
            "BinMask's step could not be compiled and runs eagerly: same masks, slower. "
            f"Install a C++ compiler, or pass compile=False to patch. ({type(error).__name__})",
            stacklevel=2,
        )
        return function(*tensors, *extra)


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True, fullgraph=True)


def compilation_is_off() -> bool:
    """Whether torch.compile is switched off on this host, by TORCH_COMPILE_DISABLE or torch's configuration."""
    return bool(torch._dynamo.config.disable)


def _pieces(tensors: list[Tensor], compiled: bool) -> Iterable[tuple[Tensor, ...]]:
    """Flat pieces of the tensors, cut in the same places; empty tensors give none."""
    if tensors[0].numel() == 0:
        return ()
    flat = _flat_views(tensors)
    if flat is None:  # the tensors do not share a memory order: element by element in their own shape
        return (tuple(tensors),)
    on_cpu = tensors[0].device.type == "cpu"
    size = EAGER_PIECE if on_cpu and not compiled else COMPILED_PIECE
    if len(flat[0]) <= size:
        return (tuple(flat),)
    return zip(*(tensor.split(size) for tensor in flat), strict=True)


def _flat_views(tensors: list[Tensor]) -> list[Tensor] | None:
    """1-D views in the memory order of the first tensor (channels_last, say), or None if another one differs."""
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(-1) for tensor in tensors]
    order = sorted(range(first.ndim), key=lambda dim: -first.stride(dim))
    views = [tensor.permute(order) for tensor in tensors]
    if not all(view.is_contiguous() for view in views):
        return None
    return [view.view(-1) for view in views]
