"""Start a command and see to it that all it starts has ended: python minder.py WORKER_PID COMMAND...

Launchers do not always outlive, or stop, what they started. This process adopts orphans, passes the end of the worker
on as SIGTERM, and inherits the trial's claim, so that nobody takes the trial up while any of its processes is left.
It imports nothing of the package: that would take seconds for every trial.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE = 100.0  # seconds in which what outlives the launcher may save and end


def main(worker: int, command: list[str]) -> int:
    stopped = False
    process: subprocess.Popen | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if process:
            process.terminate()
            signal.alarm(round(2 * PATIENCE))

    def lose_patience(number: int, frame: FrameType | None) -> None:
        if process:
            process.kill()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGALRM, lose_patience)
    if sys.platform == "linux":
        system = ctypes.CDLL(None)
        system.prctl(PR_SET_CHILD_SUBREAPER, 1)
        system.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != worker:  # it was killed before the line above
        return 1
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        print(f"error: {command[0]} cannot be started: {error.strerror}", flush=True)
        return 127
    if stopped:  # before there was a process to tell
        stop(0, None)
    code = process.wait()
    signal.alarm(0)
    end_orphans()
    return code if code >= 0 else 128 - code


def end_orphans() -> None:
    told: set[int] = set()
    deadline = time.monotonic() + PATIENCE
    while _children_left():
        for child in psutil.Process().children():
            try:
                if time.monotonic() > deadline:
                    child.kill()
                # W&B's service ends by itself when it has written what it was given
                elif child.pid not in told and not child.name().startswith("wandb-core"):
                    child.terminate()
            except psutil.NoSuchProcess:
                pass
            told.add(child.pid)
        time.sleep(0.05)


def _children_left() -> bool:
    """Whether any is alive; reaps those that are not."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
