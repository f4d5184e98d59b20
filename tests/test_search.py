"""The search for exactly k features, on masks that are made up."""

import itertools

import numpy as np
import pytest

from binmask_dist.selection.search import Fit, Search, converged, cut_for, nearest_cut, undecided


def made_up(features: int = 100, blur: float = 0.1, tie: bool = False):
    """A fit that leaves fewer features on the larger lam is: 50 at 1e-3, with values that fall over a width `blur`."""
    lams = []

    def fit(lam: float) -> Fit:
        lams.append(lam)
        kept = features * 0.5 * (1e-3 / lam) ** 0.5
        place = np.arange(features) // (10 if tie else 1) * (10 if tie else 1)
        return Fit(lam, np.clip(0.5 + (kept - place - 0.5) / (blur * features), 0, 1).astype(np.float32), 1.0)

    return fit, lams


def test_a_cut_is_as_near_to_the_middle_as_can_be():
    values = np.array([0.9, 0.7, 0.6, 0.4, 0.3, 0.1])
    assert cut_for(values, 3) == 0.5
    assert cut_for(values, 4) == 0.4  # on the last that is in
    assert cut_for(values, 2) == pytest.approx(0.65)  # above the first that is out
    assert cut_for(values, 1) == pytest.approx(0.75)
    assert cut_for(values, 5) == 0.3
    assert cut_for(values, 6) is None  # would be at 0.1
    assert cut_for(np.array([1.0, 0.95, 0.0]), 1) is None  # would be above 0.8
    assert cut_for(np.array([1.0, 0.6, 0.6, 0.0]), 2) is None  # two are equal
    assert cut_for(np.array([1.0, 0.0]), 2) is None
    assert cut_for(np.array([1.0, 0.9]), 2) == 0.5
    for count in range(1, 7):
        cut = cut_for(values, count)
        assert cut is None or (0.2 <= cut <= 0.8 and (values >= cut).sum() == count)


def test_the_first_fit_may_do():
    fit, lams = made_up()
    found = Search(fit).exactly(50)
    assert lams == [1e-3]
    assert (found.count, found.exact, found.steps, found.lam) == (50, True, 1, 1e-3)


@pytest.mark.parametrize("count", [3, 17, 49, 77, 99])
def test_any_count_is_found_by_doubling_or_halving_and_then_by_bisection(count):
    fit, lams = made_up()
    found = Search(fit).exactly(count)
    assert found.count == count and found.exact
    assert 0.2 <= found.cut <= 0.8
    assert found.steps == found.fits == len(lams) <= 12
    assert lams[0] == 1e-3
    ratios = {round(after / before, 6) for before, after in itertools.pairwise(lams)}
    assert ratios & ({2.0} if count < 50 else {0.5}) or len(lams) == 1


def test_bisection_is_needed_where_masks_are_sharp():
    fit, lams = made_up(blur=1e-3)
    found = Search(fit).exactly(30)
    assert found.exact and found.count == 30
    assert 2e-3 < found.lam < 4e-3 and len(lams) > 3


def test_it_ends_and_says_so_where_no_cut_exists():
    fit, lams = made_up(blur=1e-3, tie=True)  # features come in tens
    found = Search(fit, max_steps=9).exactly(27)
    assert not found.exact
    assert found.count == 30 and found.asked == 27  # the nearest
    assert found.steps == len(lams) <= 9
    either = {0.5: np.zeros(4), 0.25: np.array([1.0, 1.0, 0.0, 0.0])}  # none, or two: as far from one
    assert Search(lambda lam: Fit(lam, either.get(lam, either[0.25]), 0.0), 0.5, max_steps=3).exactly(1).count == 2
    closes_in = Search(fit, max_steps=60).exactly(27)
    assert not closes_in.exact and closes_in.steps < 30  # lam has no room left


def test_a_path_shares_its_fits():
    fit, lams = made_up()
    search = Search(fit)
    path = [search.exactly(count) for count in (50, 40, 30, 20, 10)]
    assert [one.count for one in path] == [50, 40, 30, 20, 10]
    assert sum(one.fits for one in path) == len(lams) == len(set(lams))
    assert [one.seconds for one in path] == [float(one.fits) for one in path]
    alone = sum(Search(fit).exactly(count).steps for count in (50, 40, 30, 20, 10))
    assert sum(one.steps for one in path) < alone
    for larger, smaller in itertools.pairwise(path):
        assert (larger.support | ~smaller.support).all()  # nested, here


def test_chance_that_breaks_the_order_of_lam_does_not_trap_it():
    rng = np.random.default_rng(0)
    smooth, _ = made_up(blur=1e-3)

    def noisy(lam: float) -> Fit:
        return Fit(lam, np.roll(smooth(lam * rng.uniform(0.8, 1.25)).smoothed, 3), 1.0)

    for count in (5, 30, 70):
        assert abs(Search(noisy, max_steps=30).exactly(count).count - count) <= 3


def test_convergence():
    assert converged(np.array([0.0, 0.1, 0.9, 1.0, 0.5]))  # one of five
    assert not converged(np.array([0.0, 0.15, 0.85, 1.0]))  # both ends count
    assert undecided(np.array([0.14, 0.86, 0.5, 0.5])) == 0.5
    assert nearest_cut(np.array([1.0, 0.0]), 2) == 0.2


@pytest.mark.parametrize("arguments", [{"start": 0.0}, {"start": float("nan")}, {"max_steps": 0}])
def test_mistakes(arguments):
    with pytest.raises(ValueError, match="search"):
        Search(lambda lam: None, **arguments)
