"""The checkpoints of a run: written at intervals, the oldest removed, the newest good one found again.

Each lies in a folder of its own, `checkpoints/step-00000420` (`best-` for early stopping), and counts only once it has
`checkpoint.json`, which is written last. So a kill at any moment, or a full disk, leaves the ones before.
"""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from binmask_dist import CheckpointError, MaskedOptimizer, load_checkpoint, save_checkpoint
from binmask_dist.engines.checkpoint_files import INDEX
from binmask_dist.training.averaging import Average
from binmask_dist.training.tasks.base import RunError


class Checkpoints:
    """Every process calls; the main one writes."""

    def __init__(
        self, folder: Path, keep: int, binmask: MaskedOptimizer, average: Average | None, accelerator: Accelerator
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.binmask = binmask
        self.average = average
        self.accelerator = accelerator

    def save(self, step: int, extra: dict[str, Any]) -> bool:
        """Whether it could be written; if not, the run goes on with the ones before."""
        return self._add("step", step, self.keep, extra)

    def save_best(self, step: int, extra: dict[str, Any]) -> bool:
        return self._add("best", step, 1, extra)

    @property
    def exist(self) -> bool:
        """Whether there is one to go on from."""
        return bool(self._complete("step"))

    def load_newest(self) -> dict[str, Any] | None:
        """Load the newest that can be read, and return its extra; None if there is none at all."""
        return self._load(list(reversed(self._complete("step"))))

    def load_best(self) -> None:
        if self._load(self._complete("best")[-1:]) is None:
            raise RunError(f"the best epoch is no longer in {self.folder}; run it again under another --name")

    def check_space(self, bytes_per_checkpoint: int) -> None:
        """Raise now rather than at the first checkpoint."""
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        count = self.keep + 1  # a new one is written before the oldest goes
        free, needed = shutil.disk_usage(existing).free, bytes_per_checkpoint * count
        if free < needed:
            raise RunError(
                f"{count} checkpoints need {needed / 2**20:,.0f} MiB and {existing} has {free / 2**20:,.0f} left; "
                "free some, or point --run_root to another disk"
            )

    def _add(self, kind: str, step: int, keep: int, extra: dict[str, Any]) -> bool:
        saved = self._write(self.folder / f"{kind}-{step:08}", extra)
        if saved and self.accelerator.is_main_process:
            kept = self._complete(kind)[-keep:]
            for other in set(self.folder.glob(f"{kind}-*")).difference(kept):  # old ones, and what a kill has left
                remove(other)
        return saved

    def _write(self, path: Path, extra: dict[str, Any]) -> bool:
        try:
            self._all_or_nobody(lambda: self.average.save(path, self.accelerator) if self.average else None)
            save_checkpoint(path, self.binmask, extra)
        except CheckpointError as error:
            if self.accelerator.is_main_process:
                warnings.warn(f"{error}; the run goes on, and the checkpoints before are kept", stacklevel=2)
                shutil.rmtree(path, ignore_errors=True)
            return False
        return True

    def _all_or_nobody(self, write: Callable[[], None]) -> None:
        """An error of the main process's file system is everyone's."""
        answer: list[str | None] = [None]
        try:
            write()
        except OSError as error:
            answer[0] = f"the average could not be written: {error}"
        broadcast_object_list(answer)
        if answer[0]:
            raise CheckpointError(answer[0])

    def _load(self, paths: list[Path]) -> dict[str, Any] | None:
        for path in paths:
            try:
                extra = load_checkpoint(path, self.binmask)
                if self.average:
                    self.average.load(path)
                return extra
            except CheckpointError as error:
                if path is paths[-1]:
                    raise RunError(str(error)) from error
                if self.accelerator.is_main_process:
                    warnings.warn(f"{error}; the checkpoint before it is used", stacklevel=2)
        return None

    def _complete(self, kind: str) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"{kind}-*/{INDEX}"))


def remove(path: Path) -> None:
    """Its index first: what is left of it if this is interrupted is no checkpoint."""
    (path / INDEX).unlink(missing_ok=True)
    shutil.rmtree(path)
