"""One trial of benchmarks/feature_selection.py: one method on one data set, for all counts.

    .venv/bin/python benchmarks/selection_trial.py --data data --dataset Isolet --method BinMask --trial 0

selection.json     what was selected for every count, how long that took and where
accuracies.json    of networks that were trained anew, so far
result.json        both, when all is there: the trial is finished

Each is written when it is done, and the same command goes on from there. The counts are those of the data set and the
settings: the first trial that needs them finds them, and leaves them in counts/, two folders above its own, for all.
"""

import argparse
import fcntl
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from selection_data import PIXELS, RESULTS, Benchmark, add_options, load
from selection_methods import METHODS, Choice, binmask_search, train

from binmask_dist.files import write_atomically
from binmask_dist.selection.network import is_row_by_row
from binmask_dist.selection.rows import Rows
from binmask_dist.training.environment import environment


def counts_of(benchmark: Benchmark, results: Path) -> list[int]:
    """n_t - i * floor(n_t / 5), from the first trial: the same for all methods and trials."""
    path = benchmark.counts_file(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # trials that run beside this one wait for the count
        if not benchmark.counts_file(results).exists():
            print(f"{benchmark.name}: how many features?", flush=True)
            data, _, _ = benchmark.trial(0)
            selection = binmask_search(data, 0, benchmark.settings["count_lam"]).above_threshold()
            if not selection.count:
                raise SystemExit(
                    f"with lam {selection.lam:g} no feature of {benchmark.name} is chosen: nothing to compare"
                )
            write(path, {"n_t": selection.count, "settings": benchmark.settings})
    n_t = json.loads(path.read_text())["n_t"]
    return list(dict.fromkeys(n_t - i * (n_t // 5) for i in range(5)))


def select(benchmark: Benchmark, method: str, trial: int, counts: list[int], path: Path) -> dict[str, Any]:
    """What is chosen for each count, and the time of choosing alone."""
    if not path.exists():
        data, _, _ = benchmark.trial(trial)
        torch.manual_seed(trial)
        start, of_processor = time.perf_counter(), time.process_time()
        choices = METHODS[method](data, counts, trial)
        times = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - of_processor}
        selections = {count: {"columns": choice.columns, **choice.about} for count, choice in choices.items()}
        write(path, {**times, **place(), "selections": selections})
    return json.loads(path.read_text())


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
    train(model, Rows(x, data.y, None, shape), data.training, 1_000_003 + trial, is_row_by_row(model))
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part.view(-1, *shape)) for part in torch.from_numpy(x_test).split(1000)])
    return float((outputs.argmax(1).numpy() == y_test).mean())


def write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1, default=lambda value: value.item()) + "\n")


def run(benchmark: Benchmark, method: str, trial: int, folder: Path) -> None:
    counts = counts_of(benchmark, folder.parent.parent)
    print(f"{', '.join(map(str, counts))} features", flush=True)
    selection = select(benchmark, method, trial, counts, folder / "selection.json")
    print(f"selected in {selection['seconds']:.1f} s", flush=True)
    so_far = folder / "accuracies.json"
    accuracies = json.loads(so_far.read_text()) if so_far.exists() else {}
    for count, chosen in selection["selections"].items():
        if count not in accuracies:
            accuracies[count] = evaluate(benchmark, Choice(chosen["columns"]), trial)
            write(so_far, accuracies)
            print(f"{count} features: {accuracies[count]:.2%}", flush=True)
    which = {"data": benchmark.name, "method": method, "trial": trial, "settings": benchmark.settings}
    write(folder / "result.json", {**which, **selection, "accuracies": accuracies})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dataset", required=True, help="a name, of MNIST also MNIST-MLP:20000 (rows); or another file"
    )
    parser.add_argument("--method", required=True, choices=list(METHODS))
    parser.add_argument("--trial", required=True, type=int, help="its number, which is its seed")
    parser.add_argument("--folder", type=Path, help="left out: one of this name in results/feature_selection/trials")
    add_options(parser)
    options = parser.parse_args()
    benchmark = load(options.dataset, options)
    folder = options.folder or RESULTS / "trials" / f"{benchmark.name}-{options.method}-{options.trial}"
    folder.mkdir(parents=True, exist_ok=True)
    run(benchmark, options.method, options.trial, folder)


if __name__ == "__main__":
    main()
