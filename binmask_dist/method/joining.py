"""Small weights take an eager step together, as one flat tensor.

An eager step on a small weight is nearly all dispatch, and a network can have hundreds of them. What one weight gives
to a function of `algorithm.py` (its gradient, W, latent, ...) is called a row: dense tensors of one size and memory
order. A column of several rows that lies end to end in memory is taken as it is, and any other is copied. So the
optimizer's own state is moved once, to lie end to end; gradients and parameters are not ours to move.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from binmask_dist.method.scratch import scratch

Row = Sequence[Tensor]

LARGEST = 2**16  # elements of a weight; with more, copies of its gradient and parameter take longer than dispatch
TOGETHER = 2**17  # elements; some megabytes of copies, however large the network is


@dataclass(frozen=True)
class Columns:
    """What a function does with the columns of its rows, and what may be done with them."""

    written: tuple[int, ...] = ()
    not_read: tuple[int, ...] = ()
    movable: tuple[int, ...] = ()  # in memory: the row has the very tensor that is kept


class Joined:
    """Rows end to end: one flat tensor for each column."""

    def __init__(self, rows: Sequence[Row], columns: Columns) -> None:
        self.sizes = [row[0].numel() for row in rows]
        self.tensors: list[Tensor] = []
        self.copied: list[tuple[list[Tensor], Tensor]] = []  # what to write back to, and from where
        for place, column in enumerate(zip(*rows, strict=True)):
            joined = end_to_end(column, place in columns.movable)
            if joined is None:
                joined = scratch(f"column {place}", sum(self.sizes), column[0])
                flat = [flat_view(tensor) for tensor in column]
                if place not in columns.not_read:
                    torch.cat(flat, out=joined)
                if place in columns.written:
                    self.copied.append((flat, joined))
            self.tensors.append(joined)

    def write_back(self) -> None:
        for column, joined in self.copied:
            torch._foreach_copy_(column, joined.split(self.sizes))


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def end_to_end(tensors: Sequence[Tensor], movable: bool) -> Tensor | None:
    """All elements as one flat tensor, without a copy at every call; None if that cannot be had.

    `movable`: they may be moved in memory, once.
    """
    joined = as_one(tensors)
    if joined is None and movable and len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1:
        joined = lay_end_to_end(tensors)
    return joined


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """All elements as one flat tensor, without a copy; None if they do not lie end to end in one storage."""
    first = tensors[0]
    start = end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end:
            return None
        end += tensor.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return None
    return first.as_strided(((end - start) // first.itemsize,), (1,))


def lay_end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Move tensors, which stay the same objects in the same memory order, to one new storage. Returns all of it."""
    joined = torch.cat([flat_view(tensor) for tensor in tensors])
    start = 0
    for tensor in tensors:
        tensor.data = joined.as_strided(tensor.size(), tensor.stride(), start)
        start += tensor.numel()
    return joined


def together(rows: Sequence[Row | None]) -> Iterator[list[int]]:
    """All indices of `rows`; the small ones of one kind in batches. None stands for a row that cannot be joined."""
    batches: dict[tuple, list[int]] = {}
    elements: dict[tuple, int] = {}
    for index, row in enumerate(rows):
        size = 0 if row is None else row[0].numel()
        if row is None or not 0 < size <= LARGEST:
            yield [index]
            continue
        kind = (row[0].device, *[tensor.dtype for tensor in row])
        if kind in batches and elements[kind] + size > TOGETHER:
            yield batches.pop(kind)
            elements[kind] = 0
        batches.setdefault(kind, []).append(index)
        elements[kind] = elements.get(kind, 0) + size
    yield from batches.values()
