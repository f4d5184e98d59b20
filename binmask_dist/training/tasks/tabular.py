"""Classification of table rows by a multi-layer perceptron."""

import os
import warnings
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch.utils.data import TensorDataset

from binmask_dist.training.columns import find_table, is_index, is_text
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.tasks.base import RunError
from binmask_dist.training.tasks.rows import RowClassification, check_model

MOST_WORDS = 1000  # in a column that is made into one input for each of its words


class TableClassification(RowClassification):
    """Numbers are standardised and words made into ones and zeros, by what the training part holds."""

    def __init__(self, config: TrainConfig) -> None:
        if config.streaming:
            raise RunError("a table is scaled by all of its training rows: the tabular task cannot stream")
        check_model(config)
        super().__init__(config)
        if not config.input_columns:  # all columns are inputs
            everything = [*self.data.train.column_names, *self.data.test.column_names]
            self.data.check_columns([name for name in everything if not is_index(name)])
        columns = find_table(self.data.features, config.input_columns, self.data.label)
        left_out = [name for name in self.data.features if name not in (*columns, self.data.label)]
        if left_out and not config.input_columns and os.environ.get("RANK", "0") == "0":  # said by one process
            warnings.warn(
                "columns that hold neither numbers nor words, or the index of a pandas table, are left out: "
                f"{', '.join(left_out)}",
                stacklevel=2,
            )
        self.scalers = {name: self._fitted(name) for name in columns}
        self.scaling = [{"column": name, **scaling(scaler)} for name, scaler in self.scalers.items()]
        self.train = self._examples(self.data.train)
        self.test = self._examples(self.data.test)
        self.size_model(self.train.tensors[0].shape[1])

    def _fitted(self, name: str) -> StandardScaler | OneHotEncoder:
        values = column_matrix(self.data.train, name)
        if not is_text(self.data.features[name]):
            return StandardScaler().fit(values)
        encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(values)
        words = len(encoder.categories_[0])
        if words > MOST_WORDS:
            raise RunError(f"the column '{name}' has {words} different words; leave it out of input_columns")
        return encoder

    def _examples(self, part: Dataset) -> TensorDataset:
        inputs = []
        for name, scaler in self.scalers.items():
            values = column_matrix(part, name)
            if values.shape[1] != scaler.n_features_in_:
                raise RunError(
                    f"the lists in column '{name}' have {scaler.n_features_in_} numbers in the training data and "
                    f"{values.shape[1]} in the test data; make them alike"
                )
            inputs.append(scaler.transform(values))
        return TensorDataset(torch.from_numpy(np.hstack(inputs).astype(np.float32)), torch.tensor(self.labels(part)))

    def arrays(self, part: TensorDataset) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = part.tensors
        return inputs.numpy(), labels.numpy()


def column_matrix(part: Dataset, name: str) -> np.ndarray:
    """One row for each of the table's: a word, a number, or the numbers of a list, which must all be of one length."""
    if is_text(part.features[name]):
        return np.array(part[name][:], dtype=object)[:, None]
    # as they are: float32, which `datasets` takes of itself, cannot tell the seconds of a time apart
    values = part.with_format("numpy", dtype=np.float64)[name][:]
    if values.dtype == object:
        raise RunError(f"the lists in column '{name}' are not all of the same length")
    values = values.astype(np.float64).reshape(len(part), -1)
    missing = int((~np.isfinite(values)).any(axis=1).sum())
    if missing:
        raise RunError(f"the column '{name}' has no number in {missing} rows; fill them in, or leave the column out")
    return values


def scaling(scaler: StandardScaler | OneHotEncoder) -> dict[str, Any]:
    if isinstance(scaler, OneHotEncoder):
        return {"words": list(scaler.categories_[0])}
    return {"mean": scaler.mean_.tolist(), "std": scaler.scale_.tolist()}
