"""Where a run took place: versions, hardware, code and command line, without names of people or their folders."""

import getpass
import os
import platform
import re
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("binmask_dist", "torch", "accelerate", "deepspeed", "timm", "transformers", "datasets", "wandb")


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "versions": {package: found for package in PACKAGES if (found := _version(package))},
        "git_commit": _git_commit(),
        "command": [_anonymous(argument) for argument in sys.argv],
    }


def memory_record() -> dict[str, int]:
    """The most memory that this process has used so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    record = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_available():
        record["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return record


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Of the folder that the run was started in; with a + if files differ from it."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + "+" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _anonymous(argument: str) -> str:
    """Paths without the home folder and without the user's name."""
    text = re.sub(rf"(?<![\w/.-]){re.escape(str(Path.home()))}(?=/|$)", "~", argument)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        return text
    return "/".join("USER" if part == user else part for part in text.split("/"))
