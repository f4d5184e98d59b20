"""Classification of table rows by a multi-layer perceptron."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch.utils.data import TensorDataset, default_collate

from binmask_dist.training.columns import find_table, is_index, is_text
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.data import Row, Stream
from binmask_dist.training.tasks.base import Batch, RunError
from binmask_dist.training.tasks.rows import RowClassification, check_model

MOST_WORDS = 1000  # in a column that is made into one input for each of its words
PIECE = 10_000  # rows of a stream

Rows = Any  # a Dataset, or a dict with the columns of some rows of a stream


class TableClassification(RowClassification):
    """Numbers are standardised and words made into ones and zeros, by what the training part holds.

    A stream is read once for that, before training.
    """

    def __init__(self, config: TrainConfig) -> None:
        if config.streaming and config.method == "logistic":
            raise RunError("logistic regression takes all training rows at once: leave streaming out")
        check_model(config)
        super().__init__(config)
        if not config.input_columns:  # all columns are inputs
            everything = [*(self.data.train.column_names or ()), *self.data.test.column_names]
            self.data.check_columns([name for name in everything if not is_index(name)])
        columns = find_table(self.data.features, config.input_columns, self.data.label)
        left_out = [name for name in self.data.features if name not in (*columns, self.data.label)]
        if left_out and not config.input_columns and os.environ.get("RANK", "0") == "0":  # said by one process
            warnings.warn(
                "columns that hold neither numbers nor words, or the index of a pandas table, are left out: "
                f"{', '.join(left_out)}",
                stacklevel=2,
            )
        self.scalers = self._fitted(columns)
        self.scaling = [{"column": name, **scaling(scaler)} for name, scaler in self.scalers.items()]
        self.test = self._examples(self.data.test)
        if config.streaming:
            self.train = Stream(self.data.train.select_columns([*columns, self.data.label]), config)
        else:
            self.train = self._examples(self.data.train)
        self.size_model(self.test.tensors[0].shape[1])

    def _fitted(self, columns: list[str]) -> dict[str, StandardScaler | OneHotEncoder]:
        """In one pass over the training rows."""
        scalers: dict[str, Any] = {name: StandardScaler() for name in columns}
        words: dict[str, set] = {name: set() for name in columns if self._holds_words(name)}
        for rows in self._pieces([*columns, self.data.label]):
            for name, scaler in scalers.items():
                values = column_matrix(rows, name, name in words)
                if name not in words:
                    check_lengths(name, vars(scaler).get("n_features_in_", values.shape[1]), values, "training")
                    scaler.partial_fit(values)
                    continue
                words[name].update(values[:, 0])
                if len(words[name]) > MOST_WORDS:
                    raise RunError(
                        f"the column '{name}' has more than {MOST_WORDS} different words; leave it out of input_columns"
                    )
        for name, found in words.items():
            encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
            scalers[name] = encoder.fit(np.array([*found], dtype=object)[:, None])
        return scalers

    def _holds_words(self, name: str) -> bool:
        return is_text(self.data.features[name])

    def _pieces(self, names: list[str]) -> Iterator[Rows]:
        """The training rows, as many at a time as there is room for."""
        if not self.config.streaming:
            yield self.data.train
            return
        rows = None
        for rows in self.data.train.iter(PIECE):
            for name in names:
                if name not in rows:
                    raise RunError(
                        f"the column '{name}' is in the test data and not in the training data; add it there"
                    )
            yield rows
        if rows is None:
            raise RunError("the training split is empty")

    def _examples(self, rows: Rows) -> TensorDataset:
        inputs = []
        for name, scaler in self.scalers.items():
            values = column_matrix(rows, name, self._holds_words(name))
            check_lengths(name, scaler.n_features_in_, values, "test")
            inputs.append(scaler.transform(values))
        return TensorDataset(torch.from_numpy(np.hstack(inputs).astype(np.float32)), torch.tensor(self.labels(rows)))

    def collate(self, examples: list) -> Batch:
        if not isinstance(examples[0], Row):
            return default_collate(examples)
        names = (*self.scalers, self.data.label)
        return list(self._examples({name: [row.values[name] for row in examples] for name in names}).tensors)

    def arrays(self, part: TensorDataset) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = part.tensors
        return inputs.numpy(), labels.numpy()


def column_matrix(rows: Rows, name: str, holds_words: bool) -> np.ndarray:
    """One row for each of the table's: a word, a number, or the numbers of a list, which must all be of one length."""
    if holds_words:
        return np.array(rows[name][:], dtype=object)[:, None]
    try:
        if isinstance(rows, Dataset):
            # as they are: float32, which `datasets` takes of itself, cannot tell the seconds of a time apart
            values = rows.with_format("numpy", dtype=np.float64)[name][:]
        else:
            values = np.array(rows[name], dtype=np.float64)
        values = values.astype(np.float64).reshape(len(values), -1)
    except ValueError as error:
        raise RunError(
            f"the lists in column '{name}' are not all of the same length, or it holds more than numbers"
        ) from error
    missing = int((~np.isfinite(values)).any(axis=1).sum())
    if missing:
        raise RunError(f"the column '{name}' has no number in {missing} rows; fill them in, or leave the column out")
    return values


def check_lengths(name: str, length: int, values: np.ndarray, part: str) -> None:
    if values.shape[1] != length:
        raise RunError(
            f"the lists in column '{name}' have {length} numbers in the training data and "
            f"{values.shape[1]} in the {part} data; make them alike"
        )


def scaling(scaler: StandardScaler | OneHotEncoder) -> dict[str, Any]:
    if isinstance(scaler, OneHotEncoder):
        return {"words": list(scaler.categories_[0])}
    return {"mean": scaler.mean_.tolist(), "std": scaler.scale_.tolist()}
