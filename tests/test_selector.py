"""`BinMaskSelector` in the company of scikit-learn, and what it makes of bad input."""

import tracemalloc
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn

from binmask_dist import BinMaskSelector, InputMask
from binmask_dist.selection.fitting import Training
from binmask_dist.selection.network import MaskedLinear, behind_mask, is_row_by_row, mlp
from binmask_dist.selection.problem import Problem
from binmask_dist.selection.rows import Rows, Scaling

CHECKED = dict(epochs=8, batch_size=32, min_batches=4, random_state=0)
QUICK = dict(epochs=16, batch_size=64, min_batches=10, random_state=0)
NEAR = {**QUICK, "lam": 0.032}  # where the search would arrive
USEFUL = [2, 5, 11]


@pytest.fixture(scope="module")
def table() -> tuple[np.ndarray, np.ndarray]:
    """16 features, three of which decide the class, on unlike scales."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 16))
    y = (x[:, USEFUL] @ [2.0, -2.0, 1.5] > 0).astype(int)
    return x * rng.uniform(0.01, 100, 16), y


def all_checks():
    for task in ("classification", "regression"):
        for estimator, check in estimator_checks_generator(BinMaskSelector(task=task, **CHECKED)):
            yield pytest.param(estimator, check, id=f"{task}-{check.func.__name__}")


@pytest.mark.parametrize(("estimator", "check"), list(all_checks()))
@pytest.mark.filterwarnings("ignore")
def test_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def fitted(table) -> BinMaskSelector:
    return BinMaskSelector(3, **NEAR).fit(*table)


def test_exactly_k_features(fitted, table):
    assert fitted.get_support(indices=True).tolist() == USEFUL
    assert fitted.exact_ and fitted.search_steps_ >= 1 and fitted.lam_ > 0 and 0.2 <= fitted.cut_ <= 0.8
    assert fitted.smoothed_mask_.shape == (16,)
    assert (fitted.smoothed_mask_ >= fitted.cut_).sum() == 3
    assert fitted.transform(table[0]).shape == (300, 3)
    assert fitted.classes_.tolist() == [0, 1]
    assert isinstance(fitted.converged_, bool)


def test_random_state_reproduces_and_the_callers_generator_is_left_alone(fitted, table):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    again = BinMaskSelector(3, **NEAR).fit(*table)
    assert torch.equal(torch.rand(3), expected)
    assert np.array_equal(again.smoothed_mask_, fitted.smoothed_mask_)
    other = BinMaskSelector(3, **{**NEAR, "random_state": 1}).fit(*table)
    assert not np.array_equal(other.smoothed_mask_, fitted.smoothed_mask_)


def test_lam_and_the_threshold_without_a_count(table):
    few = BinMaskSelector(lam=0.05, **QUICK).fit(*table)
    many = BinMaskSelector(lam=1e-5, **QUICK).fit(*table)
    assert few.cut_ == many.cut_ == 0.5 and few.search_steps_ == 1
    assert few.get_support().sum() < many.get_support().sum()
    assert np.array_equal(few.get_support(), few.smoothed_mask_ >= 0.5)


def test_string_labels_pandas_and_names(fitted, table):
    x, y = table
    frame = pd.DataFrame(x, columns=[f"gene {i}" for i in range(16)])
    words = pd.Series(np.where(y, "sick", "healthy"))  # without a name
    selector = BinMaskSelector(3, **NEAR).set_output(transform="pandas").fit(frame, words)
    assert np.array_equal(selector.smoothed_mask_, fitted.smoothed_mask_)
    names = [f"gene {i}" for i in USEFUL]
    assert selector.get_feature_names_out().tolist() == names
    assert list(selector.transform(frame).columns) == names
    assert selector.classes_.tolist() == ["healthy", "sick"]


def test_pipeline_clone_and_grid_search(table):
    pipeline = make_pipeline(BinMaskSelector(**{**NEAR, "epochs": 10}), LogisticRegression(max_iter=1000))
    grid = GridSearchCV(pipeline, {"binmaskselector__n_features": [1, 3]}, cv=2).fit(*table)
    assert grid.best_params_ == {"binmaskselector__n_features": 3}
    copied = clone(BinMaskSelector(network=mlp(16, 2, (8,)), groups=[0] * 16, **QUICK))
    assert copied.get_params()["groups"] == [0] * 16


def test_sparse_rows_give_what_dense_ones_do():
    rng = np.random.default_rng(1)
    x = sp.random(200, 30, density=0.2, format="csr", random_state=1)
    y = np.asarray(x[:, :3].sum(axis=1)).ravel() > 0.2
    sparse, dense = (BinMaskSelector(4, **{**QUICK, "lam": 0.01}).fit(rows, y) for rows in (x, x.toarray()))
    assert np.array_equal(sparse.get_support(), dense.get_support())
    np.testing.assert_allclose(sparse.smoothed_mask_, dense.smoothed_mask_, atol=0.05)
    assert sp.issparse(sparse.transform(x))
    unscaled = [BinMaskSelector(scale=False, **{**QUICK, "epochs": 3}).fit(rows, y) for rows in (x, x.toarray())]
    assert np.array_equal(unscaled[0].get_support(), unscaled[1].get_support())

    class Watched(nn.Module):
        largest = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(30, 2)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            Watched.largest = max(Watched.largest, len(rows))
            return self.layer(rows)

    BinMaskSelector(lam=1e-3, network=Watched(), **QUICK).fit(x, rng.permutation(y))  # no linear layer in front
    assert Watched.largest == QUICK["batch_size"]  # never the whole matrix


def test_weights_and_imbalance(table):
    x, y = table
    rare = np.r_[np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:15]]
    settings = {**QUICK, "lam": 2e-3}
    plain = BinMaskSelector(**settings).fit(x[rare], y[rare])
    balanced = BinMaskSelector(class_weight="balanced", **settings).fit(x[rare], y[rare])
    weights = (len(rare) / (2 * np.bincount(y[rare])))[y[rare]]
    weighted = BinMaskSelector(**settings).fit(x[rare], y[rare], sample_weight=weights)
    assert np.array_equal(balanced.smoothed_mask_, weighted.smoothed_mask_)
    assert not np.array_equal(balanced.smoothed_mask_, plain.smoothed_mask_)
    ignored = BinMaskSelector(**settings).fit(
        np.r_[x, 1e6 * np.ones((5, 16))], np.r_[y, [0] * 5], sample_weight=np.r_[np.ones(300), np.zeros(5)]
    )
    assert np.array_equal(ignored.smoothed_mask_, BinMaskSelector(**settings).fit(x, y).smoothed_mask_)
    for bad in (-np.ones(300), np.zeros(300)):
        with pytest.raises(ValueError, match=r"(?i)sample.weight"):
            BinMaskSelector(**settings).fit(x, y, sample_weight=bad)


def test_regression(table):
    x, _ = table
    rng = np.random.default_rng(0)
    y = 1000 + 50 * (x[:, 2] / x[:, 2].std() + np.tanh(3 * x[:, 5] / x[:, 5].std())) + rng.normal(size=300)
    selector = BinMaskSelector(2, **NEAR).fit(x, y)
    assert selector.get_support(indices=True).tolist() == [2, 5]
    assert not hasattr(selector, "classes_")


def test_groups_are_chosen_together(table):
    x, y = table
    labels = [f"variable {i // 2}" for i in range(16)]
    selector = BinMaskSelector(3, groups=labels, **NEAR).fit(x, y)
    assert selector.get_support(indices=True).tolist() == [2, 3, 4, 5, 10, 11]
    with pytest.raises(ValueError, match="one entry for each of the 16 features"):
        BinMaskSelector(groups=[0, 1], **QUICK).fit(x, y)


def test_pixels_for_a_network_of_ones_own():
    rng = np.random.default_rng(0)
    x = rng.random((200, 36))
    y = x[:, 14] + x[:, 21] > 1
    seen = []

    def network(inputs: int, outputs: int) -> nn.Module:
        seen.append((inputs, outputs))
        layers = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, outputs))
        return nn.Sequential(*layers)

    selector = BinMaskSelector(2, network=network, input_shape=(1, 6, 6), lam=0.1, **QUICK).fit(x, y)
    assert selector.get_support(indices=True).tolist() == [14, 21]
    assert set(seen) == {(36, 2)}
    by_mlp = BinMaskSelector(2, input_shape=(6, 6), lam=0.1, **QUICK).fit(x, y)
    assert by_mlp.get_support(indices=True).tolist() == [14, 21]
    with pytest.raises(ValueError, match="25 places, but there are 36"):
        BinMaskSelector(input_shape=(5, 5), **QUICK).fit(x, y)
    with pytest.raises(ValueError, match="torch module"):
        BinMaskSelector(network=lambda inputs, outputs: None, **QUICK).fit(x, y)


def test_a_path_of_counts(table):
    path = (selector := BinMaskSelector(**NEAR)).path(*table, counts=[3, 2, 4])
    assert [one.count for one in path] == [3, 2, 4]
    assert np.flatnonzero(path[0].support).tolist() == USEFUL
    assert path[0].fits >= 1 and all(one.seconds >= 0 for one in path)
    assert selector.get_support().sum() == 4
    with pytest.raises(ValueError, match="at least one count"):
        selector.path(*table, counts=[])
    with pytest.warns(ConvergenceWarning, match="no lam and cut gave 1 features within 1 steps"):
        BinMaskSelector(max_steps=1, lam=1e-7, **{**QUICK, "epochs": 5}).path(*table, counts=[1, 15])


def test_a_mask_in_the_first_layer_is_a_mask_in_front():
    torch.manual_seed(0)
    mask, network = InputMask(5), nn.Sequential(nn.Flatten(), nn.Linear(5, 3), nn.ReLU())
    with torch.no_grad():
        mask.scale[1] = 0
    masked, takes_sparse = behind_mask(network, mask, (5,))
    assert takes_sparse and isinstance(masked[0], MaskedLinear)
    x = torch.rand(4, 5)
    torch.testing.assert_close(masked(x), network(x * mask.scale))
    torch.testing.assert_close(masked(x.to_sparse_csr()), network(x * mask.scale))
    expected = torch.autograd.grad(network(mask(x)).square().sum(), [mask.scale, network[1].weight, network[1].bias])
    for inputs in (x, x.to_sparse_csr()):
        folded = torch.autograd.grad(masked(inputs).square().sum(), [mask.scale, masked[0].weight, masked[0].bias])
        torch.testing.assert_close((folded[0], folded[1].t(), folded[2]), expected)
    assert not behind_mask(nn.Conv2d(1, 1, 3), InputMask((4, 4)), (1, 4, 4))[1]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            masked(x.to_sparse_csr()), network[:2](x * mask.scale).relu(), rtol=0.02, atol=0.02, check_dtype=False
        )
    network[1].weight.requires_grad_(False)
    assert not behind_mask(network, InputMask(5), (5,))[0][0].weight.requires_grad
    network[1].register_forward_hook(lambda *_: None)
    assert not behind_mask(network, InputMask(5), (5,))[1]


def test_every_number_of_processes_draws_the_same_global_batches():
    x = np.arange(50, dtype=np.float32)[:, None]
    y = np.arange(50)
    for epoch in range(2):
        alone = [batch[1] for batch in Rows(x, y, None, (1,)).batches(7, epoch, 16, 5, False)]
        parts = [list(Rows(x, y, None, (1,), rank, 3).batches(7, epoch, 16, 5, False)) for rank in range(3)]
        assert len(alone) == 6 and all(len(rows) == 16 for rows in alone)  # of all rows twice, as five need more
        for whole, *ranks in zip(alone, *parts, strict=True):
            assert sorted(whole.tolist()) == sorted(row for _, target, _ in ranks for row in target.tolist())
            for rank, (inputs, target, _) in enumerate(ranks):
                assert inputs[:, 0].tolist() == target.tolist() and all(row % 3 == rank for row in target.tolist())


def test_rows_that_are_twice_in_a_batch_are_computed_once():
    rng = np.random.default_rng(0)
    x, weight = rng.random((20, 3)).astype(np.float32), rng.random(20)
    rows = Rows(x, np.arange(20), weight, (3,))
    plain = list(rows.batches(7, 1, 16, 4, sparse=False))
    merged = list(rows.batches(7, 1, 16, 4, sparse=False, merge=True))
    assert len(plain) == len(merged) == 5
    for (inputs, target, weights), (once, targets, sums) in zip(plain, merged, strict=True):
        assert len(set(targets.tolist())) == len(targets) < len(target)
        torch.testing.assert_close((inputs * weights[:, None]).sum(0), (once * sums[:, None]).sum(0))
        assert torch.equal(torch.from_numpy(x)[targets], once)
    whole = Rows(np.tile(x, (100, 1)), np.arange(2000), None, (3,))
    assert all(weights is None for _, _, weights in whole.batches(7, 1, 16, 4, sparse=False, merge=True))


def test_which_networks_take_rows_one_by_one():
    assert is_row_by_row(mlp(5, 2)) and is_row_by_row(nn.Sequential(InputMask(5), mlp(5, 2)))
    assert not is_row_by_row(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    assert not is_row_by_row(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)))
    assert not is_row_by_row(nn.Transformer(4, 1, 1, 1, 4))  # unknown


def test_scaling():
    x = np.array([[0.0, -4.0, 7.0], [5.0, 4.0, 7.0], [10.0, 0.0, 7.0]])
    assert Scaling.of(x).apply(x).tolist() == [[0.0, 0.0, 0.0], [0.5, 1.0, 0.0], [1.0, 0.5, 0.0]]
    kept = sp.csr_matrix(x)
    assert Scaling.of(kept).apply(kept).toarray().tolist() == [[0.0, -1.0, 0.0], [0.5, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert kept.toarray().tolist() == x.tolist()
    assert Scaling.of(x).varies.tolist() == [True, True, False]
    for kind in (np.int8, np.uint8, np.int16):
        ends = np.iinfo(kind)
        whole = np.array([[ends.min], [ends.max]], dtype=kind)
        assert Scaling.of(whole).apply(whole).tolist() == [[0.0], [1.0]]
    lowest = sp.csr_matrix(np.array([[-128], [1]], dtype=np.int8))
    assert Scaling.of(lowest).apply(lowest).toarray()[0] == [-1.0]
    for factor in (1e-39, 1e300):
        for extreme in (factor * x, sp.csr_matrix(factor * x)):
            scaled = Scaling.of(extreme).apply(extreme)
            assert np.abs(scaled.toarray() if sp.issparse(scaled) else scaled).max(axis=0).tolist() == [1.0, 1.0, 0.0]


def test_large_sparse_tables_are_scaled_in_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    starts = np.arange(0, 400_001, 100, dtype=np.int32)  # columns in any order, and twice in a row
    x = sp.csr_matrix((rng.normal(size=400_000), rng.integers(0, 900, 400_000, np.int32), starts), shape=(4000, 1000))
    whole = MaxAbsScaler().fit_transform(x.toarray())
    monkeypatch.setattr("binmask_dist.selection.rows.BLOCK", 2**13)
    tracemalloc.start()
    problem = Problem(x, np.arange(4000) % 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_allclose(problem.x.toarray(), whole, atol=1e-6)
    assert problem.varies.tolist() == [True] * 900 + [False] * 100
    assert peak < 1.3 * problem.x.data.nbytes  # the scaled cells; their places are the table's own
    assert np.shares_memory(problem.x.indices, x.indices)
    assert np.shares_memory(Problem(problem.x, np.arange(4000) % 2, scale=False).x.data, problem.x.data)


# Bad input.


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
def test_cells_that_are_no_numbers(table, bad, kind):
    x = table[0].copy()
    x[3, 4] = bad
    with pytest.raises(ValueError, match=r"contains (NaN|infinity)"):
        BinMaskSelector(**QUICK).fit(kind(x), table[1])


def test_a_constant_column_is_not_chosen_however_short_the_training(table):
    x, y = table
    x = np.column_stack([np.ones(len(x)), x])
    for scale in (True, False):
        selector = BinMaskSelector(lam=1e-6, epochs=1, warmup=0.0, scale=scale, random_state=0)
        assert not selector.fit(x, y).support_[0]
        assert selector.support_[1:].any()


def test_constant_and_duplicate_columns(table):
    x, y = table
    x = np.c_[x[:, :12], np.full(300, 5.0), np.zeros(300), x[:, 2]]  # 12 and 13 are constant, 14 is 2 again
    chosen = BinMaskSelector(4, **{**NEAR, "lam": 0.02}).fit(x, y).get_support(indices=True)
    assert {5, 11} < set(chosen) and {2, 14} & set(chosen) and not {12, 13} & set(chosen)
    everything = BinMaskSelector(13, **QUICK).fit(x, y)
    assert everything.get_support(indices=True).tolist() == [*range(12), 14]
    assert everything.search_steps_ == 0
    with pytest.raises(ValueError, match="only 13 of the 15 features are not constant"):
        BinMaskSelector(14, **QUICK).fit(x, y)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "from 1 to the number of features, 16, not 0"),
        (17, "from 1 to the number of features, 16, not 17"),
        (-1, "not -1"),
        (2.5, "whole number"),
        (True, "whole number"),
        ("3", "whole number"),
    ],
)
def test_counts_that_cannot_be(table, count, message):
    with pytest.raises(ValueError, match=message):
        BinMaskSelector(count, **QUICK).fit(*table)


def test_targets_that_cannot_be(table):
    x, y = table
    with pytest.raises(ValueError, match="at least two classes"):
        BinMaskSelector(**QUICK).fit(x, np.zeros(300, dtype=int))
    with pytest.raises(ValueError, match="must be numbers for regression"):
        BinMaskSelector(task="regression", **QUICK).fit(x, np.array(["a", "b"] * 150))
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        BinMaskSelector(task="classification", **QUICK).fit(x, x[:, 0])
    with pytest.raises(ValueError, match="task must be"):
        BinMaskSelector(task="ranking", **QUICK).fit(x, y)
    with pytest.raises(ValueError, match="requires y"):
        BinMaskSelector(**QUICK).fit(x, None)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        BinMaskSelector(**QUICK).fit(x, y[:-1])
    with pytest.raises(NotFittedError):
        BinMaskSelector().transform(x)


def test_settings_that_cannot_be(table):
    for name, value in (("epochs", 0), ("batch_size", 1.5), ("lr", -1.0), ("max_steps", 0), ("lam", 0.0)):
        with pytest.raises(ValueError, match=f"{name}|search"):
            BinMaskSelector(3, **{**QUICK, name: value}).fit(*table)
    with pytest.raises(ValueError, match=r"loss is not finite .* lower lr"):
        BinMaskSelector(task="regression", **{**QUICK, "lr": 1e12}).fit(*table)
    with pytest.raises(ValueError, match="class_weight is for classification"):
        BinMaskSelector(task="regression", class_weight="balanced", **QUICK).fit(*table)
    with pytest.raises(ValueError, match=r"answers with shape \(\d+, 1\) for \d+ rows; it must be \(\d+, 2\)"):
        BinMaskSelector(network=lambda inputs, outputs: nn.Linear(inputs, 1), **QUICK).fit(*table)
    normalised = nn.Sequential(nn.Linear(16, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="1 rows of a batch of 1, too few for batch normalisation; raise batch_size"):
        BinMaskSelector(network=normalised, **{**QUICK, "batch_size": 1}).fit(*table)


def test_engines_that_cut_networks_up_are_refused(table):
    for engine in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        with pytest.raises(ValueError, match="on one process or under DDP"):
            Problem(*table).search(SimpleNamespace(distributed_type=engine), Training(), start=1e-3)


def test_a_network_with_one_flat_output_for_regression(table):
    network = nn.Sequential(nn.Linear(16, 1), nn.Flatten(0))
    assert BinMaskSelector(network=network, task="regression", lam=1e-3, **QUICK).fit(*table).get_support().any()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_callers_accelerator_is_left_alone(table, precision):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=4)
    try:
        BinMaskSelector(**{**QUICK, "epochs": 2}).fit(*table)
        BinMaskSelector(**{**QUICK, "epochs": 2}).fit(sp.csr_matrix(table[0]), table[1])
        assert (accelerator.gradient_accumulation_steps, accelerator.mixed_precision) == (4, precision)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_fewer_rows_than_a_batch(table):
    x, y = table
    selector = BinMaskSelector(3, **{**NEAR, "batch_size": 256}).fit(x[:60], y[:60])
    assert selector.get_support().sum() == 3


def test_a_search_without_an_answer_says_so(table):
    x, y = table
    with pytest.warns(ConvergenceWarning, match="no lam and cut gave 1 features within 1 steps"):
        selector = BinMaskSelector(1, max_steps=1, lam=1e-7, **{**QUICK, "epochs": 5}).fit(x, y)
    assert not selector.exact_ and selector.get_support().sum() > 1


def test_a_progress_bar_only_if_asked_for(table, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BinMaskSelector(**{**QUICK, "epochs": 2}).fit(*table)
        assert "epoch" not in capsys.readouterr().err
        BinMaskSelector(verbose=1, **{**QUICK, "epochs": 2}).fit(*table)
        assert "lam 0.001: 100%" in capsys.readouterr().err
