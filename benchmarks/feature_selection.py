"""Section 3.1 of the paper: BinMask against other methods of feature selection.

    .venv/bin/python -m pip install '.[benchmarks]'
    .venv/bin/python benchmarks/feature_selection.py --data data --trials 3

This is a sweep (docs/sweeps.md) of benchmarks/selection_trial.py: one trial for each data set, method and number, in a
folder of its own under --results. The same command goes on where another was stopped, and several may run at once, into
one folder. Each process has one thread, unless OMP_NUM_THREADS says otherwise. The table, the figure and the bars are
made from the finished trials, and --report makes them alone.

The protocol: features scaled to [0, 1]; a random fifth of the rows to test on (MNIST: its own); n_t features are what
BinMask selects with lam 1e-3 (5e-4 for gene expressions) in the first trial; all methods select
n_t - i * floor(n_t / 5) for i = 0..4; a network with new weights is trained on what was selected, and tested. What was
selected with other settings is not mixed with it: give another folder for --results.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import selection_report
import yaml
from selection_data import FILES, PLACE, RESULTS, ROOT, add_options, load, with_rows
from selection_methods import METHODS

from binmask_dist.files import write_atomically
from binmask_dist.report.archive import packing, unpacked
from binmask_dist.sweeps.main import SweepConfig, run_sweep
from binmask_dist.sweeps.sweep_file import SweepError
from binmask_dist.training.identity import digest
from binmask_dist.training.tasks.base import RunError

STOPPED = 128  # the exit code of a sweep that was told to end is above
PACKAGES = {"STG": "stg", "STG packaged": "stg", "LassoNet": "lassonet"}


def run(options: argparse.Namespace) -> int:
    """The sweep's exit code. Refuses, before any trial, what cannot run, be read, or stand beside what is there."""
    datasets = [with_rows(name, options.rows) for name in options.datasets]
    seen: dict[str, str] = {}
    for dataset in datasets:
        benchmark = load(dataset, options)
        benchmark.counts_file(options.results)
        if benchmark.name in seen:
            raise SystemExit(
                f"{seen[benchmark.name]} and {dataset} are both {benchmark.name}: give each a --results of its own"
            )
        seen[benchmark.name] = dataset
    packages = {PACKAGES[method] for method in options.methods if method in PACKAGES}
    if missing := sorted(package for package in packages if importlib.util.find_spec(package) is None):
        raise SystemExit(
            f"{' and '.join(missing)} must be installed for these methods: pip install '.[benchmarks]', "
            "or leave them out of --methods"
        )
    content = sweep(options, datasets)
    options.results.mkdir(parents=True, exist_ok=True)
    # a name for each content: of two commands at once, neither reads the other's
    file = options.results / f"sweep-{digest(content, 6)}.yaml"
    write_atomically(file, yaml.safe_dump(content, sort_keys=False))
    return run_sweep(SweepConfig(file, options.results, jobs=options.jobs, retry_failed=options.retry_failed))


def sweep(options: argparse.Namespace, datasets: list[str]) -> dict[str, Any]:
    words = [f"--epochs={options.epochs}", f"--max_steps={options.max_steps}"]
    if options.target:
        words.append(f"--target={options.target}")
    if options.ignore_columns:
        words += ["--ignore_columns", *options.ignore_columns]
    parameters = {"dataset": datasets, "method": options.methods, "trial": list(range(options.trials))}
    place = f"{PLACE}={options.data}"
    return {
        "name": "feature_selection",
        "program": "benchmarks/selection_trial.py",
        "method": "grid",
        "parameters": {key: {"values": values} for key, values in parameters.items()},
        "command": ["${env}", place, "${interpreter}", "${program}", *words, "${args}", "${folder}"],
    }


def pack(results: Path, file: Path) -> str:
    """What a report is made of, and what a sweep needs to go on."""
    count = sum(len(one.trials) for one in selection_report.read(results))
    if not count:
        raise SystemExit(f"there are no finished trials in {results}")
    finished = [path.parent for path in results.glob("trials/*/result.json")]
    trials = [path for folder in finished for path in (folder / "result.json", folder / "trial.json") if path.exists()]
    with packing(file) as packed:
        for path in sorted([*results.glob("counts/*.json"), *trials]):
            packed.write(path, path.relative_to(results))
    return f"{count:,} trials: {file}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--datasets", nargs="+", default=list(FILES), help="names, of MNIST also MNIST-MLP:20000 (rows); or other files"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--trials", type=int, default=8)
    add_options(parser)
    parser.add_argument("--rows", type=int, default=0, help="training rows of MNIST; 0: all")
    parser.add_argument("--jobs", type=int, default=1, help="trials at once; with more than one, times say little")
    parser.add_argument("--retry_failed", "--retry-failed", action="store_true", help="run failed trials again")
    parser.add_argument("--quick", action="store_true", help="one trial of five epochs on few rows: does it run?")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder; for --report also a zip")
    parser.add_argument("--report", action="store_true", help="only make the report, from the trials that are there")
    parser.add_argument("--archive", type=Path, help="write finished trials to this .zip, and do nothing else")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "results" / "feature_selection.md")
    options = parser.parse_args(arguments)
    for key in ("jobs", "trials"):
        if getattr(options, key) < 1:
            parser.error(f"--{key} must be above zero, not {getattr(options, key)}")
    if options.quick:
        options.trials, options.epochs, options.rows, options.max_steps = 1, 5, 2_000, 3
        options.results /= "quick"
        options.document = options.results / "feature_selection.md"
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    results = options.results
    if options.archive:
        print(pack(results, options.archive))
        return 0
    try:
        code = 0 if options.report else run(options)
    except (RunError, SweepError) as error:
        raise SystemExit(f"error: {error}") from None
    if code < STOPPED:
        is_archive = options.report and results.suffix == ".zip"
        selection_report.write(unpacked(results) if is_archive else results, options.document)
    return code


if __name__ == "__main__":
    sys.exit(main())
