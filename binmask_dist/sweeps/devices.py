"""How many trials run at once, and on what."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from binmask_dist.sweeps.commands import Launch
from binmask_dist.sweeps.sweep_file import SweepError


@dataclass(frozen=True)
class Slot:
    """A place for one trial at a time; it has no devices if trials run on the CPU."""

    number: int
    devices: tuple[str, ...]


def make_slots(launch: Launch, jobs: int | None, devices: Sequence[str], cores: int) -> list[Slot]:
    """`jobs` of them, or as many as fit on different devices, or on different cores if there are none."""
    devices = () if launch.on_cpu else tuple(devices)
    if devices and launch.processes > len(devices):
        raise SweepError(
            f"a trial has {launch.processes} processes, and there are {len(devices)} devices; "
            "change --num_processes in the sweep file's command"
        )
    jobs = jobs or max(1, (len(devices) or cores) // launch.processes)
    return [Slot(number, _share(number, launch.processes, devices)) for number in range(jobs)]


def _share(number: int, processes: int, devices: tuple[str, ...]) -> tuple[str, ...]:
    """Neighbours; from the first on again where there are more slots than shares."""
    if not devices:
        return ()
    first = number % (len(devices) // processes) * processes
    return devices[first : first + processes]


def find_devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES allows, or all GPUs that nvidia-smi lists."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        names = [device.strip() for device in allowed.split(",")]
        return [name for name in names if name and not name.startswith("-")]  # -1 is how CUDA is told of none
    command = shutil.which("nvidia-smi")
    if not command:
        return []
    listed = subprocess.run([command, "-L"], capture_output=True, text=True)
    return re.findall(r"^GPU (\d+):", listed.stdout, re.MULTILINE) if listed.returncode == 0 else []


def count_cores() -> int:
    """Those that this process may use, which is fewer than all under SLURM and in containers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
