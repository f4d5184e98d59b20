"""Finished trials, read from run folders. What cannot be used is named and left out."""

import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from binmask_dist.training.identity import trial_id
from binmask_dist.training.metrics_file import FILE_NAME
from binmask_dist.training.tasks.base import RunError

Record = dict[str, Any]

BEFORE_FINETUNING = "before_finetuning."  # starts the names of what was measured then
BATCH_STATISTICS = "batch_statistics."  # follows, where batch normalisation took each batch's own
_CONFIG_KEYS = ("seed", "task", "dataset", "model", "lam", "target_sparsity", "epochs")
_EPOCH_KEYS = ("epoch", "step", "phase", "train_loss", "test_loss", "sparsity", "layer_sparsity")
WITHOUT_EPOCHS = ("logistic",)  # methods that are no training loop
_FLIPS = ("on_to_off", "off_to_on")
_MARKS_OF_A_RUN = ("trial.json", FILE_NAME)  # there before config.json, or after its loss


class Unusable(Exception):
    """A trial cannot be used; the text says why."""


@dataclass(frozen=True)
class Trial:
    """A finished run: one seed of one configuration."""

    source: str  # the run folder, or the address in W&B
    config: dict[str, Any]
    result: dict[str, Any]
    epochs: list[Record]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def method(self) -> str:
        return self.config.get("method", "binmask")

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Every number of the result, and the training loss of the last epoch. What was not finite is NaN."""
        before = self.result.get("before_finetuning") or {}
        own = before.get("batch_statistics") or {}
        before = before | {BATCH_STATISTICS + key: value for key, value in own.items()}
        named = {**self.result, **{BEFORE_FINETUNING + key: value for key, value in before.items()}}
        if self.epochs:
            named.setdefault("train_loss", self.epochs[-1]["train_loss"])
        numbers = {key: value for key, value in named.items() if _is_number(value)}
        gone = {key: math.nan for key, value in named.items() if value is None and _is_measured(key)}
        return {key: float(value) if math.isfinite(value) else math.nan for key, value in {**numbers, **gone}.items()}


@dataclass
class Trials:
    """What was found: `used`, and for what is left out where it lies and why."""

    used: list[Trial] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    _known: dict[str, str] = field(default_factory=dict)  # trial id -> source

    def add(self, trial: Trial) -> None:
        """A second run of the same seed is no further evidence: it would only make the interval narrower."""
        first = self._known.setdefault(trial_id(trial.config), trial.source)
        if first != trial.source:
            self.left_out.append((trial.source, f"is the same trial as {first}"))
        else:
            self.used.append(trial)


def read_trials(paths: Sequence[str]) -> Trials:
    """From run folders, folders that hold some at any depth, archives of them, and `wandb:entity/project`."""
    trials = Trials()
    folders: dict[str, None] = {}
    for path in paths:
        if path.startswith("wandb:"):
            from binmask_dist.report.wandb_trials import add_wandb_trials

            add_wandb_trials(trials, path.removeprefix("wandb:"))
            continue
        if zipfile.is_zipfile(path):
            from binmask_dist.report.archive import unpacked

            path = str(unpacked(Path(path)))
        if not Path(path).is_dir():
            raise RunError(
                f"there is no folder {path}; give run folders, sweep folders, archives, or wandb:entity/project"
            )
        found = dict.fromkeys(find_run_folders(path))
        if not found:
            raise RunError(f"{path} holds no run folder; the training command makes them, with a config.json in each")
        folders.update(found)
    for folder in _shown(list(dict.fromkeys(os.path.realpath(folder) for folder in folders))):
        try:
            trials.add(read_trial(Path(folder)))
        except Unusable as error:
            trials.left_out.append((folder, str(error)))
    return trials


def find_run_folders(path: str) -> Iterator[str]:
    """Folders with a config.json, in order of their names; what lies within a run folder is its own. Follows no links,
    which may lead round in circles."""
    with os.scandir(path) as entries:
        below = sorted(entries, key=lambda entry: entry.name)
    names = {entry.name for entry in below}
    if names.intersection(("config.json", *_MARKS_OF_A_RUN)) and "trials" not in names:  # a sweep may have such files
        yield path
        return
    for entry in below:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from find_run_folders(entry.path)


def read_trial(folder: Path) -> Trial:
    """Raises `Unusable` if the run is not finished or one of its files is broken."""
    config = _read_object(folder / "config.json")
    if not (folder / "result.json").exists():
        raise Unusable("is not finished: it has no result.json")
    epochs = [] if config.get("method") in WITHOUT_EPOCHS else _read_epochs(folder / FILE_NAME)
    return make_trial(str(folder), config, _read_object(folder / "result.json"), epochs)


def make_trial(source: str, config: Record, result: Record, epochs: list[Record]) -> Trial:
    """Checks that everything is there which a report relies on."""
    _check_keys("config.json", config, _CONFIG_KEYS)
    _check_keys("result.json", result, ("sparsity", "test_loss"))
    for key in ("seed", "lam"):
        if not _is_number(config[key]):
            raise Unusable(f"config.json has {key} = {config[key]!r}, which is no number")
    if not isinstance(result.get("before_finetuning") or {}, dict):
        raise Unusable("result.json has a before_finetuning that is no object")
    if not isinstance((result.get("before_finetuning") or {}).get("batch_statistics") or {}, dict):
        raise Unusable("result.json has batch_statistics that are no object")
    if not _is_number(result["sparsity"]) or not 0 <= result["sparsity"] <= 1:
        raise Unusable(f"result.json has sparsity = {result['sparsity']!r}, which is no fraction")
    if not epochs and config.get("method") not in WITHOUT_EPOCHS:
        raise Unusable(f"{FILE_NAME} has no record of an epoch")
    for record in epochs:
        if "validation_loss" in record:  # the test data are looked at once, at the end
            record["test_loss"] = record["validation_loss"]
        _check_keys(FILE_NAME, record, _EPOCH_KEYS)
        if not isinstance(record["layer_sparsity"], dict):
            raise Unusable(f"{FILE_NAME} has an epoch whose layer_sparsity is no object")
    return Trial(
        source, config, result, [{key: record.get(key) for key in (*_EPOCH_KEYS, *_FLIPS)} for record in epochs]
    )


def _read_object(path: Path) -> Record:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Unusable(f"has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise Unusable(f"{path.name} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise Unusable(f"{path.name} holds no object")
    return content


def _read_epochs(path: Path) -> list[Record]:
    """The records of epochs, and no others: those of steps are most of the file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise Unusable(f"{path.name} cannot be read: {error.strerror}") from None
    if lines.pop():
        raise Unusable(f"{path.name} ends within a line")
    epochs = []
    for number, line in enumerate(lines, 1):
        if line.startswith(b'{"kind": "step"') and line.endswith(b"}"):
            continue
        try:
            record = json.loads(line)
        except ValueError:
            raise Unusable(f"line {number} of {path.name} is no JSON") from None
        if not isinstance(record, dict):
            raise Unusable(f"line {number} of {path.name} holds no object")
        if record.get("kind") == "epoch":
            epochs.append(record)
    return epochs


def _check_keys(file: str, content: Record, keys: Iterable[str]) -> None:
    missing = [key for key in keys if key not in content]
    if missing:
        raise Unusable(f"{file} has no '{missing[0]}'")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_measured(key: str) -> bool:
    return key.removeprefix(BEFORE_FINETUNING).removeprefix(BATCH_STATISTICS).startswith(("test_", "train_"))


def _shown(folders: list[str]) -> Iterable[str]:
    """With a progress bar, on a terminal."""
    return tqdm(folders, unit="trial", desc="reading", disable=None, leave=False, dynamic_ncols=True)
