"""Aggregation and tests: against numpy and scipy, and as properties that hold for any sample."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from binmask_dist.report.configurations import group
from binmask_dist.report.statistics import at_sparsity, best_index, compare, holm, is_bold, summarise
from binmask_dist.report.trials import Trial

FEW = settings(max_examples=40, deadline=None)
# squares of smaller ones are zero in floating point, and scipy answers NaN
VALUES = st.lists(st.floats(-1e6, 1e6).filter(lambda value: value == 0 or abs(value) > 1e-100), min_size=1, max_size=12)
P_VALUES = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12)


# a sample


@FEW
@given(VALUES)
def test_a_summary_is_that_of_numpy_and_scipy(values: list[float]) -> None:
    summary = summarise(values)
    assert summary is not None
    assert (summary.trials, summary.missing) == (len(values), 0)
    assert (summary.min, summary.max) == (min(values), max(values))
    scale = max(1e-300, np.abs(values).max())
    assert summary.mean == pytest.approx(np.mean(values), abs=1e-12 * scale)
    if len(values) == 1:
        assert (summary.std, summary.low, summary.high, summary.half_width) == (None, None, None, None)
        return
    assert summary.std == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-9 * scale)
    if min(values) < max(values):
        expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
        assert (summary.low, summary.high) == pytest.approx(expected, rel=1e-6, abs=1e-9 * scale)
    assert summary.low is not None and summary.high is not None
    assert summary.low <= summary.mean <= summary.high
    assert summary.min - 1e-12 * scale <= summary.mean <= summary.max + 1e-12 * scale


def test_differences_that_are_equal_but_for_rounding_are_no_evidence() -> None:
    """Each seed one image of 360 worse: the differences differ by 1e-16."""
    one, other = (
        {seed: count / 360 for seed, count in enumerate(counts)} for counts in ((340, 341, 344), (339, 340, 343))
    )
    assert np.ptp([one[seed] - other[seed] for seed in one]) > 0
    comparison = compare(one, other)
    assert comparison.p is None and "do not vary" in comparison.reason


def test_a_configuration_far_away_takes_no_seeds_from_its_neighbours() -> None:
    near = [
        ({seed: x + 0.001 * seed for seed in range(5)}, {seed: y for seed in range(5)})
        for x, y in ((0.8, 0.9), (0.9, 0.8))
    ]
    far = ({0: 0.99}, {0: 0.1})
    assert at_sparsity([*near, far], 0.85) == at_sparsity(near, 0.85)
    assert at_sparsity([*near, far], 0.85).summary.trials == 5


@FEW
@given(VALUES, st.randoms(use_true_random=False))
def test_the_order_of_trials_changes_nothing(values: list[float], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = summarise(values), summarise(shuffled)
    assert one is not None and other is not None
    scale = max(1e-300, np.abs(values).max())
    for key in ("mean", "min", "max", *(("std", "low", "high") if len(values) > 1 else ())):
        assert getattr(one, key) == pytest.approx(getattr(other, key), rel=1e-6, abs=1e-9 * scale)


@FEW
@given(st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda values: np.ptp(values) > 1e-3))
def test_more_of_the_same_make_the_interval_narrower(values: list[float]) -> None:
    one, two = summarise(values), summarise(values * 2)
    assert one is not None and two is not None
    assert one.half_width is not None and two.half_width is not None
    assert two.half_width < one.half_width


def test_what_is_not_finite_is_counted_and_in_no_figure() -> None:
    summary = summarise([1.0, math.nan, 3.0, math.inf])
    assert summary is not None
    assert (summary.trials, summary.missing, summary.mean, summary.max) == (2, 2, 2.0, 3.0)
    assert summarise([math.nan]) is None
    assert summarise([]) is None


def test_equal_values_have_an_interval_of_no_width() -> None:
    summary = summarise([0.1, 0.1, 0.1])
    assert summary is not None
    assert (summary.mean, summary.std, summary.low, summary.high) == (0.1, 0.0, 0.1, 0.1)


# two samples

A = {0: 0.91, 1: 0.93, 2: 0.90, 3: 0.95}
B = {0: 0.90, 1: 0.91, 2: 0.89, 3: 0.92}


def test_equal_seeds_are_paired() -> None:
    result = compare(A, dict(reversed(B.items())))
    assert result.test == "paired t-test"
    assert result.p == pytest.approx(stats.ttest_rel(list(A.values()), list(B.values())).pvalue)
    assert result.difference == pytest.approx(np.mean(list(B.values())) - np.mean(list(A.values())))
    gains = np.array(list(B.values())) - np.array(list(A.values()))
    assert (result.low, result.high) == pytest.approx(stats.t.interval(0.95, 3, gains.mean(), stats.sem(gains)))


def test_a_trial_that_failed_leaves_the_others_paired() -> None:
    fewer = {seed: B[seed] for seed in (0, 1, 3)}
    result = compare(A, fewer)
    assert (result.test, result.trials) == ("paired t-test", (3, 3))
    assert result.p == pytest.approx(stats.ttest_rel([A[0], A[1], A[3]], list(fewer.values())).pvalue)


def test_other_seeds_get_the_test_of_welch() -> None:
    other = {10: 0.90, 1: 0.91, 12: 0.89}
    result = compare(A, other)
    assert (result.test, result.trials) == ("Welch's t-test", (4, 3))
    expected = stats.ttest_ind(list(A.values()), list(other.values()), equal_var=False)
    assert result.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.95)
    assert (result.low, result.high) == pytest.approx((-interval.high, -interval.low))


def test_where_no_test_is_possible_the_reason_is_given() -> None:
    assert compare({0: 1.0}, {0: 2.0}).p is None and compare({0: 1.0}, {0: 2.0}).low is None
    assert "two trials" in compare({0: 1.0}, {0: 2.0}).reason
    assert "two trials" in compare({}, A).reason
    shifted = compare({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.5})
    assert (shifted.p, shifted.difference) == (None, 0.5)
    assert "differences do not vary" in shifted.reason
    assert "values do not vary" in compare({0: 1.0, 1: 1.0}, {2: 2.0, 3: 2.0}).reason


@settings(max_examples=12, deadline=None)  # statsmodels collects garbage in every call, which takes a sixth of a second
@given(P_VALUES)
def test_the_correction_of_holm(p_values: list[float | None]) -> None:
    corrected = holm(p_values)
    tested = sorted((p, q) for p, q in zip(p_values, corrected, strict=True) if p is not None and q is not None)
    assert [q is None for q in corrected] == [p is None for p in p_values]
    assert all(p <= q <= 1 for p, q in tested)
    assert [q for _, q in tested] == sorted(q for _, q in tested)
    if tested:
        assert tested[0][1] == pytest.approx(min(1, len(tested) * tested[0][0]))


def test_the_bold_rule_of_the_paper() -> None:
    assert best_index([0.9, None, 0.95, 0.95], higher_is_better=True) == 2
    assert best_index([0.9, None, 0.95], higher_is_better=False) == 0
    assert best_index([None, None], higher_is_better=True) is None
    assert is_bold(0.95, 0.95, None)  # the best itself, or its equal
    assert is_bold(0.94, 0.95, 0.31)
    assert not is_bold(0.94, 0.95, 0.3)
    assert not is_bold(0.94, 0.95, None)  # one trial each: nothing says that it is as good
    assert not is_bold(None, 0.95, None)


# the same sparsity


def test_each_seed_has_a_curve_of_its_own() -> None:
    points = [({0: 0.80, 1: 0.82}, {0: 0.96, 1: 0.94}), ({0: 0.90, 1: 0.91}, {0: 0.92, 1: 0.93})]
    found = at_sparsity(points, 0.85)
    assert found is not None
    values = [np.interp(0.85, [0.80, 0.90], [0.96, 0.92]), np.interp(0.85, [0.82, 0.91], [0.94, 0.93])]
    assert found.sample == pytest.approx({0: values[0], 1: values[1]})
    assert found.summary.mean == pytest.approx(np.mean(values))
    expected = stats.t.interval(0.95, 1, loc=np.mean(values), scale=stats.sem(values))
    assert (found.summary.low, found.summary.high) == pytest.approx(expected)


@pytest.mark.parametrize("sparsity", [0.79, 0.81, 0.905, 0.95])
def test_nothing_is_extrapolated_for_any_seed(sparsity: float) -> None:
    points = [({0: 0.80, 1: 0.82}, {0: 0.96, 1: 0.94}), ({0: 0.90, 1: 0.91}, {0: 0.92, 1: 0.93})]
    assert at_sparsity(points, sparsity) is None
    assert at_sparsity(points[:1], sparsity) is None
    assert at_sparsity([], sparsity) is None


def test_without_shared_seeds_means_are_interpolated() -> None:
    a, b = np.array([0.96, 0.94, 0.95]), np.array([0.92, 0.93])
    points = [({0: 0.8, 1: 0.8, 2: 0.8}, dict(enumerate(a))), ({7: 0.9, 8: 0.9}, {7: b[0], 8: b[1]})]
    found = at_sparsity(points, 0.875)
    assert found is not None and found.sample is None
    assert found.summary.mean == pytest.approx(0.25 * a.mean() + 0.75 * b.mean())
    expected = stats.ttest_ind(0.25 * a, -0.75 * b, equal_var=False).confidence_interval(0.95)
    assert (found.summary.low, found.summary.high) == pytest.approx(tuple(expected))
    assert at_sparsity(points, 0.95) is None


def test_a_curve_of_single_trials_has_no_interval() -> None:
    same = at_sparsity([({0: 0.8}, {0: 0.96}), ({0: 0.9}, {0: 0.92})], 0.85)
    other = at_sparsity([({0: 0.8}, {0: 0.96}), ({1: 0.9}, {1: 0.92})], 0.85)
    for found in (same, other):
        assert found is not None
        assert found.summary.mean == pytest.approx(0.94)
        assert (found.summary.low, found.summary.high) == (None, None)


@FEW
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=6), st.floats(0, 1))
def test_an_interpolated_value_lies_between_its_neighbours(curve: list[tuple[float, float]], sparsity: float) -> None:
    found = at_sparsity([({0: x}, {0: y}) for x, y in curve], sparsity)
    xs, ys = [x for x, _ in curve], [y for _, y in curve]
    assert (found is not None) == (min(xs) <= sparsity <= max(xs))
    if found:
        assert min(ys) - 1e-9 <= found.summary.mean <= max(ys) + 1e-9


# configurations

CONFIG = {"task": "image", "dataset": "digits", "model": "m", "target_sparsity": None, "epochs": 1}
TRIALS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([1e-6, 2e-6, 3e-6]), st.floats(0, 1)),
    min_size=1,
    max_size=15,
    unique_by=lambda trial: trial[:2],
)


@FEW
@given(TRIALS, st.randoms(use_true_random=False))
def test_trials_that_differ_in_the_seed_alone_are_one_configuration(
    drawn: list[tuple[int, float, float]], random: object
) -> None:
    def make_trial(seed: int, lam: float, accuracy: float) -> Trial:
        config = {**CONFIG, "seed": seed, "lam": lam, "name": f"run {seed} {lam}"}  # the name is no part of a trial
        result = {"test_accuracy": accuracy, "test_loss": 1.0, "sparsity": 0.5}
        return Trial(f"{seed} {lam}", config, result, [{"train_loss": 1.0}])

    shuffled = list(drawn)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    (problem,), (again,) = group(make_trial(*each) for each in drawn), group(make_trial(*each) for each in shuffled)
    assert {each.label for each in problem.configurations} == {f"lam {lam:g}" for _, lam, _ in drawn}
    for one, other in zip(problem.configurations, again.configurations, strict=True):
        lam = one.config["lam"]
        mine = {seed: accuracy for seed, its, accuracy in drawn if its == lam}
        assert one.sample("test_accuracy") == mine
        assert one.seeds == sorted(mine)
        assert one.summaries == other.summaries  # to the bit: trials are put in the order of their seeds
        assert one.mean("test_accuracy") == pytest.approx(np.mean(list(mine.values())))
