"""Feature selection on a large sparse table: memory, and time per epoch against a bare loop of the same network.

    .venv/bin/python benchmarks/selection_memory.py                    100,000 rows x 20,000 features, 1% filled

The bare loop is what one writes in torch: each minibatch is made dense, the paper's MLP, SGD with momentum. Both take
the same batches in the same order. Memory is the peak of a process of its own over what it held before the table.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch.nn import functional as F

MB = 2**20
EPOCHS = 3  # the first of them is not measured
LARGEST_MEMORY, LARGEST_RATIO = 3.0, 1.10


def make_table(rows: int, features: int, filled: float) -> tuple[sp.csr_matrix, np.ndarray]:
    """The same number of cells in every row, so that nothing larger is made on the way."""
    rng = np.random.default_rng(0)
    per_row = max(1, round(features * filled))
    indices = np.empty((rows, per_row), dtype=np.int32)
    step = features // per_row
    for part in np.array_split(np.arange(rows), max(1, rows // 1000)):  # one cell in each stretch of `step` features
        indices[part] = np.arange(per_row) * step + rng.integers(0, step, (len(part), per_row))
    data = rng.random(rows * per_row, dtype=np.float32)
    starts = np.arange(0, rows * per_row + 1, per_row, dtype=np.int64 if rows * per_row > 2**31 - 1 else np.int32)
    x = sp.csr_matrix((data, indices.reshape(-1), starts), shape=(rows, features))
    useful = np.zeros(features, dtype=np.float32)
    useful[: features // 20] = 1
    score = x @ useful
    return x, (score > np.median(score)).astype(np.int64)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB


def bare_loop(x: sp.csr_matrix, y: np.ndarray, batch: int) -> list[float]:
    from binmask_dist.selection.network import mlp
    from binmask_dist.selection.rows import Rows

    torch.manual_seed(0)
    model = mlp(x.shape[1], 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
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


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    import binmask_dist.selection.problem  # noqa: F401, so that what is imported is no part of what is measured

    before = peak()
    x, y = make_table(options.rows, options.features, options.filled)
    table = (x.data.nbytes + x.indices.nbytes + x.indptr.nbytes) / MB
    after_table = peak()
    times = (bare_loop if kind == "bare" else with_binmask)(x, y, options.batch)
    weights = 64 * options.features + 64 * 20 + 20 * 2 + 64 + 20 + 2
    model = (4 * weights + 6 * options.features) * 4 / MB  # weight, gradient, momentum, product; the mask's own state
    return {
        "seconds": statistics.median(times),
        "table_mb": table,
        "model_mb": model,
        "peak_mb": peak() - before,
        "making_the_table_mb": after_table - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=20_000)
    parser.add_argument("--filled", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=("bare", "binmask"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options)))
        return
    results: dict[str, list[dict[str, Any]]] = {"bare": [], "binmask": []}
    for _ in range(options.rounds):
        for kind, runs in results.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--only", kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    bare, ours = (statistics.median(run["seconds"] for run in runs) for runs in results.values())
    one = results["binmask"][0]
    held = one["table_mb"] + one["model_mb"]
    memory = max(run["peak_mb"] for run in results["binmask"])
    print(f"{options.rows:,} rows x {options.features:,} features, {options.filled:.1%} filled, batch {options.batch}")
    print("| | bare loop | BinMask | ratio | bar |\n| --- | --- | --- | --- | --- |")
    verdicts = [
        "met" if holds else "missed" for holds in (ours / bare <= LARGEST_RATIO, memory <= LARGEST_MEMORY * held)
    ]
    print(f"| seconds per epoch | {bare:.2f} | {ours:.2f} | {ours / bare:.3f} | {LARGEST_RATIO:.2f} {verdicts[0]} |")
    what = f"peak memory, MB (table {one['table_mb']:.0f} + model {one['model_mb']:.0f})"
    bare_memory = max(run["peak_mb"] for run in results["bare"])
    times = f"{memory / held:.2f} x (table + model)"
    print(f"| {what} | {bare_memory:.0f} | {memory:.0f} | {times} | {LARGEST_MEMORY:.0f} x {verdicts[1]} |")


if __name__ == "__main__":
    main()
