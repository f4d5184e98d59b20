"""The data sets of section 3.1 of the paper with their networks, and other tables, as the trials see them."""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from selection_methods import Data
from sklearn.model_selection import train_test_split
from torch import nn

from binmask_dist.networks import MLP, LeNet5
from binmask_dist.selection.fitting import Training
from binmask_dist.selection.network import mlp
from binmask_dist.selection.rows import Scaling
from binmask_dist.selection.table import read_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "feature_selection"
PLACE = "SELECTION_DATA"  # the environment variable that names the folder: where data lie makes no other trial
PIXELS = (1, 28, 28)
MNIST = ("MNIST-MLP", "MNIST-CNN")
FILES = {
    "Isolet": "isolet.parquet",
    "BASEHOCK": "basehock.npz",
    "Dexter": "dexter.npz",
    **dict.fromkeys(MNIST, "mnist-train.parquet"),
    "gene_gordon": "gene_gordon.parquet",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of the command and of its trials."""
    place = Path(os.environ.get(PLACE, "data"))
    parser.add_argument("--data", type=Path, default=place, help=f"folder with the files; left out: {PLACE}, or data")
    parser.add_argument("--target", default="", help="target column of other files")
    parser.add_argument("--ignore_columns", nargs="+", default=[], help="columns of other files that are no features")
    parser.add_argument("--max_steps", type=int, default=8, help="most lams that a search tries")
    parser.add_argument("--epochs", type=int, default=0, help="0: the protocol's")


def mnist_mlp(inputs: int, outputs: int) -> nn.Module:
    return MLP(outputs, in_features=inputs, hidden=(512, 512), activation="relu", batch_norm=True)


def mnist_cnn(inputs: int, outputs: int) -> nn.Module:
    return LeNet5(outputs)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A data set with its network. Test rows are given, or drawn anew in every trial."""

    name: str
    x: Any
    y: np.ndarray
    classes: int
    test: tuple[Any, np.ndarray] | None
    columns: dict[str, Any]  # which of a file's are what, if that is not known
    epochs: int
    max_steps: int

    @property
    def keeps_shape(self) -> bool:
        return self.name == "MNIST-CNN"

    def trial(self, number: int) -> tuple[Data, Any, np.ndarray]:
        """The training part, and the test part's inputs and labels."""
        if self.test is not None:
            x, y, (x_test, y_test) = self.x, self.y, self.test
        else:
            x, x_test, y, y_test = train_test_split(self.x, self.y, test_size=0.2, random_state=number)
        data = Data(
            x=x,
            y=y,
            classes=self.classes,
            make_network={"MNIST-MLP": mnist_mlp, "MNIST-CNN": mnist_cnn}.get(self.name, mlp),
            training=Training(epochs=self.epochs or (10 if self.name in MNIST else 100)),
            input_shape=PIXELS if self.keeps_shape else None,
            max_steps=self.max_steps,
        )
        return data, x_test, y_test

    @property
    def settings(self) -> dict[str, Any]:
        """What every figure depends on, and must be read with."""
        data, _, _ = self.trial(0)
        return {
            "rows": data.x.shape[0],
            "features": data.x.shape[1],
            "classes": self.classes,
            "epochs": data.training.epochs,
            "max_steps": data.max_steps,
            "count_lam": 5e-4 if self.name.startswith(("gene_", "AP_", "AP-")) else 1e-3,
            **self.columns,
        }

    def counts_file(self, results: Path) -> Path:
        """Shared by all trials. One of other settings is refused: what it counted is not for these."""
        path = results / "counts" / f"{self.name}.json"
        if path.exists() and (others := differences(json.loads(path.read_text())["settings"], self.settings)):
            raise SystemExit(
                f"{results} holds results of other settings for {self.name}: {others}; "
                "give the same ones, or another --results"
            )
        return path


def differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return ", ".join(f"{key} {there.get(key)}, not {here.get(key)}" for key in keys)


def with_rows(dataset: str, rows: int) -> str:
    """MNIST-MLP:20000 is its first 20,000 training rows. The others have all of theirs."""
    return f"{dataset}:{rows}" if dataset in MNIST and rows else dataset


def load(dataset: str, options: argparse.Namespace) -> Benchmark:
    """One of FILES, of MNIST perhaps with rows, or another file."""
    name, _, rows = dataset.partition(":")
    if rows and (name not in MNIST or not rows.isdigit()):
        name = dataset
    test = None
    if name in FILES:
        table = read_table(options.data / FILES[name], "", ["split"] if name == "Isolet" else [])
        columns: dict[str, Any] = {}
    else:
        table = read_table(Path(name), options.target, options.ignore_columns)
        columns = {"target": options.target, "ignore_columns": options.ignore_columns}
        name = Path(name).stem
        if name in MNIST:
            raise SystemExit(f"{dataset} would be taken for MNIST: give the file another name")
    classes, y = np.unique(table.y, return_inverse=True)
    x = table.x
    if name in MNIST:
        held_out = read_table(options.data / "mnist-test.parquet")
        part = slice(None, int(rows or 0) or None)
        scaling = Scaling.of(np.array([[0.0] * x.shape[1], [255.0] * x.shape[1]]))
        x, y, test = x[part], y[part], (scaling.apply(held_out.x), held_out.y)
    else:
        scaling = Scaling.of(x)
    return Benchmark(name, scaling.apply(x), y, len(classes), test, columns, options.epochs, options.max_steps)
