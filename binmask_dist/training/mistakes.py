"""How a command ends that cannot go on: one sentence, however many processes have met the same mistake."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from accelerate import Accelerator
from safetensors import SafetensorError

from binmask_dist.engines.accelerator import EngineError
from binmask_dist.training.tasks.base import RunError

TOLD = "binmask_dist: what the main process says is wrong"
PATIENCE = timedelta(seconds=3)


def made_or_told(make: Callable[[], Accelerator]) -> Accelerator:
    """The Accelerator; or the end of the process, with a sentence, if what was asked for does not run here."""
    try:
        return make()
    except EngineError as error:  # all processes of a host have met it
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


@contextmanager
def told_in_a_sentence(accelerator: Accelerator) -> Iterator[None]:
    """A RunError inside the block ends the process with exit code 1 and its text, without a traceback."""
    try:
        yield
    except RunError as error:
        if not _main_process_tells(str(error), accelerator):
            where = "" if accelerator.is_main_process else f" in process {accelerator.process_index}"
            print(f"error{where}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


@contextmanager
def writing(what: str) -> Iterator[None]:
    """A disk inside the block that is full, or gone, ends the run with a sentence, too."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"{what} cannot be written ({reason}); once it can, go on with --resume, or start anew under another --name"
        ) from error


def _main_process_tells(text: str, accelerator: Accelerator) -> bool:
    """Whether the main process says the same. Not if it is still at work, or waits for this one in vain."""
    if not dist.is_initialized():
        return False
    store = dist.distributed_c10d._get_default_store()
    try:
        if accelerator.is_main_process:
            store.set(TOLD, text)
            return False
        store.wait([TOLD], PATIENCE)
        return store.get(TOLD).decode() == text
    except RuntimeError:  # it has said nothing in time, or the store has gone with its process
        return False
