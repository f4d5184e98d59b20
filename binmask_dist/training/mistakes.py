"""How a command ends that cannot go on: one sentence, however many processes have met the same mistake."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from accelerate import Accelerator

from binmask_dist.engines.accelerator import EngineError
from binmask_dist.training.tasks.base import RunError

TOLD = "binmask_dist: the main process has said what is wrong"
PATIENCE = timedelta(seconds=3)


def made(make: Callable[[], Accelerator]) -> Accelerator:
    """The Accelerator; or the end of the process, with a sentence, if what was asked for does not run here."""
    try:
        return make()
    except EngineError as error:  # every process has met it: it follows from what they were told
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


@contextmanager
def told_in_a_sentence(accelerator: Accelerator) -> Iterator[None]:
    """A RunError inside the block ends the process with exit code 1 and its text, without a traceback."""
    try:
        yield
    except RunError as error:
        if not _main_process_tells(accelerator):
            where = "" if accelerator.is_main_process else f" in process {accelerator.process_index}"
            print(f"error{where}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _main_process_tells(accelerator: Accelerator) -> bool:
    """Whether another process has the same to say. Not one that is still at work, or waits for this one in vain."""
    if not dist.is_initialized():
        return False
    store = dist.distributed_c10d._get_default_store()
    try:
        if accelerator.is_main_process:
            store.set(TOLD, "")
            return False
        store.wait([TOLD], PATIENCE)
    except (dist.DistError, RuntimeError):  # nobody has said anything in time, or the store has gone with its process
        return False
    return True
