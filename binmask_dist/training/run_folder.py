"""The run folder: what a run was told, what it measured, and what came out.

config.json         the resolved configuration
environment.json    versions, machine, command line; one entry for every start
metrics.jsonl       one record per epoch and every few steps
checkpoints/        the newest few
model/              the sparse model, as its own library loads it
masks.safetensors   the masks, one bit per weight
result.json         the figures of the closing table; a run that has it is finished
*.png               plots
"""

import fcntl
import itertools
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from binmask_dist.files import write_atomically
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.mistakes import writing
from binmask_dist.training.tasks.base import RunError

# Keys that may change when a run is resumed: they do not change what it computes, but for rounding.
FREE = {"name", "run_root", "resume", "checkpoint_every", "keep_checkpoints", "on_nan", "workers", "compile"}
FREE |= {"mixed_precision", "log_every", "trackers", "wandb_mode", "project", "group", "tags"}

LOCK, CONFIG, ENVIRONMENT = ".lock", "config.json", "environment.json"
LOCK_LIMIT, LOCK_INTERVAL = 8.0, 0.2  # seconds


class RunFolder:
    """Every process has one; only the main one writes."""

    def __init__(self, path: Path, accelerator: Accelerator, lock: IO | None) -> None:
        self.path = path
        self.accelerator = accelerator
        self.lock = lock  # held to the end of the block, or of the process, however that ends

    @classmethod
    def open(cls, config: TrainConfig, accelerator: Accelerator) -> "RunFolder":
        """Make a new folder, or take up the one to be resumed. Refuses one that another process works in."""
        answer: list[str | None] = [None, None]  # path, error: all processes must go on or stop together
        lock = None
        if accelerator.is_main_process:
            try:
                path = _choose(config)
                lock = _take(path, config)
                answer[0] = str(path)
            except RunError as error:
                answer[1] = str(error)
            except OSError as error:
                answer[1] = f"the run folder cannot be made in {config.run_root}: {error.strerror}"
        broadcast_object_list(answer)
        if answer[1]:
            raise RunError(answer[1])
        return cls(Path(answer[0] or ""), accelerator, lock)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock:
            self.lock.close()

    @property
    def is_finished(self) -> bool:
        answer = [(self.path / "result.json").exists()]
        broadcast_object_list(answer)
        return answer[0]

    def write_json(self, name: str, content: Any) -> None:
        if self.accelerator.is_main_process:
            with writing(str(self.path / name)):
                write_atomically(self.path / name, json.dumps(content, indent=2) + "\n")

    def add_environment(self, environment: dict[str, Any]) -> None:
        """One entry for every start: a resumed run may go on elsewhere."""
        path = self.path / ENVIRONMENT
        before = json.loads(path.read_text()) if self.accelerator.is_main_process and path.exists() else []
        self.write_json(path.name, [*before, environment])


def _choose(config: TrainConfig) -> Path:
    root = Path(config.run_root)
    if config.name:
        path = root / config.name
        if config.resume == "never":
            _refuse_what_is_there(path, config)
        if config.resume == "must" and not (path / CONFIG).exists():
            raise RunError(f"there is no run in {path} to go on with; leave out --resume to start one")
        return path
    if config.resume != "never":
        told = {file.parent: _read_config(file) for file in root.glob(f"*/{CONFIG}")}
        same = [path for path, before in told.items() if before is not None and not _differences(before, config)]
        if same:
            return max(same, key=lambda path: path.stat().st_mtime)
        if config.resume == "must":
            raise RunError(f"no run in {root} has this configuration; give its --name, or leave out --resume")
    # an agent of W&B names its run: agents that start one in the same second must not meet in a folder
    agents_run = f"-{os.environ['WANDB_RUN_ID']}" if os.environ.get("WANDB_RUN_ID") else ""
    name = f"{Path(config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}{agents_run}"
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(root / name for name in names if not (root / name).exists())


def _take(path: Path, config: TrainConfig) -> IO:
    path.mkdir(parents=True, exist_ok=True)
    lock = (path / LOCK).open("w")
    _wait_for(lock, path)
    if config.resume == "never":
        _refuse_what_is_there(path, config)  # another process may have been there since it was chosen
    file = path / CONFIG
    if not file.exists() or not _has_begun(path):
        write_atomically(file, json.dumps(asdict(config), indent=2) + "\n")
        return lock
    told = _read_config(file)
    if told is None:
        raise RunError(f"{file} is not the configuration of a run; give another --name")
    if different := _differences(told, config):
        key, before, now = different[0]
        raise RunError(f"the run in {path} has {key} = {before!r} and not {now!r}; resume it with the same settings")
    return lock


def _has_begun(path: Path) -> bool:
    """Whether a run has left more than what it was told: one that was told a mistake, or killed, has not."""
    return path.exists() and any(entry.name not in (LOCK, CONFIG, ENVIRONMENT) for entry in path.iterdir())


def _refuse_what_is_there(path: Path, config: TrainConfig) -> None:
    if _has_begun(path):
        way_on = ", or --resume to go on with it" if "resume" in asdict(config) else ""  # selections have none
        raise RunError(f"{path} holds a run already; give another --name{way_on}")


def _wait_for(lock: IO, path: Path) -> None:
    """Some seconds: processes that load data hold the lock of a run that was killed until they notice."""
    for attempts_left in range(int(LOCK_LIMIT / LOCK_INTERVAL), -1, -1):
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not attempts_left:
                raise RunError(f"another process is at work in {path}; wait for it, or give another --name") from None
            time.sleep(LOCK_INTERVAL)


def _read_config(file: Path) -> dict[str, Any] | None:
    """None if it is not that of a run: other programs call their files so, too."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _differences(told: dict[str, Any], config: TrainConfig) -> list[tuple[str, Any, Any]]:
    """What is at its default in a configuration from before there was such a key is no difference."""
    now, defaults = (json.loads(json.dumps(asdict(each))) for each in (config, TrainConfig()))
    before = defaults | told
    keys = sorted((before.keys() | now.keys()) - FREE)
    return [(key, before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)]
