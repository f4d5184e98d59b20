"""A trial: one setting of a sweep, known by a hash of its resolved configuration, in a run folder of its own.

trial.json    what it was told, and how it went; beside the files of the training command
trial.log     what it printed, attempt after attempt
.claim        locked while any process of the trial lives

The trial is finished if the training command has written result.json, and only then.
"""

import contextlib
import fcntl
import io
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from binmask_dist.files import write_atomically
from binmask_dist.sweeps.commands import Command, agent_command
from binmask_dist.sweeps.sweep_file import SweepError, SweepFile, settings
from binmask_dist.training.config import TrainConfig, parse_config
from binmask_dist.training.identity import configuration_id, configuration_name, trial_id

ATTEMPT = "=== attempt "
LAUNCHERS_TRACEBACK = re.compile(r'^Traceback .*\n  File ".*/accelerate", line \d+, in <module>$', re.MULTILINE)

Status = Literal["waiting", "running", "interrupted", "failed", "finished"]


@dataclass(frozen=True)
class Trial:
    setting: dict[str, Any]
    command: Command
    config: TrainConfig
    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def name(self) -> str:
        """For people: the configuration and the seed."""
        return f"{configuration_name(asdict(self.config))} seed {self.config.seed}"

    def words(self, launcher: list[str], sweep_name: str, wandb_mode: str) -> list[str]:
        """The whole command: in this folder, going on with what is there, and with W&B's labels."""
        tags = [*self.config.tags, sweep_name, f"configuration-{configuration_id(asdict(self.config))}"]
        own = {"run_root": self.folder.parent, "name": self.id, "resume": "auto", "tags": json.dumps(tags)}
        if wandb_mode:
            own["wandb_mode"] = wandb_mode
        options = [f"--{key}={value}" for key, value in own.items()]
        return [*launcher, self.command.program, *self.command.arguments, *options]

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
        lock = _locked(self.folder / ".claim")
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
    """All trials of a sweep, each once, checked by the training command's own parser."""
    trials: dict[str, Trial] = {}
    for setting in settings(sweep, count, seed):
        if "config" in setting:  # an agent passes parameters in any order, and what stands further right wins
            raise SweepError("config is no parameter: put --config=FILE into the command, in front of ${args}")
        command = agent_command(sweep.content, setting)
        config = _resolve(command.arguments, setting)
        identity = trial_id(asdict(config))
        trials.setdefault(identity, Trial(setting, command, config, folder / "trials" / identity))
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
