"""How a command ends that cannot go on: one sentence, however many processes have met the same mistake."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from accelerate import Accelerator
from safetensors import SafetensorError

from binmask_dist.engines.accelerator import EngineError
from binmask_dist.training.tasks.base import RunError

TOLD = "binmask_dist: what the process that ended first said is wrong"
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
    """A RunError inside the block ends the process with exit code 1 and its text, without a traceback.

    So does what torch raises in a process that was waiting for one which has ended so.
    """
    try:
        yield
    except RunError as error:
        if not _main_process_tells(str(error), accelerator):
            where = "" if accelerator.is_main_process else f" in process {accelerator.process_index}"
            print(f"error{where}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except RuntimeError:
        if _is_told():
            raise SystemExit(1) from None
        raise


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
    with suppress(RuntimeError):  # it has said nothing in time
        if not accelerator.is_main_process:
            store.wait([TOLD], PATIENCE)
            return store.get(TOLD).decode() == text
    with suppress(RuntimeError):  # the store has gone with its process
        store.set(TOLD, text)
    return False


def _is_told() -> bool:
    """Whether a process has ended with a sentence, which it says before its connections close."""
    with suppress(RuntimeError):
        return dist.is_initialized() and dist.distributed_c10d._get_default_store().check([TOLD])
    return False
