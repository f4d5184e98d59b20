"""SIGTERM and SIGINT: a run saves and leaves at the end of its step, on all processes together."""

import ctypes
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1


class Interruption:
    """Remembers a signal. Launchers signal their processes one after the other, so they have to agree on the step."""

    def __init__(self) -> None:
        self.signal = 0
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        self.handlers = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def agree(self, bad_loss: torch.Tensor) -> Callable[[], tuple[int, bool]]:
        """Ask all processes, and go on. What is returned waits for the answer: the signal that any of them has got, or
        0; and whether the loss of any of them is bad."""
        both = torch.stack([torch.full_like(bad_loss, self.signal, dtype=torch.int32), bad_loss.int()])
        asked = dist.all_reduce(both, dist.ReduceOp.MAX, async_op=True) if dist.is_initialized() else None

        def answer() -> tuple[int, bool]:
            if asked is not None:
                asked.wait()
            number, bad = both.tolist()
            return number, bool(bad)

        return answer


def end_with_the_launcher() -> None:
    """Accelerate's launcher of a single process does not pass signals on: take its end for one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
