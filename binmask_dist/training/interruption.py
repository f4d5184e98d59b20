"""SIGTERM and SIGINT: a run saves and leaves at the end of its step, on all processes together."""

import ctypes
import signal
import sys
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PR_SET_PDEATHSIG = 1
SECONDS = 0.2  # between two questions
MOST_STEPS = 100
LAST_STEP = 2**62  # later than any


class Interruption:
    """Remembers a signal, and bad losses, until all processes have agreed on them.

    Launchers signal their processes one after the other, and a loss may be bad on one of them alone. An answer takes as
    long as the update of a small network, so they ask each other every so often only, all at the same step.
    """

    def __init__(self, device: torch.device) -> None:
        self.signal = 0
        self.handlers: dict[int, Any] = {}
        self.earliness = torch.zeros((), dtype=torch.int64, device=device)  # of a bad loss; 0: there was none
        self.steps, self.interval, self.asked = 0, 1, time.perf_counter()

    def __enter__(self) -> "Interruption":
        self.handlers = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def agree(self, step: int, is_bad: Tensor, now: bool) -> tuple[int, int | None]:
        """The signal that any process has got, or 0; and the first step since the last answer with a bad loss on any.

        `now`: ask at this step, however short ago that was.
        """
        self.earliness = torch.maximum(self.earliness, is_bad * (LAST_STEP - step))
        self.steps += 1
        if self.steps < self.interval and not now:
            return 0, None
        seconds = time.perf_counter() - self.asked
        interval = min(int(self.steps * SECONDS / seconds), MOST_STEPS)
        # the largest of each: of intervals the smallest
        answer = torch.stack([self.earliness, *torch.tensor([self.signal, -interval], device=self.earliness.device)])
        if dist.is_initialized():
            dist.all_reduce(answer, dist.ReduceOp.MAX)
        earliness, number, negative = answer.tolist()
        self.earliness = torch.zeros_like(self.earliness)
        self.steps, self.interval, self.asked = 0, -negative, time.perf_counter()
        return number, LAST_STEP - earliness if earliness else None


def end_with_the_launcher() -> None:
    """Accelerate's launcher of a single process does not pass signals on: take its end for one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
