"""Which features: a threshold on the smoothed mask, or exactly k of them by a search on lam. Section 2.2 of the paper.

    without a count   a feature is chosen if its smoothed mask is 0.5 or more
    exactly k         some lam and some cut c in [0.2, 0.8] such that k features have a smoothed mask of c or more

The search starts at 1e-3, doubles or halves lam until one fit has too many features and one too few, and then tries the
geometric mean of the two that are nearest. It ends with a cut, after a number of fits, or when lam has no room left;
without a cut the answer is the nearest count that some cut does give; of two, the larger one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

THRESHOLD = 0.5
LOWEST_CUT, HIGHEST_CUT = 0.2, 0.8
START = 1e-3
CLOSEST = 1.001  # two lams nearer than this have nothing between them but chance


@dataclass(frozen=True)
class Fit:
    """What training with one lam gave."""

    lam: float
    smoothed: np.ndarray
    seconds: float


@dataclass(frozen=True)
class Selection:
    """An answer, and how it came about."""

    asked: int | None  # None: a threshold was asked for
    lam: float
    cut: float
    smoothed: np.ndarray = field(repr=False)
    steps: int = 1  # one for each new fit; all that other counts have left is looked at in one step, the first
    fits: int = 1  # new ones: as many as steps in a search for one count alone
    seconds: float = 0.0  # of these fits

    @property
    def support(self) -> np.ndarray:
        return self.smoothed >= self.cut

    @property
    def count(self) -> int:
        return int(self.support.sum())

    @property
    def exact(self) -> bool:
        return self.asked is None or self.asked == self.count

    @property
    def converged(self) -> bool:
        return converged(self.smoothed)


def undecided(smoothed: np.ndarray) -> float:
    """Fraction of the values in [0.15, 0.85]."""
    return float(((smoothed >= 0.15) & (smoothed <= 0.85)).mean())


def converged(smoothed: np.ndarray) -> bool:
    """The paper's criterion: at most 20% of the values are undecided."""
    return undecided(smoothed) <= 0.2


def cut_for(smoothed: np.ndarray, count: int) -> float | None:
    """The cut in [0.2, 0.8], as near to 0.5 as can be, that leaves so many features; None if there is none."""
    falling = np.sort(smoothed)[::-1]
    last_in = float(falling[count - 1]) if count else math.inf
    first_out = float(falling[count]) if count < len(falling) else -math.inf
    high = min(last_in, HIGHEST_CUT)  # a cut may lie on it, but not on first_out
    if high < LOWEST_CUT or first_out >= high:
        return None
    if high < THRESHOLD:
        return high
    return THRESHOLD if first_out < THRESHOLD else (first_out + high) / 2


def nearest_cut(smoothed: np.ndarray, count: int) -> float:
    """The cut in [0.2, 0.8] that leaves the nearest count; of two, the one with more features."""
    between = smoothed[(smoothed >= LOWEST_CUT) & (smoothed <= HIGHEST_CUT)]
    cuts = sorted({LOWEST_CUT, THRESHOLD, HIGHEST_CUT, *between.tolist()})
    return min(cuts, key=lambda cut: abs(int((smoothed >= cut).sum()) - count))


class Search:
    """Selections from one set of fits: what was fitted for one count serves the others as well."""

    def __init__(self, fit: Callable[[float], Fit], start: float = START, max_steps: int = 16) -> None:
        if not (math.isfinite(start) and start > 0):
            raise ValueError(f"a search must start at a lam above zero, not {start!r}")
        if max_steps < 1:
            raise ValueError(f"a search needs at least one step, not {max_steps!r}")
        self.fit = fit
        self.start = start
        self.max_steps = max_steps
        self.fits: dict[float, Fit] = {}

    def above_threshold(self) -> Selection:
        if self.start not in self.fits:
            self._add(self.start)
        fit = self.fits[self.start]
        return Selection(None, fit.lam, THRESHOLD, fit.smoothed, seconds=fit.seconds)

    def exactly(self, count: int) -> Selection:
        """So many features, or the nearest count; `Selection.exact` says which."""
        before = set(self.fits)
        if not self.fits:
            self._add(self.start)
        steps = 1  # what was known already counts as one
        found = self._with_cut(count)
        while found is None and steps < self.max_steps:
            lam = self._next(count)
            if lam is None:
                break
            self._add(lam)
            steps += 1
            found = self._with_cut(count)
        if found is None:
            options = [(fit, nearest_cut(fit.smoothed, count)) for fit in self.fits.values()]
            counts = [int((fit.smoothed >= cut).sum()) for fit, cut in options]
            found = options[min(range(len(options)), key=lambda i: (abs(counts[i] - count), -counts[i]))]
        fit, cut = found
        new = [self.fits[lam] for lam in self.fits if lam not in before]
        seconds = sum(one.seconds for one in new)
        return Selection(count, fit.lam, cut, fit.smoothed, steps, len(new), seconds)

    def _add(self, lam: float) -> None:
        self.fits[lam] = self.fit(lam)

    def _with_cut(self, count: int) -> tuple[Fit, float] | None:
        """Of the fits that have a cut, the one with the cut nearest to 0.5."""
        cuts = [(fit, cut_for(fit.smoothed, count)) for fit in self.fits.values()]
        found = [(fit, cut) for fit, cut in cuts if cut is not None]
        return min(found, key=lambda pair: abs(pair[1] - THRESHOLD), default=None)

    def _next(self, count: int) -> float | None:
        """The next lam to try; None if there is none between the nearest two."""
        too_many = [lam for lam, fit in self.fits.items() if self._has_more(fit, count)]
        too_few = [lam for lam, fit in self.fits.items() if not self._has_more(fit, count)]
        if not too_many:
            return min(too_few) / 2
        low = max(too_many)  # chance may leave a smaller lam with too few
        above = [lam for lam in too_few if lam > low]
        if not above:
            return low * 2
        high = min(above)
        return math.sqrt(low * high) if high / low > CLOSEST else None

    def _has_more(self, fit: Fit, count: int) -> bool:
        """Whether a fit without a cut has too many features, rather than too few."""
        if int((fit.smoothed >= LOWEST_CUT).sum()) < count:
            return False
        return int((fit.smoothed >= HIGHEST_CUT).sum()) > count or int((fit.smoothed >= THRESHOLD).sum()) > count
