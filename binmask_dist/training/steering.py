"""`--target_sparsity`: the coefficient lam is steered so that the run ends at a sparsity that was asked for."""

from dataclasses import dataclass

from binmask_dist import BinMask
from binmask_dist.method import readout
from binmask_dist.training.config import TrainConfig

START = 1 / 30  # of the lam that was given
LOOK_AHEAD = 5.0  # corrections
RAISE, LOWER = 1.15, 0.9  # factors of lam
CORRECTIONS = 10  # in an epoch: each is a pass over the latents


@dataclass
class Course:
    """Raises lam slowly while the masks are on their way to less than the target; otherwise lets them coast with none.

    The penalty pushes masks off, often in waves, and nothing but the loss pushes them on again: the target is reached
    from below. Two forecasts say where masks are going: the latents' own directions, which show slow masks long before
    the sparsity does, and the speed of the sparsity, which shows a wave that is still growing.
    """

    target: float
    lam: float
    last: float = 0.0  # sparsity at the last correction

    def correct(self, sparsity: float, by_direction: float) -> float:
        """The lam to go on with; `by_direction` is the sparsity that the latents are heading for."""
        by_speed = sparsity + LOOK_AHEAD * max(0.0, sparsity - self.last)
        self.last = sparsity
        if max(by_speed, by_direction) >= self.target:
            self.lam *= LOWER
            return 0.0
        self.lam *= RAISE
        return self.lam


class Steering:
    """Holds the masks of a run to a course, which is all that a checkpoint needs of it."""

    def __init__(self, binmask: BinMask, config: TrainConfig, steps_per_epoch: int) -> None:
        assert config.target_sparsity is not None
        self.binmask, self.config, self.steps_per_epoch = binmask, config, steps_per_epoch
        self.course = Course(config.target_sparsity, config.lam * START)
        self._set_lam(self.course.lam)

    def begin_epoch(self, epoch: int, steps_done: int) -> None:
        """In the last one, what lam cannot reach is put right, and the weights get used to it."""
        if epoch == self.config.epochs - 1:
            if steps_done == 0:
                self.binmask.settle(self.course.target)
            self.binmask.freeze()

    def after_step(self, epoch: int, steps_done: int) -> None:
        interval = max(1, self.steps_per_epoch // CORRECTIONS)
        if self.binmask.is_learning() and steps_done % interval == 0:
            ahead = self._sparsity_ahead(epoch, steps_done)
            self._set_lam(self.course.correct(self.binmask.sparsity(), ahead))

    def _sparsity_ahead(self, epoch: int, steps_done: int) -> float:
        """What the latents are heading for: as far as one starts from zero, or as the rest of the run can carry it."""
        rates = [self.binmask.mask_rate(later) for later in range(epoch, self.config.epochs)]
        left = sum(rates) * self.steps_per_epoch - rates[0] * steps_done
        return readout.expected_sparsity(self.binmask, min(self.config.alpha0, left))

    def _set_lam(self, lam: float) -> None:
        for group in self.binmask.masked_groups:
            group["lam"] = lam
