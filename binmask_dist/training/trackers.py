"""W&B and TensorBoard, through Accelerate's trackers. They may raise and block: `Tracking` calls them from a thread."""

import importlib.util
import json
import os
import secrets
import shlex
import shutil
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from accelerate.tracking import TensorBoardTracker, WandBTracker
from tqdm import tqdm

from binmask_dist.engines.accelerator import engine_from_environment
from binmask_dist.files import write_atomically
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.identity import configuration_name
from binmask_dist.training.tasks.base import RunError

START_LIMIT = 30.0  # seconds for W&B's server to answer
FINISH_LIMIT = 60.0  # seconds in which a tracker may catch up at the end of the run
ABANDON_LIMIT = 5.0  # seconds for what is left of a tracker that was switched off

Record = dict[str, Any]


class Tracker(Protocol):
    name: str

    def start(self, history: list[Record]) -> None:
        """Connect; `history` holds the records of this run from before it was interrupted."""

    def log(self, record: Record) -> None: ...

    def finish(self, summary: dict[str, Any], exit_code: int) -> None: ...

    def abandon(self) -> None:
        """Leave nothing behind that would keep the process from ending."""


def say(text: str) -> None:
    """One line, above the progress bar if there is one."""
    tqdm.write(text, file=sys.stderr)


def make_trackers(folder: Path, config: TrainConfig, resume_step: int | None) -> list[Tracker]:
    """The trackers that the configuration names; raises `RunError` if one of them cannot work at all."""
    chosen: list[Tracker] = []
    if "wandb" in config.trackers and _wandb_mode(config) != "disabled":
        chosen.append(Wandb(folder, config))
    if "tensorboard" in config.trackers:
        chosen.append(TensorBoard(folder, config, resume_step))
    return chosen


def _wandb_mode(config: TrainConfig) -> str:
    return config.wandb_mode if config.wandb_mode != "auto" else os.environ.get("WANDB_MODE", "auto")


class Wandb:
    """A W&B run whose files lie in the run folder, and which an interrupted run goes on with."""

    name = "W&B"

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        self.folder = folder
        self.config = config
        self.mode = _wandb_mode(config)
        if self.mode == "online" and not _logged_in():
            raise RunError("W&B knows no API key: run `wandb login`, set WANDB_API_KEY, or give --wandb_mode offline")

    def start(self, history: list[Record]) -> None:
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        if self.mode == "auto":
            self.mode = "online" if _logged_in() else "offline"
        before = _read_json(self.folder / "wandb.json")
        run_id = before.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        write_atomically(self.folder / "wandb.json", json.dumps({"id": run_id, "mode": self.mode}) + "\n")
        if self.mode == "offline":
            self._remove_offline_runs()
        self.tracker = WandBTracker(self.config.project, **self._init_arguments(run_id))
        self.tracker.start()
        self.run = self.tracker.tracker
        self._define_axes()
        if self.mode == "online":
            say(f"W&B: {self.run.url}")
        if before.get("mode") != "online" or self.mode != "online":  # the server has them if both are
            for record in history:
                self.log(record)

    def _init_arguments(self, run_id: str) -> dict[str, Any]:
        import wandb

        # Its console capture would send what the training thread prints to a service that may be dead.
        settings = wandb.Settings(
            init_timeout=START_LIMIT,
            finish_timeout=0.8 * FINISH_LIMIT,  # before its thread is given up: it may still close its files
            finish_timeout_raises=True,
            silent=True,
            console="off",
            reinit="create_new",
        )
        tags = [self.config.task, Path(self.config.model).name, engine_from_environment(), *self.config.tags]
        return {
            "dir": str(self.folder),
            "id": run_id,
            "resume": "allow" if self.mode == "online" else None,
            "name": self.folder.name,
            "group": self.config.group or configuration_name(asdict(self.config)),
            "tags": list(dict.fromkeys(tag[:64] for tag in tags)),  # W&B takes no longer ones
            "config": asdict(self.config),
            "mode": self.mode,
            "settings": settings,
        }

    def _remove_offline_runs(self) -> None:
        """`wandb sync` of a second folder of a run replaces the first, so the new one gets the history, too."""
        for old in (self.folder / "wandb").glob("offline-run-*"):
            shutil.rmtree(old)

    def _define_axes(self) -> None:
        for axis, groups in {"step": ("train", "speed"), "epoch": EPOCH_GROUPS}.items():
            self.run.define_metric(axis, hidden=True)
            for group in groups:
                self.run.define_metric(f"{group}/*", step_metric=axis)

    def log(self, record: Record) -> None:
        import wandb

        values: dict[str, Any] = dict(panels(record))
        # W&B's own count of steps cannot go back to a checkpoint, so the step is a value like any other.
        values.update((axis, record[axis]) for axis in ("step", "epoch") if axis in record)
        if histogram := record.get("latent_histogram"):
            values["masks/latents"] = wandb.Histogram(np_histogram=(histogram["counts"], histogram["edges"]))
        self.tracker.log(values)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        self.run.summary.update({"result": summary})
        self.run.finish(exit_code=exit_code)
        if self.mode == "offline":
            files = self.folder / "wandb" / Path(self.run.settings.sync_dir).name
            say(f"to upload the run to W&B: wandb sync {shlex.quote(str(files))}")

    def abandon(self) -> None:
        """At exit wandb waits for its service, for as long as that takes: end it now."""
        import psutil

        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it may have ended meanwhile
                if child.name().startswith("wandb-core"):
                    child.kill()
                    child.wait(ABANDON_LIMIT)
        # in a thread, because it may wait for an answer that does not come
        goodbye = threading.Thread(target=_tear_down, daemon=True)
        goodbye.start()
        goodbye.join(ABANDON_LIMIT)


def _tear_down() -> None:
    """There is nobody to say goodbye to, but it also removes wandb's exit hook."""
    import wandb

    with suppress(Exception, SystemExit):
        wandb.teardown()


class TensorBoard:
    """Event files in the run folder."""

    name = "TensorBoard"

    def __init__(self, folder: Path, config: TrainConfig, resume_step: int | None) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise RunError("TensorBoard is not installed: `pip install tensorboard`, or leave it out of --trackers")
        self.folder = folder / "tensorboard"
        self.config = config
        # hides what an interrupted run wrote after its last checkpoint
        self.tracker = TensorBoardTracker(self.folder.name, folder, purge_step=(resume_step or 0) + 1)

    def start(self, history: list[Record]) -> None:
        is_new = not self.folder.exists()  # if not, it has the history
        self.tracker.start()
        if is_new or not history:
            self._add_text("config", asdict(self.config))
        for record in history if is_new else []:
            self.log(record)

    def log(self, record: Record) -> None:
        values = panels(record)
        self.tracker.log(values, step=record["step"])
        if histogram := record.get("latent_histogram"):
            self._add_histogram(histogram["counts"], histogram["edges"], record["step"])

    def _add_histogram(self, counts: list[int], edges: list[float], step: int) -> None:
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        self.tracker.tracker.add_histogram_raw(
            "masks/latents",
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
            bucket_limits=edges[1:],
            bucket_counts=counts,
            global_step=step,
        )

    def _add_text(self, name: str, content: dict[str, Any]) -> None:
        # four spaces: a code block, in the Markdown that TensorBoard shows texts as
        self.tracker.log({name: "\n".join(f"    {line}" for line in json.dumps(content, indent=2).splitlines())})

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        self._add_text("result", summary)
        self.tracker.finish()

    def abandon(self) -> None:
        pass


EPOCH_GROUPS = ("test", "validation", "sparsity", "layers", "masks", "memory")
_GROUPS = {
    "sparsity": "sparsity/overall",
    **{
        key: f"masks/{key}"
        for key in ("on_to_off", "off_to_on", "returns", "near_zero", "near_zero_fraction", "frozen", "skipped_steps")
    },
    **{key: f"speed/{key}" for key in ("examples_per_second", "steps_per_second", "seconds")},
}


def panels(record: Record) -> dict[str, float | int]:
    """A record's numbers under names such as test/accuracy, whose first part groups charts."""
    values: dict[str, Any] = {}
    for key, value in record.items():
        if key == "layer_sparsity":
            values.update((f"layers/{name}", sparsity) for name, sparsity in value.items())
        elif key not in ("step", "epoch") and isinstance(value, int | float):
            values[_panel(record["kind"], key)] = value if isinstance(value, float) else int(value)
    return values


def _panel(kind: str, key: str) -> str:
    if kind not in ("step", "epoch"):
        return f"{kind}/{key}"
    if key.startswith("test_"):
        return f"test/{key.removeprefix('test_')}"
    if key.startswith("validation_"):
        return f"validation/{key.removeprefix('validation_')}"
    if key.startswith("train_"):  # the mean over an epoch, beside the values at single steps
        return f"train/epoch_{key.removeprefix('train_')}"
    if key.endswith("_bytes"):
        return f"memory/{key}"
    return _GROUPS.get(key, f"train/{key}")


def _logged_in() -> bool:
    import wandb

    return wandb.login(prompt=False, verify=False)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
