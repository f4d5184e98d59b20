"""`--target_sparsity`: the coefficient lam is steered so that the run ends at a sparsity that was asked for."""

from dataclasses import dataclass

START = 1 / 30  # of the lam that was given
LOOK_AHEAD = 5.0  # corrections
RAISE, LOWER = 1.15, 0.9  # factors of lam


@dataclass
class Steering:
    """Raises lam slowly while the masks are on their way to less than the target; otherwise lets them coast with none.

    The penalty pushes masks off, often in waves, and nothing but the loss pushes them on again: the target is reached
    from below. Two forecasts say where masks are going: the latents' own directions, which show slow masks long before
    the sparsity does, and the speed of the sparsity, which shows a wave that is still growing.
    """

    target: float
    lam: float
    last: float = 0.0  # sparsity at the last correction

    @classmethod
    def begin(cls, target: float, lam: float) -> "Steering":
        return cls(target, lam * START)

    def correct(self, sparsity: float, by_direction: float) -> float:
        """The lam to go on with; `by_direction` is the sparsity that the latents are heading for."""
        by_speed = sparsity + LOOK_AHEAD * max(0.0, sparsity - self.last)
        self.last = sparsity
        if max(by_speed, by_direction) >= self.target:
            self.lam *= LOWER
            return 0.0
        self.lam *= RAISE
        return self.lam
