"""The rows of a table on this process, and the one order in which all processes draw them.

A process keeps every `world`-th row. The order of an epoch follows from seed and epoch alone, and is cut into the same
global batches for any number of processes: each takes those rows of a batch that it keeps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.utils.sparsefuncs import min_max_axis
from torch import Tensor

Matrix = Any  # a numpy array, or a scipy CSR matrix
BLOCK = 2**20  # cells of a table that are worked on at a time, so that no second table is made on the way


@dataclass(frozen=True)
class Scaling:
    """Features to [0, 1]; sparse ones are divided by their largest absolute value, so that zeros stay zeros."""

    low: np.ndarray  # both fp64: small whole numbers would wrap around
    width: np.ndarray  # zero where a feature is constant

    @classmethod
    def of(cls, x: Matrix) -> "Scaling":
        if sp.issparse(x):
            low, high = (extreme.astype(np.float64) for extreme in _extremes(x))
            largest = np.maximum(np.abs(low), np.abs(high))
            return cls(np.zeros_like(largest), np.where(low == high, 0.0, largest))
        low, high = x.min(axis=0).astype(np.float64), x.max(axis=0).astype(np.float64)
        return cls(low, high - low)

    @property
    def varies(self) -> np.ndarray:
        """Which features are not constant."""
        return self.width > 0

    def apply(self, x: Matrix) -> Matrix:
        """As fp32, in memory of its own; constant features become zeros.

        Worked out in fp64: fp32 knows neither 1e300 nor the inverse of 1e-39.
        """
        factor = np.divide(1.0, self.width, out=np.zeros(len(self.width)), where=self.varies)
        if sp.issparse(x):
            data = np.empty(len(x.data), dtype=np.float32)
            for first in range(0, len(data), BLOCK):
                part = slice(first, first + BLOCK)
                data[part] = x.data[part] * factor[x.indices[part]]
            return sp.csr_matrix((data, x.indices, x.indptr), shape=x.shape)
        scaled = np.empty(x.shape, dtype=np.float32)  # in rows, whatever order x has
        rows = max(1, BLOCK // max(1, x.shape[1]))
        for first in range(0, len(x), rows):
            part = slice(first, first + rows)
            scaled[part] = (x[part] - self.low) * factor
        return scaled


def _extremes(x: Matrix) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest value of every column of a CSR matrix; `min_max_axis` copies what it is given."""
    rows = max(1, x.shape[0] * BLOCK // max(x.nnz, 1))
    low, high = min_max_axis(x[:rows], axis=0)
    for first in range(rows, x.shape[0], rows):
        lower, higher = min_max_axis(x[first : first + rows], axis=0)
        np.minimum(low, lower, out=low)
        np.maximum(high, higher, out=high)
    return low, high


class Rows:
    """What one process trains on."""

    def __init__(
        self,
        x: Matrix,  # all rows, fp32; this process keeps its own
        target: np.ndarray,  # of all rows: class numbers, or numbers to be predicted
        weight: np.ndarray | None,  # of all rows, with mean one
        example_shape: Sequence[int],
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.count = x.shape[0]
        self.x = x if world == 1 else x[rank::world].copy()
        self.target = torch.from_numpy(target)
        self.weight = None if weight is None else torch.from_numpy(weight.astype(np.float32))
        self.example_shape = tuple(example_shape)
        self.rank, self.world = rank, world

    def copies(self, batch_size: int, least: int) -> int:
        """How often every row is in an epoch: the paper duplicates a table that is too small for `least` batches."""
        return max(1, -(-least * batch_size // self.count))

    def batches(
        self, seed: int, epoch: int, batch_size: int, least: int, sparse: bool, merge: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """This process's part of every global batch of an epoch: inputs, targets, weights.

        What is left of a last batch is dropped. `merge`: a row that is in a batch several times, as those of a small
        table are, is given once, and so much more weight.
        """
        copies = self.copies(batch_size, least)
        batches = copies * self.count // batch_size
        order = np.random.default_rng((seed, epoch)).permutation(np.tile(np.arange(self.count), copies))
        for batch in order[: batches * batch_size].reshape(batches, batch_size):
            mine = batch[batch % self.world == self.rank]
            times = None
            if merge and copies > 1:
                mine, counts = np.unique(mine, return_counts=True)
                times = torch.from_numpy(counts.astype(np.float32))
            weight = None if self.weight is None else self.weight[mine]
            if times is not None:
                weight = times if weight is None else weight * times
            yield self._inputs(mine // self.world, sparse), self.target[mine], weight

    def _inputs(self, places: np.ndarray, sparse: bool) -> Tensor:
        rows = self.x[places]
        if sp.issparse(rows):
            if sparse:
                starts, columns, values = map(torch.from_numpy, (rows.indptr, rows.indices, rows.data))
                return torch.sparse_csr_tensor(starts, columns, values, size=rows.shape, check_invariants=False)
            rows = rows.toarray()
        return torch.from_numpy(rows).view(len(places), *self.example_shape)
