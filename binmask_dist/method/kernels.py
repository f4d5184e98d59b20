"""Runs the functions of `algorithm.py` over weights of any shape: compiled, or eagerly in cache-sized pieces, to which
small weights are put together."""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from binmask_dist.method import algorithm
from binmask_dist.method.algorithm import Scalars
from binmask_dist.method.graphs import can_compile, compiler_failed, graph, with_update
from binmask_dist.method.joining import Columns, Joined, Row, flat_view, together

EAGER_PIECE = 2**18  # elements; temporaries then stay in the processor's cache, and small next to any large weight
COMPILED_PIECE = 2**30  # flips are counted in 32 bits

# from the tensors of a row, their flat views, and the sizes of the rows if there are several
Apply = Callable[..., Tensor | None]


def learn_(rows: Sequence[Row], scalars: Scalars, compiled: bool, owns_memory: bool = False) -> list[Tensor | None]:
    """Update each (grad, weight, latent, exp_avg, exp_avg_sq) before U. Returns how many masks flipped in each.

    `owns_memory`: all but the gradients may be moved in memory; they must be the very tensors that are kept.
    """
    apply = _either(algorithm.learn_, algorithm.learn_eagerly_, compiled, scalars, by_row=True)
    columns = Columns(written=(0, 2, 3, 4), movable=(1, 2, 3, 4) if owns_memory else ())
    return _for_each(apply, rows, compiled, columns)


def learn_and_update_(
    update: Callable, rows: Sequence[Row], scalars: Scalars, update_scalars: list[float]
) -> list[Tensor | None]:
    """Update each (grad, weight, latent, exp_avg, exp_avg_sq, param, what U keeps...) in one pass, if compiled.

    Returns how many masks flipped in each; None, and has changed nothing, where it cannot be compiled.
    """
    apply = _with_update(algorithm.learn_and_update_, update, scalars, update_scalars)
    return _one_by_one(apply, rows)


def update_(update: Callable, rows: Sequence[Row], scalars: Scalars, update_scalars: list[float]) -> list[bool]:
    """Update each (grad, param, what U keeps...) in one pass, if compiled. Returns which were updated."""
    apply = _with_update(algorithm.update_, update, scalars, update_scalars)
    done = []
    for row in rows:
        flat = _flat_views(row)
        can = can_compile(flat)
        if can:
            apply(row, flat)
        done.append(can and not compiler_failed())  # which may turn out now, for another dtype than before
    return done


def product_(rows: Sequence[Row], compiled: bool) -> None:
    """Set param in each (param, weight, latent)."""
    apply = _either(algorithm.product_, algorithm.product_eagerly_, compiled)
    _for_each(apply, rows, compiled, Columns(written=(0,), not_read=(0,)))


def mask_gradient_(rows: Sequence[Row], scalars: Scalars, compiled: bool) -> None:
    """Mask grad in each (grad, latent)."""
    apply = _either(algorithm.mask_gradient_, algorithm.mask_gradient_eagerly_, compiled, scalars)
    _for_each(apply, rows, compiled, Columns(written=(0,)))


def masked_square_sum(rows: Sequence[Row], compiled: bool) -> list[Tensor]:
    """Sums of squares of g_W over all (grad, latent), to be added up."""
    apply = _either(algorithm.masked_square_sum, algorithm.masked_square_sum, compiled)
    return [result for result in _for_each(apply, rows, compiled, Columns()) if result is not None]


def _for_each(apply: Apply, rows: Sequence[Row], compiled: bool, columns: Columns) -> list[Tensor | None]:
    """Apply a function to all rows, eagerly to small ones together. Returns its result for each row.

    A single result of rows that were taken together stays with the first.
    """
    if compiled and not compiler_failed():  # to call a kernel for each row takes less time than copies would
        return _one_by_one(apply, rows)
    results: list[Tensor | None] = [None] * len(rows)
    for batch in together([row if _share_memory_order(row) else None for row in rows]):
        first = batch[0]
        if len(batch) == 1:
            results[first] = apply(rows[first], _flat_views(rows[first]))
            continue
        joined = Joined([rows[index] for index in batch], columns)
        result = apply(joined.tensors, joined.tensors, joined.sizes)
        each = [result] if result is None or result.ndim == 0 else result.unbind()
        for index, of_row in zip(batch, each, strict=False):
            results[index] = of_row
        joined.write_back()
    return results


def _one_by_one(apply: Apply, rows: Sequence[Row]) -> list[Tensor | None]:
    return [apply(row, _flat_views(row)) for row in rows]


def _either(
    to_compile: Callable, eager: Callable, compiled: bool, scalars: Scalars | None = None, by_row: bool = False
) -> Apply:
    """One of two forms of a function, piece by piece; results of the pieces are added up.

    `by_row`: the eager form must be told the sizes of rows that are taken together.
    """

    def apply(tensors: Row, flat: Row | None, sizes: Sequence[int] = ()) -> Tensor | None:
        if compiled and can_compile(flat):
            assert flat is not None
            extra = () if scalars is None else (_scalar_tensor(scalars, flat[0].device),)
            ran, result = _run_compiled(to_compile, flat, extra)
            if ran:
                return result
        eager_extra = (() if scalars is None else (scalars,)) + ((sizes,) if by_row and sizes else ())
        if flat is None:  # the tensors do not share a memory order: element by element, in their own shape
            return _add_up(eager, [tuple(tensors)], eager_extra)
        size = EAGER_PIECE if flat[0].device.type == "cpu" else COMPILED_PIECE
        return _add_up(eager, _pieces(flat, size), eager_extra)

    return apply


def _with_update(function: Callable, update: Callable, scalars: Scalars, update_scalars: list[float]) -> Apply:
    """A function that takes U into its pass; there is no eager form of it."""
    bound = with_update(function, update)
    extras: dict[torch.device, tuple[Tensor, ...]] = {}  # one for nearly all networks

    def apply(tensors: Row, flat: Row | None) -> Tensor | None:
        if not can_compile(flat):
            return None
        assert flat is not None
        device = flat[0].device
        if device not in extras:
            extras[device] = (_scalar_tensor(scalars, device), _update_scalar_tensor(tuple(update_scalars), device))
        return _run_compiled(bound, flat, extras[device])[1]

    return apply


def _run_compiled(function: Callable, flat: Row, extra: tuple[Tensor, ...]) -> tuple[bool, Tensor | None]:
    """Whether it ran, and the result."""
    compiled = graph(function, flat, extra)
    if compiled is None:
        return False, None
    return True, _add_up(compiled, _pieces(flat, COMPILED_PIECE), extra)


def _add_up(function: Callable, pieces: Iterable[Row], extra: tuple) -> Tensor | None:
    total = None
    for piece in pieces:
        result = function(*piece, *extra)
        total = result if total is None or result is None else total + result
    return total


@functools.lru_cache(maxsize=8)  # all weights of a group share one in nearly every step
def _scalar_tensor(scalars: Scalars, device: torch.device) -> Tensor:
    return scalars.tensor(device)


@functools.lru_cache(maxsize=8)
def _update_scalar_tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _pieces(flat: Row, size: int) -> Iterable[Row]:
    """The 1-D tensors, cut in the same places; empty ones give none."""
    if flat[0].numel() == 0:
        return []
    if flat[0].numel() <= size:  # nearly always, and split takes as long as a small weight
        return [flat]
    return zip(*(tensor.split(size) for tensor in flat), strict=True)


def _flat_views(tensors: Row) -> list[Tensor] | None:
    """1-D views in the memory order that all tensors share (channels_last, say), or None if one differs."""
    return [flat_view(tensor) for tensor in tensors] if _share_memory_order(tensors) else None


def _share_memory_order(tensors: Row) -> bool:
    """Whether all are dense, with their elements in the same order."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    strides = tensors[0].stride()
    order = sorted(range(tensors[0].ndim), key=lambda dim: -strides[dim])
    return all(tensor.permute(order).is_contiguous() for tensor in tensors)
