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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_resnet", help="timm name (default test_resnet)")
    parser.add_argument("--image_size", type=int, default=32, help="of the digits (default 32)")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20, help="of an epoch (default 20)")
    parser.add_argument("--rounds", type=int, default=3)
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
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; {arguments.model}, ", end="")
    print(f"{arguments.image_size} px, {arguments.steps} steps of {arguments.batch_size}, {arguments.rounds} rounds")
    print(f"\n{'method':<20}{'seconds per epoch':>18}{'over dense':>12}{'least':>8}{'most':>8}")
    for variant in variants:
        seconds = statistics.median(each[variant] for each in rounds)
        ratios = sorted(each[variant] / each["dense"] for each in rounds)
        print(f"{variant:<20}{seconds:>18.2f}{statistics.median(ratios):>12.3f}{ratios[0]:>8.3f}{ratios[-1]:>8.3f}")


if __name__ == "__main__":
    main()
