"""Start the launch scripts as a user would, and leave no process behind."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jobs
import psutil
from jobs import ROOT


def environment(**more: str) -> dict[str, str]:
    """This Python first on the path, and nothing of an outer launcher or of SLURM."""
    outer = ("SLURM_", "NODE", "HEAD_", "PROCESSES", "ENGINE", "GLOO_", "PET_")
    kept = {key: value for key, value in jobs.environment().items() if not key.startswith(outer)}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return kept | {"PATH": path, "VIRTUAL_ENV": sys.prefix} | more


def run(script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """One of the scripts, to its end."""
    command = [str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=300)


def stub(folder: Path, name: str, then: str = "") -> str:
    """A command that notes in folder/calls how it was called, and runs some bash; returns a PATH with it first."""
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "{name} $*" >> "{folder}/calls"\n{then}\n')
    file.chmod(0o755)
    return f"{file.parent}:{environment()['PATH']}"


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@contextmanager
def started(log: Path, command: list[str], **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in the background that writes to `log`; it and all that it started are gone afterwards."""
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=environment(**more), stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        # torchrun's processes lead sessions of their own, so that no signal to a group would reach them
        family = descendants(process) if process.poll() is None else []
        for member in [process, *family]:
            member.kill()
        process.wait()


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def trainers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes that train, among those that a launcher started."""
    launcher = psutil.Process(process.pid)
    return [child for child in launcher.children() if any(word.endswith("launch/train.py") for word in child.cmdline())]


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds} seconds"
        time.sleep(0.02)
