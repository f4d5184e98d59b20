"""Small weights take an eager step together: as one flat tensor, in copies that fit in the processor's cache.

An eager step on a small weight is nearly all dispatch, and a network can have hundreds of them. What one weight gives
to a function of `algorithm.py` (its gradient, W, latent, ...) is called a row: tensors of one size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from binmask_dist.method.scratch import scratch

Row = Sequence[Tensor]

LARGEST = 2**12  # elements of a weight; to copy more takes as long as to dispatch
TOGETHER = 2**17  # elements; some megabytes of copies, however large the network is


class Joined:
    """Flat rows end to end, in copies: one tensor for each column."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.sizes = [row[0].numel() for row in rows]
        self.tensors = [
            torch.cat(column, out=scratch(f"column {place}", sum(self.sizes), column[0]))
            for place, column in enumerate(zip(*rows, strict=True))
        ]

    def write_back(self, columns: Sequence[int]) -> None:
        torch._foreach_copy_(
            [row[column] for column in columns for row in self.rows],
            [part for column in columns for part in self.tensors[column].split(self.sizes)],
        )


def together(rows: Sequence[Row | None]) -> Iterator[list[int]]:
    """All indices of `rows`; the small ones of one kind in batches. None stands for a row that cannot be flat."""
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
