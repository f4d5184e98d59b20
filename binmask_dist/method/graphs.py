"""Compiles the functions of `algorithm.py`: one graph of each for weights of any size.

A graph is compiled ahead of time, from tensors that stand for all others. What torch.compile does at every call, to
find out whether a graph fits, takes longer than the step of a small weight; here a graph fits by its key.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Left alone, inductor would work out the new latents twice: for the count of flips, and once more, in a second loop
# over all memory, to store them. Realised intermediates keep both in one loop, where they stay in registers.
ONE_LOOP: dict[str, Any] = {"realize_opcount_threshold": 3}

# elements of the tensors that stand for all others: inductor lets a kernel use all cores if they are worth it here
TYPICAL = 2**20

_compiler_failed = False
_graphs: dict[tuple, Callable] = {}


def compilation_is_off() -> bool:
    """Whether torch.compile is switched off on this host, by TORCH_COMPILE_DISABLE or torch's configuration."""
    return bool(torch._dynamo.config.disable)


def compiler_failed() -> bool:
    """Whether this process has given up compiling: a rank that has rounds differently from one that has not."""
    return _compiler_failed


def can_compile(flat: Sequence[Tensor] | None) -> bool:
    """Whether there can be a graph for these tensors: plain ones, 1-D, of one size and device."""
    if _compiler_failed or flat is None:
        return False
    # torch.compile takes sizes 0 and 1 for constants, which would be further graphs
    if flat[0].numel() < 2 or not all(type(tensor) is Tensor for tensor in flat):
        return False
    return flat[0].dtype != torch.float64  # the compiled update has fp32 inside, and would round W


def graph(function: Callable, flat: Sequence[Tensor], extra: tuple[Tensor, ...]) -> Callable | None:
    """The compiled function of 1-D tensors of one size, and of further ones whose shapes never change.

    None if it cannot be compiled; then nothing is, from now on.
    """
    global _compiler_failed
    device = flat[0].device
    # a kernel has its number of threads in it
    key = (function, device, torch.get_num_threads(), *[tensor.dtype for tensor in flat])
    if key not in _graphs:
        typical = [torch.empty(TYPICAL, dtype=tensor.dtype, device=device) for tensor in flat]
        try:
            _graphs[key] = _compile(function, (*typical, *extra))
        except Exception as error:  # what a missing or broken compiler raises differs between torch's back ends
            _compiler_failed = True
            warnings.warn(
                "BinMask's step could not be compiled and runs eagerly: same maths, slower. "
                f"Install a C++ compiler, or pass compile=False to patch. ({type(error).__name__})",
                stacklevel=2,
            )
            return None
    return _graphs[key]


def _compile(function: Callable, arguments: tuple[Tensor, ...]) -> Callable:
    compiled: Any = torch.compile(function, dynamic=True, fullgraph=True, options=ONE_LOOP)
    ahead_of_time = compiled.aot_compile((arguments, {}))
    ahead_of_time.disable_guard_check()
    return ahead_of_time


@functools.cache
def with_update(function: Callable, update: Callable) -> Callable:
    """A function that takes U into its pass, for one U: the same object every time, so that it has one graph."""

    def bound(*arguments: Tensor) -> Tensor | None:
        return function(update, *arguments)

    return bound
