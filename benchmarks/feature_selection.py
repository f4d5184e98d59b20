"""Section 3.1 of the paper: BinMask against other methods of feature selection.

    .venv/bin/python -m pip install '.[benchmarks]'
    .venv/bin/python benchmarks/feature_selection.py --data data --trials 3

Every selection and every accuracy is a JSON file of its own under --results, written when it is done: the same command
goes on where another was stopped. The table, the figure and the bars are made from these files, and --report makes
them alone.

The protocol: features scaled to [0, 1]; a random fifth of the rows to test on (MNIST: its own); n_t features are what
BinMask selects with lam 1e-3 (5e-4 for gene expressions) in the first trial; all methods select
n_t - i * floor(n_t / 5) for i = 0..4; a network with new weights is trained on what was selected, and tested. What was
selected with other settings is not mixed with it: give another folder for --results.
"""

import argparse
import dataclasses
import json
import os
import platform
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import selection_report
import torch
from selection_methods import METHODS, Choice, Data, binmask_search, train
from sklearn.model_selection import train_test_split
from torch import nn

from binmask_dist.files import write_atomically
from binmask_dist.networks import MLP, LeNet5
from binmask_dist.report.archive import unpacked
from binmask_dist.selection.fitting import Training
from binmask_dist.selection.network import mlp
from binmask_dist.selection.rows import Rows, Scaling
from binmask_dist.selection.table import read_table
from binmask_dist.training.environment import environment

ROOT = Path(__file__).parent.parent
PIXELS = (1, 28, 28)
FILES = {
    "Isolet": "isolet.parquet",
    "BASEHOCK": "basehock.npz",
    "Dexter": "dexter.npz",
    "MNIST-MLP": "mnist-train.parquet",
    "MNIST-CNN": "mnist-train.parquet",
    "gene_gordon": "gene_gordon.parquet",
}


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
    options: argparse.Namespace

    @property
    def is_mnist(self) -> bool:
        return self.name.startswith("MNIST")

    @property
    def keeps_shape(self) -> bool:
        return self.name == "MNIST-CNN"

    def trial(self, number: int) -> tuple[Data, Any, np.ndarray]:
        """The training part, and the test part's inputs and labels."""
        if self.test is not None:
            x, y, (x_test, y_test) = self.x, self.y, self.test
        else:
            x, x_test, y, y_test = train_test_split(self.x, self.y, test_size=0.2, random_state=number)
        epochs = self.options.epochs or (10 if self.is_mnist else 100)
        make_network = (mnist_cnn if self.keeps_shape else mnist_mlp) if self.is_mnist else mlp
        data = Data(
            x=x,
            y=y,
            classes=self.classes,
            make_network=make_network,
            training=Training(epochs=epochs),
            input_shape=PIXELS if self.keeps_shape else None,
            max_steps=self.options.max_steps,
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
        }


def load(name: str, options: argparse.Namespace) -> Benchmark:
    path = options.data / FILES[name] if name in FILES else Path(name)
    if name in FILES:
        table = read_table(path, "", ["split"] if path.name == "isolet.parquet" else [])
    else:
        table = read_table(path, options.target, options.ignore_columns)
    classes, y = np.unique(table.y, return_inverse=True)
    x, test = table.x, None
    if name.startswith("MNIST"):
        held_out = read_table(options.data / "mnist-test.parquet")
        rows = slice(None, options.rows or None)
        scaling = Scaling.of(np.array([[0.0] * x.shape[1], [255.0] * x.shape[1]]))
        x, y, test = x[rows], y[rows], (scaling.apply(held_out.x), held_out.y)
    else:
        scaling = Scaling.of(x)
    return Benchmark(name if name in FILES else path.stem, scaling.apply(x), y, len(classes), test, options)


def counts_of(benchmark: Benchmark, folder: Path) -> list[int]:
    """n_t - i * floor(n_t / 5), from the first trial: the same for all methods and trials."""
    path, settings = folder / "counts.json", benchmark.settings
    if not path.exists():
        data, _, _ = benchmark.trial(0)
        selection = binmask_search(data, 0, settings["count_lam"]).above_threshold()
        write(path, {"n_t": selection.count, "settings": settings})
    saved = json.loads(path.read_text())
    if saved["settings"] != settings:
        raise SystemExit(f"{folder} holds results of other settings, {saved['settings']}; give another --results")
    return list(dict.fromkeys(saved["n_t"] - i * (saved["n_t"] // 5) for i in range(5)))


def select(benchmark: Benchmark, method: str, trial: int, counts: list[int], folder: Path) -> dict[int, Choice]:
    path = folder / f"{method}-{trial}.json"
    if not path.exists():
        data, _, _ = benchmark.trial(trial)
        torch.manual_seed(trial)
        start, of_processor = time.perf_counter(), time.process_time()
        choices = METHODS[method](data, counts, trial)
        times = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - of_processor}
        selections = {count: {"columns": choice.columns, **choice.about} for count, choice in choices.items()}
        write(path, {**times, **place(), "selections": selections})
    saved = json.loads(path.read_text())["selections"]
    return {int(count): Choice(about.pop("columns"), about) for count, about in saved.items()}


def place() -> dict[str, Any]:
    where = environment()
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "commit": where["git_commit"],
    }


def evaluate(benchmark: Benchmark, choice: Choice, trial: int) -> float:
    """Accuracy of a network with new weights on the chosen features, or on zeros in place of the others."""
    data, x_test, y_test = benchmark.trial(trial)
    if not choice.columns:  # the best guess without any feature
        return float((y_test == np.bincount(data.y).argmax()).mean())
    columns = np.array(choice.columns, dtype=int)
    if benchmark.keeps_shape:
        keep = np.zeros(data.x.shape[1], dtype=np.float32)
        keep[columns] = 1
        x, x_test, shape = data.x * keep, x_test * keep, PIXELS
    else:
        x, x_test, shape = data.x[:, columns], x_test[:, columns], (len(columns),)
    if sp.issparse(x):
        x, x_test = x.toarray(), x_test.toarray()
    x, x_test = (np.ascontiguousarray(part, dtype=np.float32) for part in (x, x_test))
    torch.manual_seed(1_000_003 + trial)  # not the weights that the features were selected with
    model = data.make_network(len(columns), data.classes)
    train(model, Rows(x, data.y, None, shape), data.training, 1_000_003 + trial)
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part.view(-1, *shape)) for part in torch.from_numpy(x_test).split(1000)])
    return float((outputs.argmax(1).numpy() == y_test).mean())


def write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1, default=lambda value: value.item()) + "\n")


def run(options: argparse.Namespace) -> None:
    for place, name in enumerate(options.datasets, 1):
        benchmark = load(name, options)
        folder = options.results / benchmark.name
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{benchmark.name}, data set {place} of {len(options.datasets)}: how many features?", flush=True)
        counts = counts_of(benchmark, folder)
        every = [(trial, method) for trial in range(options.trials) for method in options.methods]
        jobs = [job for job in every if not all(path.exists() for path in accuracy_files(folder, *job, counts))]
        print(f"{', '.join(map(str, counts))}; {len(every) - len(jobs)} of {len(every)} jobs are done", flush=True)
        seconds: dict[str, list[float]] = defaultdict(list)
        for number, (trial, method) in enumerate(jobs):
            what = f"{benchmark.name}, job {number + 1} of {len(jobs)}: trial {trial + 1} of {options.trials}, {method}"
            print(what + time_left(jobs[number:], seconds), flush=True)
            start = time.perf_counter()
            choices = select(benchmark, method, trial, counts, folder)
            for path, (count, choice) in zip(
                accuracy_files(folder, trial, method, counts), choices.items(), strict=True
            ):
                if not path.exists():
                    accuracy = evaluate(benchmark, choice, trial)
                    write(path, {"accuracy": accuracy, "chosen": len(choice.columns)})
                    print(f"  {count} features: {accuracy:.2%}", flush=True)
            seconds[method].append(time.perf_counter() - start)


def accuracy_files(folder: Path, trial: int, method: str, counts: list[int]) -> list[Path]:
    return [folder / f"{method}-{trial}-{count}.json" for count in counts]


def time_left(jobs: list[tuple[int, str]], seconds: dict[str, list[float]]) -> str:
    """From the time of each method's jobs so far; one that is still to come is taken to be like the others."""
    means = {method: float(np.mean(times)) for method, times in seconds.items()}
    if not means:
        return ""
    usual = float(np.mean(list(means.values())))
    left = sum(means.get(method, usual) for _, method in jobs)
    return f", about {left / 60:.1f} min left for this data set"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with the files (data)")
    parser.add_argument("--datasets", nargs="+", default=list(FILES), help="names, or files of other data")
    parser.add_argument("--target", default="", help="target column of other files")
    parser.add_argument("--ignore_columns", nargs="+", default=[], help="columns of other files that are no features")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--max_steps", type=int, default=8, help="most lams that a search tries")
    parser.add_argument("--epochs", type=int, default=0, help="0: the protocol's")
    parser.add_argument("--rows", type=int, default=0, help="training rows of MNIST; 0: all")
    parser.add_argument("--quick", action="store_true", help="one trial of five epochs on few rows: does it run?")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "results" / "feature_selection", help="folder; for --report also a zip"
    )
    parser.add_argument("--report", action="store_true", help="only make the report, from the files that are there")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "results" / "feature_selection.md")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.epochs, options.rows, options.max_steps = 1, 5, 2_000, 3
        options.results /= "quick"
        options.document = options.results / "feature_selection.md"
    if not options.report:
        run(options)
    is_archive = options.report and options.results.suffix == ".zip"
    selection_report.write(unpacked(options.results) if is_archive else options.results, options.document)


if __name__ == "__main__":
    main()
