"""Means with intervals, and tests. The statistics are those of scipy and statsmodels; here is what goes into them.

A sample is a dict from seed to value, one value for each trial that has a finite one.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

CONFIDENCE = 0.95
BOLD_ABOVE = 0.3  # the paper's rule: the best is not significantly better if p is above this

Sample = Mapping[int, float]
Point = tuple[Sample, Sample]  # a configuration on a curve: its sparsities and metrics by seed


@dataclass(frozen=True)
class Summary:
    """Of one metric over the trials of a configuration."""

    trials: int  # with a finite value
    missing: int  # without: they are not in any of the figures
    mean: float
    std: float | None  # None, as is the interval, for a single trial
    low: float | None
    high: float | None
    min: float
    max: float

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def summarise(values: Iterable[float]) -> Summary | None:
    """Mean, sample standard deviation, 95% t-interval, min and max of what is finite; None if nothing is.

    Equal values have an interval of no width: that is all the sample says, and not that there is no uncertainty.
    """
    every = np.asarray(list(values), dtype=float)
    finite = every[np.isfinite(every)]
    missing = len(every) - len(finite)
    if not len(finite):
        return None
    low_value, high_value = float(finite.min()), float(finite.max())
    if low_value == high_value:  # a mean of equal values may differ from them in the last bit
        std, end = (0.0, low_value) if len(finite) > 1 else (None, None)
        return Summary(len(finite), missing, low_value, std, end, end, low_value, low_value)
    described = DescrStatsW(finite, ddof=1)
    low, high = described.tconfint_mean(1 - CONFIDENCE)
    mean, std = float(described.mean), float(described.std)
    return Summary(len(finite), missing, mean, std, float(low), float(high), low_value, high_value)


@dataclass(frozen=True)
class Comparison:
    """Of two samples; `difference` is the mean of the second less that of the first."""

    test: str  # "paired t-test", "Welch's t-test", or "none"
    trials: tuple[int, int]
    difference: float
    p: float | None  # two-sided; None, as is the interval, where no test is possible, for the reason given
    reason: str = ""
    low: float | None = None  # 95% interval of the difference
    high: float | None = None


def compare(first: Sample, second: Sample) -> Comparison:
    """A paired test over the seeds of the smaller sample if the other has them all, and Welch's test otherwise."""
    small, large = sorted((first, second), key=len)
    if small.keys() <= large.keys():
        name, seeds = "paired t-test", sorted(small)
        one, other = _array(first[seed] for seed in seeds), _array(second[seed] for seed in seeds)
        too_even = _constant(other - one, np.concatenate([one, other]))
    else:
        name = "Welch's t-test"
        one, other = _array(first.values()), _array(second.values())
        too_even = _constant(one, one) and _constant(other, other)
    trials = (len(one), len(other))
    difference = float(other.mean() - one.mean()) if min(trials) else math.nan
    if min(trials) < 2:
        return Comparison("none", trials, difference, None, "a test needs two trials of each")
    if too_even:
        what = "the differences" if name.startswith("paired") else "the values"
        return Comparison("none", trials, difference, None, f"{what} do not vary, and a test needs that")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that values nearly agree; the p-value is what it is
        paired = name.startswith("paired")
        result = stats.ttest_rel(other, one) if paired else stats.ttest_ind(other, one, equal_var=False)
        p = float(result.pvalue)
    if not math.isfinite(p):
        return Comparison("none", trials, difference, None, "the values hardly vary, and a test needs that")
    low, high = map(float, result.confidence_interval(CONFIDENCE))
    return Comparison(name, trials, difference, p, low=low, high=high)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Corrected over all tests that were possible."""
    tested = [index for index, p in enumerate(p_values) if p is not None]
    corrected: list[float | None] = [None] * len(p_values)
    if tested:
        for index, p in zip(tested, multipletests([p_values[i] for i in tested], method="holm")[1], strict=True):
            corrected[index] = float(p)
    return corrected


def best_index(means: Sequence[float | None], higher_is_better: bool) -> int | None:
    """The first of the best; None if there is no mean."""
    there = [index for index, mean in enumerate(means) if mean is not None]
    sign = -1 if higher_is_better else 1
    return min(there, key=lambda index: sign * (means[index] or 0.0), default=None)


def is_bold(mean: float | None, best: float | None, p: float | None) -> bool:
    """The paper's rule, on p-values that are not corrected: the best, and what it is not significantly better than."""
    return mean is not None and (mean == best or (p is not None and p > BOLD_ABOVE))


@dataclass(frozen=True)
class Estimate:
    """A metric of a configuration, or of a curve at a sparsity between those of its configurations."""

    summary: Summary
    sample: dict[int, float] | None  # by seed; None if the configurations of the curve share too few seeds


def at_sparsity(points: Sequence[Point], sparsity: float) -> Estimate | None:
    """The metric of a curve at `sparsity`; a point of it is a configuration: its sparsities and metrics by seed.

    Two configurations have mean sparsities that enclose `sparsity`. Each seed that both have has a curve of its own,
    straight between neighbours in its own sparsities. If these are two or more, or all there are, their values at
    `sparsity` are a sample like any other.

    Otherwise the two configurations are mixed, (1-w) A + w B, and the interval is Welch's for the difference between
    (1-w) A and -w B. It takes the mean sparsities for exact.

    None beyond the ends of a curve, be it that of one seed: nothing is extrapolated.
    """
    both = [_both(*point) for point in points]
    points = [point for point in both if point[0]]
    neighbours = _neighbours(points, sparsity)
    if neighbours is None:
        return None
    left, right = (set(sparsities) for sparsities, _ in neighbours)
    shared = left & right
    if len(shared) < 2 and left != right:
        return _mix(neighbours, sparsity)
    sample: dict[int, float] = {}
    for seed in sorted(shared):
        curve = [(sparsities[seed], values[seed]) for sparsities, values in points if seed in sparsities]
        value = _interpolate(curve, sparsity)
        if value is None:
            return None
        sample[seed] = value
    summary = summarise(sample.values())
    return None if summary is None else Estimate(summary, sample)


def _interpolate(curve: list[tuple[float, float]], sparsity: float) -> float | None:
    """Points of equal sparsity count as their mean."""
    at: dict[float, list[float]] = {}
    for x, y in curve:
        at.setdefault(x, []).append(y)
    xs = sorted(at)
    if not xs[0] <= sparsity <= xs[-1]:
        return None
    return float(np.interp(sparsity, xs, [np.mean(at[x]) for x in xs]))


def _neighbours(points: Sequence[Point], sparsity: float) -> tuple[Point, Point] | None:
    """The two of which one is less and one more sparse; one point twice where it is just as sparse."""
    nodes = sorted(points, key=_mean_sparsity)
    for node in nodes:
        if _mean_sparsity(node) == sparsity:
            return node, node
    pairs = (pair for pair in pairwise(nodes) if _mean_sparsity(pair[0]) < sparsity < _mean_sparsity(pair[1]))
    return next(pairs, None)


def _mix(pair: tuple[Point, Point], sparsity: float) -> Estimate:
    (left, right), (a, b) = map(_mean_sparsity, pair), (_array(values.values()) for _, values in pair)
    weight = (sparsity - left) / (right - left)
    one, other = (1 - weight) * a, -weight * b
    mean = float(one.mean() - other.mean())
    low = high = None
    if len(a) > 1 and len(b) > 1:
        low, high = mean, mean
        if np.ptp(one) or np.ptp(other):
            low, high = map(float, stats.ttest_ind(one, other, equal_var=False).confidence_interval(CONFIDENCE))
    ends = (float(one.min() - other.max()), float(one.max() - other.min()))
    return Estimate(Summary(min(len(a), len(b)), 0, mean, None, low, high, *ends), None)


def _both(sparsities: Sample, values: Sample) -> tuple[Sample, Sample]:
    """Of the seeds that have both."""
    seeds = [seed for seed in sparsities if seed in values]
    return {seed: sparsities[seed] for seed in seeds}, {seed: values[seed] for seed in seeds}


def _mean_sparsity(point: Point) -> float:
    return float(np.mean(list(point[0].values())))


def _constant(values: np.ndarray, of: np.ndarray) -> bool:
    """Whether values that were worked out from `of` differ by no more than rounding."""
    return not len(values) or bool(np.ptp(values) <= 1e-12 * np.abs(of).max())


def _array(values: Iterable[float]) -> np.ndarray:
    return np.fromiter(values, dtype=float)
