"""A worker runs trials of a sweep folder that nobody else has, some at once, to the end of the sweep."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from binmask_dist.sweeps import minder
from binmask_dist.sweeps.devices import Slot
from binmask_dist.sweeps.progress import Progress, duration, seconds_left
from binmask_dist.sweeps.trial import ATTEMPT, Status, Trial

TICK = 0.1  # seconds between looks at the trials of this worker
LOOK = 2.0  # and at the sweep folder, where other workers write; longer if that takes long
SAVED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of a trial that somebody has told to save and end


@dataclass
class Running:
    trial: Trial
    slot: Slot
    claim: IO
    process: subprocess.Popen
    started: float


class Worker:
    def __init__(
        self,
        name: str,
        trials: list[Trial],
        slots: list[Slot],
        launcher: list[str],
        wandb_mode: str,
        retry_failed: bool = False,
        wait: bool = True,
    ) -> None:
        self.name = name
        self.trials = trials
        self.launcher = launcher
        self.wandb_mode = wandb_mode
        self.wait = wait
        self.free = slots
        self.running: dict[str, Running] = {}
        self.finished: dict[str, float | None] = {}  # and how long each took, if that is known
        self.signal = 0
        self.is_stopping = False
        self.progress = Progress(name, len(trials))
        # only failures of before: with two workers, each would otherwise repeat the other's repetition
        self.to_retry = {trial.id: attempts(trial) for trial in trials if trial.status() == "failed" and retry_failed}

    def run(self) -> int:
        """To the end of the sweep, or to SIGTERM or SIGINT, whose number is returned."""
        handlers = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._run()
        finally:
            self._stop()  # after an error of this worker itself, too: its trials save
            self.progress.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.signal

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def _run(self) -> None:
        next_look = 0.0
        while not self.signal:
            ended = [running for running in self.running.values() if running.process.poll() is not None]
            events = [self._end(running) for running in ended]
            if ended or time.monotonic() >= next_look:
                began = time.monotonic()
                at_work_elsewhere = self._start_trials()
                for event in events:  # only now, so that the figures beside it hold for the time to come
                    self.progress.event(event, *self._overview())
                if not self.running and not (self.wait and at_work_elsewhere):
                    return
                self.progress.show(*self._overview())
                next_look = time.monotonic() + max(LOOK, 10 * (time.monotonic() - began))
            time.sleep(TICK)

    def _start_trials(self) -> bool:
        """Fill the free slots. Whether trials are left that somebody else is at work on."""
        taken = False
        for trial in self.trials:
            if not self.free:
                return taken
            if trial.id in self.running or not self._is_to_run(trial):
                continue
            claim = trial.claim()
            if not claim:
                taken = True
            elif not self._is_to_run(trial):  # somebody else has ended it meanwhile
                claim.close()
            else:
                self._start(trial, claim)
        return taken

    def _is_to_run(self, trial: Trial) -> bool:
        if trial.id in self.finished:
            return False
        status = self._status(trial)
        if status == "failed":
            return self.to_retry.get(trial.id) == attempts(trial)
        return status != "finished"

    def _status(self, trial: Trial) -> Status:
        status = trial.status()
        if status == "finished":
            self.finished[trial.id] = trial.record().get("seconds")
        return status

    def _start(self, trial: Trial, claim: IO) -> None:
        slot = self.free.pop(0)
        words = trial.words(self.launcher, self.name, self.wandb_mode)
        trial.write(
            status="running",
            attempts=attempts(trial) + 1,
            exit_code=None,
            host=socket.gethostname(),
            devices=slot.devices,
            started=time.time(),
            seconds=None,
        )
        with trial.log.open("a") as log:
            print(f"{ATTEMPT}{attempts(trial)} on {socket.gethostname()}: {shlex.join(words)}", file=log, flush=True)
            process = subprocess.Popen(
                [sys.executable, str(minder.__file__), str(os.getpid()), *words],
                env=trial_environment(os.environ, slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(claim.fileno(),),  # the trial is claimed as long as any of its processes lives
                start_new_session=True,  # Ctrl-C is for the worker, which passes it on
            )
        self.running[trial.id] = Running(trial, slot, claim, process, time.monotonic())

    def _end(self, running: Running) -> str:
        """Note how a trial has ended, and let go of it; what is to be said about it."""
        trial, code = running.trial, running.process.returncode
        del self.running[trial.id]
        self.free.append(running.slot)
        self.free.sort(key=lambda slot: slot.number)
        seconds = time.monotonic() - running.started
        was_stopped = self.signal or self.is_stopping or code in SAVED
        status: Status = "interrupted" if was_stopped else "failed"
        if trial.is_finished:
            status = "finished"
            self.finished[trial.id] = seconds
        trial.write(status=status, exit_code=code, seconds=round(seconds, 1))
        running.claim.close()
        text = f"{trial.name} {status} after {duration(seconds)}"
        if status == "failed":
            text += f" with exit code {code}; its log is {trial.log}"
        return text

    def _stop(self) -> None:
        """Tell the trials of this worker to save, and wait until they have."""
        self.is_stopping = True
        if self.signal and self.running:
            self.progress.say(f"{signal.Signals(self.signal).name}: {len(self.running)} trials save and end")
        for running in self.running.values():
            running.process.terminate()
        for running in list(self.running.values()):
            running.process.wait()
            event = self._end(running)
            self.progress.event(event, *self._overview())

    def _overview(self) -> tuple[Counter[str], float | None]:
        """How many trials have which status, here and elsewhere, and the seconds left."""
        counts: Counter[str] = Counter()
        elapsed = []
        for trial in self.trials:
            status = "finished" if trial.id in self.finished else self._status(trial)
            counts[status] += 1
            if status == "running":
                elapsed.append(time.time() - trial.record().get("started", time.time()))
        durations = [seconds for seconds in self.finished.values() if seconds]
        return counts, seconds_left(durations, elapsed, counts["waiting"] + counts["interrupted"])


def attempts(trial: Trial) -> int:
    return trial.record().get("attempts", 0)


def trial_environment(outer: Mapping[str, str], slot: Slot) -> dict[str, str]:
    """It differs between slots in nothing but the devices: what a trial computes must not depend on others."""
    environment: dict[str, Any] = {
        key: value for key, value in outer.items() if key not in ("WANDB_RUN_ID", "WANDB_SWEEP_ID")
    }
    # sums differ in the last bit with the number of threads: it must not follow from the number of trials at once
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(round(minder.PATIENCE)))
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    if slot.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot.devices)
    return environment
