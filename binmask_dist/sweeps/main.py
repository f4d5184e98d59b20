"""The sweep command, top to bottom."""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jsonargparse

from binmask_dist.files import write_atomically
from binmask_dist.sweeps import sweep_file
from binmask_dist.sweeps.commands import read_launcher, with_free_port
from binmask_dist.sweeps.devices import count_cores, find_devices, make_slots
from binmask_dist.sweeps.sweep_file import SweepError
from binmask_dist.sweeps.trial import Trial, make_trials
from binmask_dist.sweeps.worker import Worker

LAST_LINES = 20  # of the log of a failed trial


@dataclass(frozen=True)
class SweepConfig:
    file: Path
    folder: Path
    jobs: int | None = None
    count: int | None = None
    seed: int = 0
    devices: str | None = None
    retry_failed: bool = False
    wait: bool = True
    wandb_mode: Literal["auto", "online", "offline", "disabled"] | None = None
    dry_run: bool = False


def parse_sweep(args: Sequence[str] | None = None) -> SweepConfig:
    parser = jsonargparse.ArgumentParser(
        prog="launch/sweep.py",
        description="Run the trials of a W&B sweep file here, without a server: a grid, or a random one.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="a sweep file, such as configs/sweeps/digits.yaml")
    parser.add_argument("--folder", type=Path | None, help="sweep folder; left out: runs/sweeps/ and the file's name")
    parser.add_argument("--jobs", type=int | None, help="trials at once; left out: as many as GPUs or cores allow")
    parser.add_argument("--count", type=int | None, help="number of trials; needed if the method is random")
    parser.add_argument("--seed", type=int, default=0, help="seed of what a random sweep draws; not that of a trial")
    parser.add_argument("--devices", type=str | None, help="GPUs to use, such as 0,1; left out: all that are visible")
    parser.add_argument(
        "--retry_failed", "--retry-failed", action="store_true", help="run trials again that failed before"
    )
    parser.add_argument("--wait", type=bool, default=True, help="stay until trials of other workers have ended, too")
    parser.add_argument(
        "--wandb_mode",
        type=Literal["auto", "online", "offline", "disabled"] | None,
        help="left out: what the sweep file or WANDB_MODE says, otherwise offline",
    )
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print the commands, and run none")
    values = parser.parse_args(args).as_dict()
    for key in ("jobs", "count"):
        if values[key] is not None and values[key] < 1:
            parser.error(f"{key} must be above zero, not {values[key]}")
    file = Path(str(values.pop("file")))
    folder = Path(str(values.pop("folder") or Path("runs/sweeps") / file.stem))
    return SweepConfig(file=file, folder=folder, **values)


def main(config: SweepConfig) -> int:
    """The exit code: 0 if nothing has failed, 1 if a trial or the sweep itself has, 128 and the signal if stopped."""
    try:
        return run_sweep(config)
    except SweepError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


def run_sweep(config: SweepConfig) -> int:
    sweep = sweep_file.read(config.file)
    if not Path(sweep.content["program"]).is_file():
        raise SweepError(f"there is no {sweep.content['program']} here; start from the project's folder")
    trials = make_trials(sweep, config.folder, config.count, config.seed)
    launcher = trials[0].command.launcher
    launch = read_launcher(launcher)
    if launch.port_is_needed:
        launcher = with_free_port(launcher)
    devices = find_devices() if config.devices is None else [name for name in config.devices.split(",") if name]
    slots = make_slots(launch, config.jobs, devices, count_cores())
    mode = trials[0].wandb_mode(config.wandb_mode)
    if config.dry_run:
        for trial in trials:
            print(shlex.join(trial.words(launcher, sweep.name, mode)))
        return 0
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(config.folder / "sweep.yaml", sweep.text)
        print(_opening(sweep, config, trials, len(slots)), flush=True)
        worker = Worker(sweep.name, trials, slots, launcher, mode, config.retry_failed, config.wait)
        number = worker.run()
    except OSError as error:
        raise SweepError(f"the sweep in {config.folder} cannot go on: {error.strerror}") from None
    return _report(config.folder, trials, number)


def _opening(sweep: sweep_file.SweepFile, config: SweepConfig, trials: list[Trial], jobs: int) -> str:
    folder = config.folder
    counts = Counter(trial.status() for trial in trials)
    done = f"{counts['finished']} finished already" + (f", {counts['failed']} failed" if counts["failed"] else "")
    lines = [f"sweep {sweep.name} in {folder}: {len(trials)} trials, {done}, {jobs} at once"]
    if same := len(sweep_file.settings(sweep, config.count, config.seed)) - len(trials):
        lines.append(f"{same} settings more would compute the same as these, and are left out")
    others = {path.parent.name for path in folder.glob("trials/*/trial.json")} - {trial.id for trial in trials}
    if others:
        lines.append(f"{len(others)} trials in {folder} are not in {sweep.path} and are left alone")
    if "early_terminate" in sweep.content:
        lines.append("early_terminate is for W&B's server: here every trial runs to its end")
    return "\n".join(lines)


def _report(folder: Path, trials: list[Trial], number: int) -> int:
    """Say what came out, with the last lines of what failed."""
    statuses = {trial.id: trial.status() for trial in trials}
    counts = Counter(statuses.values())
    for trial in trials:
        if statuses[trial.id] == "failed":
            print(f"\n{trial.name} failed with exit code {trial.record().get('exit_code')}; the end of {trial.log}:")
            print("\n".join(f"    {line}" for line in trial.end_of_log(LAST_LINES)))
    print(f"{counts['finished']} of {len(trials)} trials finished in {folder}", end="")
    print(f", {counts['failed']} failed; --retry-failed runs these again" if counts["failed"] else "")
    if number:
        print("stopped; the same command goes on", flush=True)
        return 128 + number
    if counts["running"]:
        print(f"{counts['running']} are at work elsewhere", flush=True)
    return 1 if counts["failed"] else 0
