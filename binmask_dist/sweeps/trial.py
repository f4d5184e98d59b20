"""A trial: one setting of a sweep, known by a hash of what decides its result, in a folder of its own.

trial.json    what it was told, and how it went; beside the files of the program
trial.log     what it printed, attempt after attempt
.claim        locked while any process of the trial lives

The trial is finished if the program has written result.json, and only then. A program whose command holds ${folder} is
any that takes --folder: what it is told is all that is known of it. Without the macro it is the training command.
"""

import contextlib
import fcntl
import io
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self

from binmask_dist.files import write_atomically
from binmask_dist.sweeps.commands import FOLDER, Command, agent_command
from binmask_dist.sweeps.sweep_file import SweepError, SweepFile, settings
from binmask_dist.training.config import TrainConfig, parse_config
from binmask_dist.training.identity import configuration_id, configuration_name, digest, trial_id

ATTEMPT = "=== attempt "
LAUNCHERS_TRACEBACK = re.compile(r'^Traceback .*\n  File ".*/accelerate", line \d+, in <module>$', re.MULTILINE)

Status = Literal["waiting", "running", "interrupted", "failed", "finished"]


@dataclass(frozen=True)
class Trial:
    """Of any program that takes --folder."""

    setting: dict[str, Any]
    command: Command
    folder: Path

    @classmethod
    def of(cls, content: dict[str, Any], setting: dict[str, Any], root: Path) -> Self:
        if "folder" in setting:
            raise SweepError(f"folder is no parameter: {FOLDER} in the command is each trial's own")
        setting = dict(sorted(setting.items()))  # a parameter's place in the file makes no other trial
        told = agent_command(content, setting)
        folder = root / digest({"program": told.program, "arguments": told.arguments}, 12)
        return cls(setting, agent_command(content, setting, folder=folder), folder)

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def name(self) -> str:
        """For people."""
        return as_text(self.setting)

    def wandb_mode(self, asked: str | None) -> str:
        """What the trials of the sweep are told beyond its file."""
        if asked:
            program = self.command.program
            raise SweepError(f"--wandb_mode is for the training command; set WANDB_MODE, which {program} inherits")
        return ""

    def words(self, launcher: list[str], sweep_name: str, wandb_mode: str) -> list[str]:
        """The whole command."""
        return [*launcher, self.command.program, *self.command.arguments]

    @property
    def log(self) -> Path:
        return self.folder / "trial.log"

    def end_of_log(self, lines: int) -> list[str]:
        """The last lines of the last attempt, without the launcher's account of what it saw, which comes after them."""
        if not self.log.exists():
            return ["(there is no log any more)"]
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 100_000))
            text = file.read().decode(errors="replace")
        attempt = re.split(f"^{ATTEMPT}.*\n", text, flags=re.MULTILINE)[-1]
        own = LAUNCHERS_TRACEBACK.split(attempt)[0]
        return own.splitlines()[-lines:]

    def record(self) -> dict[str, Any]:
        """What trial.json holds; nothing if there is none."""
        try:
            return json.loads((self.folder / "trial.json").read_text())
        except (OSError, ValueError):
            return {}

    def write(self, **values: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        known = {"id": self.id, "parameters": self.setting, "name": self.name}
        write_atomically(self.folder / "trial.json", json.dumps({**self.record(), **known, **values}, indent=2) + "\n")

    @property
    def is_finished(self) -> bool:
        return (self.folder / "result.json").exists()

    def status(self) -> Status:
        """As written; a trial that was running when its worker was killed still says so. `claim` knows better."""
        if self.is_finished:
            return "finished"
        noted = self.record().get("status", "waiting")
        return "interrupted" if noted == "finished" else noted  # somebody has removed its result

    def claim(self) -> IO | None:
        """A lock that nobody else gets while it, or a copy of it in another process, is open; None if it is taken."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return _locked(self.folder / ".claim")


@dataclass(frozen=True)
class TrainingTrial(Trial):
    """Of the training command: known by its resolved configuration, whatever spelling that came from."""

    config: TrainConfig

    @classmethod
    def of(cls, content: dict[str, Any], setting: dict[str, Any], root: Path) -> Self:
        if "config" in setting:  # an agent passes parameters in any order, and what stands further right wins
            raise SweepError("config is no parameter: put --config=FILE into the command, in front of ${args}")
        command = agent_command(content, setting)
        config = _resolve(command.arguments, setting)
        return cls(setting, command, root / trial_id(asdict(config)), config)

    @property
    def name(self) -> str:
        """The configuration and the seed."""
        return f"{configuration_name(asdict(self.config))} seed {self.config.seed}"

    def wandb_mode(self, asked: str | None) -> str:
        """An upload is asked for, or does not happen."""
        if asked:
            return asked
        return "offline" if self.config.wandb_mode == "auto" and "WANDB_MODE" not in os.environ else ""

    def words(self, launcher: list[str], sweep_name: str, wandb_mode: str) -> list[str]:
        """In this folder, going on with what is there, and with W&B's labels."""
        tags = [*self.config.tags, sweep_name, f"configuration-{configuration_id(asdict(self.config))}"]
        own = {"run_root": self.folder.parent, "name": self.id, "resume": "auto", "tags": json.dumps(tags)}
        if wandb_mode:
            own["wandb_mode"] = wandb_mode
        return [*super().words(launcher, sweep_name, wandb_mode), *(f"--{key}={value}" for key, value in own.items())]

    def claim(self) -> IO | None:
        lock = super().claim()
        if lock and (self.folder / ".lock").exists():  # the training command's own: somebody may run it by hand
            run = _locked(self.folder / ".lock")
            if run is None:
                lock.close()
                return None
            run.close()
        return lock


def _locked(path: Path) -> IO | None:
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def make_trials(sweep: SweepFile, folder: Path, count: int | None = None, seed: int = 0) -> list[Trial]:
    """All trials of a sweep, each once; those of training are checked by its own parser."""
    kind = Trial if FOLDER in sweep.content.get("command", []) else TrainingTrial
    trials: dict[str, Trial] = {}
    for setting in settings(sweep, count, seed):
        trial = kind.of(sweep.content, setting, folder / "trials")
        trials.setdefault(trial.id, trial)
    return list(trials.values())


def _resolve(arguments: list[str], setting: dict[str, Any]) -> TrainConfig:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parse_config(arguments)
    except SystemExit:  # the parser's way to refuse
        text = " ".join(said.getvalue().split()).split("error: ", 1)[-1]
        raise SweepError(f"the trial with {as_text(setting)} cannot be run: {text}") from None


def as_text(setting: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in setting.items())
