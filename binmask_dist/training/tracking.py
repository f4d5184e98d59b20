"""What a run logs: every record goes to metrics.jsonl, and from there to the trackers that were asked for.

Each tracker has a thread of its own, so that training never waits for it. One that raises, hangs or falls behind is
switched off with one sentence, and training goes on.
"""

import queue
import threading
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from binmask_dist import BinMask, MaskedOptimizer
from binmask_dist.method import readout
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.metrics_file import FILE_NAME, MetricsFile, jsonable
from binmask_dist.training.mistakes import writing
from binmask_dist.training.tasks.base import RunError
from binmask_dist.training.trackers import FINISH_LIMIT, Record, Tracker, make_trackers, say

LONGEST_QUEUE = 10_000  # records that wait; a tracker which is that far behind does not catch up
HASTY_LIMIT = 5.0  # seconds for a tracker to catch up when a run ends early
STEPS_TO_ZERO = 10  # a latent is near zero if so many steps, each as long as the mask rate, could carry it across


class Tracking:
    """Made by every process; only the main one writes.

    A record has a "kind" ("step", "epoch", ...) and the optimizer "step" after which it was made. Log it before the
    checkpoint of that step is saved: a run that resumes there drops later records and makes no earlier ones again.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        accelerator: Accelerator,
        resume_step: int | None,
        open_epoch: int | None = None,
    ) -> None:
        self.writes = accelerator.is_main_process
        problem: list[str | None] = [None]  # all processes must go on or stop together
        if self.writes:
            try:
                trackers = make_trackers(folder, config, resume_step)
                self.file = MetricsFile(folder / FILE_NAME, resume_step, open_epoch)
                self.followers = [Follower(tracker, self.file.kept) for tracker in trackers]
            except (RunError, OSError) as error:
                problem = [str(error)]
        broadcast_object_list(problem)
        if problem[0] is not None:
            raise RunError(problem[0])

    def log(self, record: dict[str, Any]) -> None:
        if not self.writes:
            return
        record = jsonable(record)
        with writing(str(self.file.path)):
            self.file.add(record)
        for follower in self.followers:
            follower.log(record)

    def finish(self, summary: dict[str, Any], exit_code: int = 0) -> None:
        """Close the file and the trackers, with the run's result; waits a limited time for those that are slow.

        A run that ends early gives an exit code other than zero, and waits less: whoever stopped it may be in a hurry.
        """
        if not self.writes:
            return
        self.file.close()
        for follower in self.followers:
            follower.finish(jsonable(summary), exit_code, FINISH_LIMIT if exit_code == 0 else HASTY_LIMIT)


class Follower:
    """Hands records to a tracker, in a thread."""

    def __init__(self, tracker: Tracker, history: list[Record]) -> None:
        self.tracker = tracker
        self.on = True
        self.waiting: queue.Queue[Record | None] = queue.Queue(LONGEST_QUEUE)
        self.last_words: tuple[dict[str, Any], int] = ({}, 0)
        self.thread = threading.Thread(target=self._follow, args=(history,), daemon=True, name=tracker.name)
        self.thread.start()

    def log(self, record: Record | None) -> None:
        if not self.on:
            return
        try:
            self.waiting.put_nowait(record)
        except queue.Full:
            self._switch_off(f"it is {LONGEST_QUEUE:,} records behind")

    def finish(self, summary: dict[str, Any], exit_code: int, limit: float) -> None:
        self.last_words = (summary, exit_code)
        self.log(None)
        self.thread.join(limit)
        if self.thread.is_alive():
            self._switch_off(f"it did not finish within {limit:.0f} seconds")

    def _follow(self, history: list[Record]) -> None:
        try:
            self.tracker.start(history)
            for record in iter(self.waiting.get, None):
                self.tracker.log(record)
            self.tracker.finish(*self.last_words)
        except Exception as error:
            reason = str(error).strip() or type(error).__name__
            self._switch_off(reason.splitlines()[0])

    def _switch_off(self, reason: str) -> None:
        if self.on:
            self.on = False
            say(f"warning: {self.tracker.name} is switched off ({reason}); metrics.jsonl has every record")
            self.tracker.abandon()


def flips_so_far(method: MaskedOptimizer) -> dict[str, int]:
    """Since the start of the run, by kind. Collective."""
    flips = method.flips()
    return {"on_to_off": flips.on_to_off, "off_to_on": flips.off_to_on, "returns": flips.returns}


def mask_record(method: MaskedOptimizer, flips_before: dict[str, int]) -> dict[str, Any]:
    """What an epoch's record says of the masks; `flips_before` is `flips_so_far` at its start. Collective."""
    group = method.masked_groups[0]
    return {
        "sparsity": method.sparsity(),
        "layer_sparsity": method.layer_sparsity(),
        **{kind: count - flips_before[kind] for kind, count in flips_so_far(method).items()},
        **(_latent_record(method) if isinstance(method, BinMask) else {}),
        "mask_lr": method.mask_lr,
        "lam": group["lam"],
        "frozen": group["frozen"],
    }


def _latent_record(binmask: BinMask) -> dict[str, Any]:
    counts, edges = binmask.latent_histogram()
    margin = STEPS_TO_ZERO * binmask.mask_lr
    near_zero = readout.latent_histogram(binmask, [-margin, margin])[0] if margin else 0
    return {
        "latent_histogram": {"counts": counts, "edges": edges},
        "near_zero": near_zero,
        "near_zero_fraction": near_zero / sum(counts),
    }
