"""Classification of the rows of a sparse matrix, which stays sparse: only a batch of it is ever dense.

A .npz file holds a matrix as `scipy.sparse.save_npz` writes it, and beside it the array `y` with the classes (or
another, `label_column`). Where there is an array `patient`, all rows of a patient are held out together. Values are
divided by the largest of their column in the training part, so that zeros stay zeros.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from sklearn.preprocessing import MaxAbsScaler
from torch.utils.data import Dataset

from binmask_dist.training.columns import Classes
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.models import first_line
from binmask_dist.training.tasks.base import Batch, RunError, Task
from binmask_dist.training.tasks.rows import RowClassification, check_model

TOGETHER = "patient"  # rows with the same number in this array are never in two parts
Rows = tuple[scipy.sparse.csr_matrix, np.ndarray]


class SparseRows(Dataset):
    def __init__(self, inputs: scipy.sparse.csr_matrix, labels: np.ndarray) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> Rows:  # what torch asks for in place of rows one by one
        return self.inputs[indices], self.labels[indices]


class SparseTableClassification(RowClassification):
    measures_training = True

    def __init__(self, config: TrainConfig) -> None:
        check_model(config)
        Task.__init__(self, config)
        inputs, labels, groups = read_npz(Path(config.dataset).expanduser(), config.label_column or "y")
        self.classes = Classes.of(None, config.label_column or "y", labels.tolist())
        numbers = np.array([self.classes.number(value) for value in labels.tolist()])
        self.binary = len(self.classes.names) == 2
        self.metrics = ("accuracy", "loss", "auc") if self.binary else ("accuracy", "loss")
        fractions = (config.validation_fraction, config.test_fraction)
        train, validation, test = split_rows(groups, fractions, config.seed if config.split_by_seed else 0)
        for name, part in (("test", test), ("validation", validation)):
            if config.validation_fraction or name == "test":
                _check_classes(name, numbers[part], len(self.classes.names))
        scaler = MaxAbsScaler().fit(inputs[train])
        self.scaling = {"largest": scaler.max_abs_.tolist()}
        scaled = scaler.transform(inputs)
        self.train, self.test = SparseRows(scaled[train], numbers[train]), SparseRows(scaled[test], numbers[test])
        if config.validation_fraction:
            self.validation = SparseRows(scaled[validation], numbers[validation])
        self.size_model(inputs.shape[1])

    def collate(self, rows: Any) -> Batch:
        inputs, labels = rows
        return torch.from_numpy(inputs.toarray()), torch.from_numpy(labels)

    def arrays(self, part: SparseRows) -> Rows:
        return part.inputs, part.labels


def _check_classes(name: str, labels: np.ndarray, classes: int) -> None:
    if len(labels) == 0 or (classes == 2 and len(set(labels)) < 2):
        raise RunError(f"the {name} part has no rows of some class; hold out more with {name}_fraction")


def read_npz(path: Path, label: str) -> tuple[scipy.sparse.csr_matrix, np.ndarray, np.ndarray]:
    """The matrix, its labels, and which rows belong together."""
    if not path.is_file():
        raise RunError(f"there is no file {path}")
    try:
        inputs = scipy.sparse.load_npz(path).tocsr().astype(np.float32)
        with np.load(path) as arrays:
            others = {name: arrays[name] for name in (label, TOGETHER) if name in arrays}
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"{path} holds no sparse matrix as scipy.sparse.save_npz writes it: {first_line(error)}"
        ) from None
    if label not in others:
        raise RunError(f"{path} has no array '{label}' with the classes; add it, or give label_column")
    for name, array in others.items():
        if array.shape != (inputs.shape[0],):
            raise RunError(f"the array '{name}' in {path} must have one entry for each of {inputs.shape[0]} rows")
    if not np.isfinite(inputs.data).all():
        raise RunError(f"{path} has entries that are NaN or inf; fill them in")
    return inputs, others[label], others.get(TOGETHER, np.arange(inputs.shape[0]))


def split_rows(groups: np.ndarray, fractions: tuple[float, float], seed: int) -> list[np.ndarray]:
    """Rows to train, validate and test on: groups in random order, until each part has its fraction of the rows."""
    names, group_of_row = np.unique(groups, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    sizes = np.bincount(group_of_row)[order]
    ends = np.cumsum(sizes) / len(groups)
    validation, test = fractions
    part_of_group = np.zeros(len(names), dtype=int)
    part_of_group[order] = np.searchsorted([1 - validation - test, 1 - test], ends - 1e-9, side="left")
    part_of_row = part_of_group[group_of_row]
    return [np.flatnonzero(part_of_row == part) for part in range(3)]
