"""Runs of the training job: in this process, or as the command that a user types."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from accelerate.state import AcceleratorState, GradientState

from binmask_dist.training.config import TrainConfig
from binmask_dist.training.main import accelerator_for, train

ROOT = Path(__file__).parent.parent
# an epoch of a second: 22 steps, masks that move from the second epoch on
SHORT = dict(epochs=3, warmup=0.34, lam=1e-5, trackers=())
STARTED: list[subprocess.Popen[str]] = []


def train_here(run_root: Path, name: str, **options: Any) -> Path:
    """Train in this process; the run folder."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config = TrainConfig(run_root=str(run_root), name=name, **{**SHORT, **options})
    train(config, accelerator_for(config))
    return run_root / name


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """By the kernel's own refusal: no file of this process may grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def options(**values: Any) -> list[str]:
    """As `wandb agent` passes them."""
    as_json = {key: json.dumps(value) for key, value in values.items() if isinstance(value, tuple | dict)}
    return [f"--{key}={value}" for key, value in {**values, **as_json}.items()]


def command(*arguments: str, config: str = "") -> list[str]:
    """launch/train.py on one process, or as an Accelerate config says."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{config}.yaml"]
    return [sys.executable, *((*launcher, "--main_process_port", "0") if config else ()), "launch/train.py", *arguments]


def environment() -> dict[str, str]:
    """Without what an outer launcher may have set."""
    outer = ("ACCELERATE_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "WANDB")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run(*arguments: str, config: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, config=config), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )


def start(*arguments: str, config: str = "") -> subprocess.Popen[str]:
    """For a test that ends with `kill_started`."""
    job = subprocess.Popen(
        command(*arguments, config=config),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a signal to its group reaches the launcher's processes, and not the tests
    )
    STARTED.append(job)
    return job


def kill_started() -> None:
    """A test that fails would leave its job, which takes the cores from all that come after it."""
    while STARTED:
        with suppress(psutil.NoSuchProcess):
            job = psutil.Process(STARTED.pop().pid)
            for process in [*job.children(recursive=True), job]:
                process.kill()


def records(folder: Path, kind: str = "epoch") -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())
