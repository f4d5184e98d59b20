"""Seconds per epoch of each method over those of dense training: the same network, data and command, in one run.

Every round trains with each method once, in this process; the ratios are medians over rounds. An epoch is its steps
alone, without evaluation and checkpoints, and the first one does not count.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from binmask_dist.files import write_atomically
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.main import accelerator_for, train

EPOCHS, LOG_EVERY = 3, 5
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "binmask": {"warmup": 0.0},
    "probmask, 1 mask": {"method": "probmask", "target_sparsity": 0.9},
    "probmask, 2 masks": {"method": "probmask", "target_sparsity": 0.9, "mask_samples": 2},
    "hard_concrete": {"method": "hard_concrete"},
    "magnitude": {"method": "magnitude", "target_sparsity": 0.9, "mask_interval": 10},
    "rigl": {"method": "rigl", "target_sparsity": 0.9, "mask_interval": 10},
    "l1": {"method": "l1"},
    "l2": {"method": "l2"},
    "dropout": {"method": "dropout", "lam": 0.5},
}


def seconds_per_epoch(variant: str, arguments: argparse.Namespace, folder: Path) -> float:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    options = {"method": variant, **VARIANTS[variant]}
    config = TrainConfig(
        **{
            **dict(run_root=str(folder), name="run", model=arguments.model, image_size=arguments.image_size),
            **dict(batch_size=arguments.batch_size, epochs=EPOCHS, log_every=LOG_EVERY, trackers=()),
            **dict(steps_per_epoch=arguments.steps, **options),
        }
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, accelerator_for(config))
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "step" and record["epoch"] > 1]
    return arguments.steps * statistics.median(1 / record["steps_per_second"] for record in steps)


def summarise(rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each method; ratios are least, median and most of those within a round."""
    rows = []
    for variant in rounds[0]:
        row: dict[str, Any] = {"method": variant}
        row["seconds_per_epoch"] = statistics.median(each[variant] for each in rounds)
        for reference in ("dense", "binmask"):
            if reference in rounds[0]:
                ratios = sorted(each[variant] / each[reference] for each in rounds)
                row[f"over_{reference}"] = [ratios[0], statistics.median(ratios), ratios[-1]]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_resnet", help="timm name (default test_resnet)")
    parser.add_argument("--image_size", type=int, default=32, help="of the digits (default 32)")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20, help="of an epoch (default 20)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the table, as benchmarks/sparsification.py reads it")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    arguments = parser.parse_args()
    variants = ["dense", *(name for name in arguments.variants if name != "dense")]
    rounds: list[dict[str, float]] = []
    for number in range(arguments.rounds):
        rounds.append({})
        for variant in variants:
            with tempfile.TemporaryDirectory() as folder:
                rounds[-1][variant] = seconds_per_epoch(variant, arguments, Path(folder))
            print(f"round {number + 1} of {arguments.rounds}: {variant} {rounds[-1][variant]:.2f} s", flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    setting = f"{arguments.model}, {arguments.image_size} px, {arguments.steps} steps of {arguments.batch_size}"
    where = f"{machine}; {setting}, {arguments.rounds} rounds"
    rows = summarise(rounds)
    if arguments.out:
        write_atomically(
            arguments.out, json.dumps({"where": where, "model": arguments.model, "rows": rows}, indent=2) + "\n"
        )
    print(f"\n{where}")
    print(f"\n{'method':<20}{'seconds per epoch':>18}{'over dense':>12}{'least':>8}{'most':>8}")
    for row in rows:
        least, median, most = row["over_dense"]
        print(f"{row['method']:<20}{row['seconds_per_epoch']:>18.2f}{median:>12.3f}{least:>8.3f}{most:>8.3f}")


if __name__ == "__main__":
    main()
