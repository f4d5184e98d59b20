"""Feature selection on a large sparse table: memory, and time per epoch against a bare loop of the same network.

    .venv/bin/python benchmarks/selection_memory.py                    100,000 rows x 20,000 features, 1% filled

The bare loop is what one writes in torch: each minibatch is made dense, the paper's MLP, SGD with momentum. Both take
the same batches in the same order. Memory is the peak of a process of its own over what it held before the table, when
all code has been loaded by training on a tiny one: torch loads much of its own with the first optimizer. It is compared
with the table in CSR plus the model's parameters and masks. `BinMaskSelector.fit` is called with the table as it is.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch.nn import functional as F

MB = 2**20
EPOCHS = 3  # the first of them is not measured
LARGEST_MEMORY, LARGEST_RATIO = 3.0, 1.10


def make_table(rows: int, features: int, filled: float, dtype: Any = np.float32) -> tuple[sp.csr_matrix, np.ndarray]:
    """The same number of cells in every row, so that nothing larger is made on the way."""
    rng = np.random.default_rng(0)
    per_row = max(1, round(features * filled))
    indices = np.empty((rows, per_row), dtype=np.int32)
    step = features // per_row
    for part in np.array_split(np.arange(rows), max(1, rows // 1000)):  # one cell in each stretch of `step` features
        indices[part] = np.arange(per_row) * step + rng.integers(0, step, (len(part), per_row))
    data = rng.random(rows * per_row, dtype=dtype)
    starts = np.arange(0, rows * per_row + 1, per_row, dtype=np.int64 if rows * per_row > 2**31 - 1 else np.int32)
    x = sp.csr_matrix((data, indices.reshape(-1), starts), shape=(rows, features))
    useful = np.zeros(features, dtype=dtype)
    useful[: features // 20] = 1
    score = x @ useful
    return x, (score > np.median(score)).astype(np.int64)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MB


def bare_loop(x: sp.csr_matrix, y: np.ndarray, batch: int) -> list[float]:
    from binmask_dist.selection.network import mlp
    from binmask_dist.selection.rows import Rows

    torch.manual_seed(0)
    model = mlp(x.shape[1], 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)
    rows = Rows(x, y, None, (x.shape[1],))
    times = []
    for epoch in range(EPOCHS):
        start = time.perf_counter()
        for inputs, target, _ in rows.batches(0, epoch, batch, 1, sparse=False):
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return times[1:]


def with_binmask(x: sp.csr_matrix, y: np.ndarray, batch: int) -> list[float]:
    from binmask_dist import make_accelerator
    from binmask_dist.selection.fitting import Training
    from binmask_dist.selection.problem import Problem

    moments: list[float] = []
    search = Problem(x, y).search(
        make_accelerator(),
        Training(epochs=EPOCHS, batch_size=batch, min_batches=1, warmup=0.0),  # masks learn from the start
        start=1e-3,
        log=lambda record: moments.append(time.perf_counter()),
    )
    search.above_threshold()
    return list(np.diff(moments))


def with_selector(x: sp.csr_matrix, y: np.ndarray, batch: int) -> list[float]:
    from binmask_dist import BinMaskSelector

    start = time.perf_counter()
    BinMaskSelector(epochs=1, batch_size=batch, min_batches=1, warmup=0.0, random_state=0).fit(x, y)
    return [time.perf_counter() - start]


KINDS = {
    "bare": (bare_loop, np.float32),
    "binmask": (with_binmask, np.float32),
    "selector, fp32": (with_selector, np.float32),
    "selector, fp64": (with_selector, np.float64),
}


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    train, dtype = KINDS[kind]
    train(*make_table(512, 200, 0.01), options.batch)
    before = resident()
    x, y = make_table(options.rows, options.features, options.filled, dtype)
    table = (x.data.nbytes + x.indices.nbytes + x.indptr.nbytes) / MB
    times = train(x, y, options.batch)
    parameters = 64 * options.features + 64 * 20 + 20 * 2 + 64 + 20 + 2
    model = (parameters + options.features) * 4 / MB
    return {
        "seconds": statistics.median(times),
        "table_mb": table,
        "model_mb": model,
        "peak_mb": peak() - before,
        "before_mb": before,
    }


def run(kind: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--only", kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{kind}: {result['seconds']:.1f} s, {result['peak_mb']:.0f} MB", file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=20_000)
    parser.add_argument("--filled", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options)))
        return
    alone = {kind: run(kind) for kind in KINDS if kind.startswith("selector")}
    rounds = [{kind: run(kind) for kind in ("bare", "binmask")} for _ in range(options.rounds)]
    bare, ours = (statistics.median(one[kind]["seconds"] for one in rounds) for kind in ("bare", "binmask"))
    print(f"{options.rows:,} rows x {options.features:,} features, {options.filled:.1%} filled, batch {options.batch}")
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, seed 0, ", end="")
    print(f"{options.rounds} rounds; {rounds[0]['binmask']['before_mb']:.0f} MB of code are not counted")
    verdict = "met" if ours / bare <= LARGEST_RATIO else "missed"
    print("| | bare loop | BinMask | ratio | bar |\n| --- | --- | --- | --- | --- |")
    print(f"| seconds per epoch | {bare:.2f} | {ours:.2f} | {ours / bare:.3f} | {LARGEST_RATIO:.2f} {verdict} |")
    print("\n| peak memory | table, MB | model, MB | peak, MB | peak / (table + model) | bar |\n" + "| --- " * 6 + "|")
    memory = {kind: max((one[kind] for one in rounds), key=lambda run: run["peak_mb"]) for kind in rounds[0]}
    for kind, one in (memory | alone).items():
        ratio = one["peak_mb"] / (one["table_mb"] + one["model_mb"])
        verdict = "-" if kind == "bare" else f"{LARGEST_MEMORY:g} {'met' if ratio <= LARGEST_MEMORY else 'missed'}"
        sizes = " | ".join(f"{one[key]:.0f}" for key in ("table_mb", "model_mb", "peak_mb"))
        print(f"| {kind} | {sizes} | {ratio:.2f} | {verdict} |")


if __name__ == "__main__":
    main()
