"""What benchmarks/step.py and training.py say of their rounds."""

import numpy as np
import pytest
from jobs import ROOT


@pytest.fixture(autouse=True)
def benchmarks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_an_interval_has_the_order_statistics_that_tables_give() -> None:
    from intervals import Interval

    # Conover, Practical Nonparametric Statistics: of 10 values the 2nd and the 9th, of 20 the 6th and the 15th
    assert Interval.of(range(6, 0, -1)) == Interval(1, 3.5, 6)
    assert Interval.of(range(1, 11)) == Interval(2, 5.5, 9)
    assert Interval.of(range(1, 21)) == Interval(6, 10.5, 15)
    with pytest.raises(ValueError, match="6 values"):
        Interval.of([1.0] * 5)


def test_19_of_20_intervals_have_the_true_median_inside() -> None:
    from intervals import Interval

    draws = np.random.default_rng(0).exponential(size=(2000, 15))  # skewed, as times are
    intervals = [Interval.of(row) for row in draws]
    inside = np.mean([interval.low <= np.log(2) <= interval.high for interval in intervals])
    assert 0.95 <= inside <= 0.98  # 0.965 for 15 values: order statistics come in steps


def test_a_verdict_is_by_medians_and_says_what_noise_leaves_open() -> None:
    from step import verdict

    steady = {"by hand": [1.5] * 6, "eager": [1.4] * 6, "compiled": [1.02] * 6, "warm-up": [1.0] * 6}
    assert verdict(steady, 1.04) == "all met"
    assert verdict(steady, 1.01) == "missed: compiled"
    assert verdict({**steady, "eager": [1.6] * 6}, 1.04) == "missed: eager <= by hand"
    noisy = [0.9, 0.95, 1.0, 1.06, 1.1, 1.2]
    assert verdict({**steady, "compiled": noisy}, 1.04) == "all met; within the noise: compiled"
    assert verdict({**steady, "warm-up": noisy}, 1.04) == "missed: warm-up; within the noise: warm-up"
