"""Tables as sparse matrices: split by patient into three parts, never dense as a whole, judged as in section 3.3."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from jobs import records, result, train_here
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from binmask_dist.report.main import ReportOptions, make_report
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.tasks import make_task
from binmask_dist.training.tasks.base import RunError
from binmask_dist.training.tasks.sparse_table import SparseTableClassification, split_rows

ROWS, FEATURES = 1200, 40
PROTOCOL: dict[str, Any] = dict(
    **dict(task="tabular", model="mlp_tanh", optimizer="adamw", lr=2e-3, lr_final=5e-5, weight_decay=0.01),
    **dict(validation_fraction=0.1, test_fraction=0.15, split_by_seed=True, epochs=3, batch_size=64, patience=3),
    **dict(metric="auc", trackers=(), mask_lr=3e-2, lam=1e-3),
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "table.npz"
    random = np.random.default_rng(0)
    inputs = scipy.sparse.random(ROWS, FEATURES, density=0.2, random_state=random, format="csr")
    y = (inputs @ random.normal(size=FEATURES) + 0.3 * random.normal(size=ROWS) > 0).astype(np.int64)
    write(path, 5 * inputs, y=y, patient=random.integers(0, 500, ROWS))
    return path


def write(path: Path, inputs: Any, **arrays: np.ndarray) -> None:
    """As scipy does, with arrays beside the matrix."""
    csr = scipy.sparse.csr_matrix(inputs)
    matrix = dict(format=b"csr", shape=csr.shape, data=csr.data, indices=csr.indices, indptr=csr.indptr)
    np.savez(path, **matrix, **arrays)


def test_the_split_is_by_group_and_by_seed() -> None:
    groups = np.random.default_rng(1).integers(0, 400, 2000)
    parts = split_rows(groups, (0.1, 0.15), seed=3)
    assert sorted(np.concatenate(parts)) == list(range(2000))
    for rows, fraction in zip(parts, (0.75, 0.1, 0.15), strict=True):
        assert len(rows) / 2000 == pytest.approx(fraction, abs=0.01)
    seen = [set(groups[rows]) for rows in parts]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])
    again, other = split_rows(groups, (0.1, 0.15), seed=3), split_rows(groups, (0.1, 0.15), seed=4)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(parts, again, strict=True))
    assert not np.array_equal(parts[2], other[2])
    exact = split_rows(np.arange(100), (0.1, 0.15), seed=0)
    assert [len(rows) for rows in exact] == [75, 10, 15]


def test_it_stays_sparse(table: Path) -> None:
    def made(**more: Any) -> Any:
        return make_task(TrainConfig(dataset=str(table), **{**PROTOCOL, **more}))

    task = made()
    assert isinstance(task, SparseTableClassification)
    for part in (task.train, task.validation, task.test):
        assert scipy.sparse.issparse(part.inputs)
        assert part.inputs.nnz < 0.3 * np.prod(part.inputs.shape)
    assert task.train.inputs.max() == 1.0  # by the largest of each column
    inputs, labels = task.collate(task.train.__getitems__([4, 2]))
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs, torch.from_numpy(task.train.inputs[[4, 2]].toarray()))
    assert labels.tolist() == task.train.labels[[4, 2]].tolist()
    assert not np.array_equal(task.test.labels, made(seed=1).test.labels)
    fixed = [made(seed=seed, split_by_seed=False).test.labels for seed in (0, 1)]
    assert np.array_equal(*fixed)


def test_a_network_is_chosen_by_the_validation_part(table: Path, tmp_path: Path) -> None:
    folder = train_here(tmp_path, "run", dataset=str(table), **PROTOCOL)
    figures, epochs = result(folder), records(folder)
    assert len(epochs) == 3
    assert not any(key.startswith("test_") for record in epochs for key in record)  # the test data are used once
    assert figures["validation_auc"] == pytest.approx(max(record["validation_auc"] for record in epochs))
    assert figures["test_examples"] + figures["validation_examples"] + figures["train_examples"] == ROWS
    assert 0.5 < figures["test_auc"] <= 1
    assert 0.5 < figures["train_auc"] <= 1
    state = load_file(folder / "model" / "model.safetensors")
    weights = torch.cat([state[name].flatten() for name in figures["layer_sparsity"]]).double().abs()
    assert figures["weight_l0"] == pytest.approx(float((weights >= 1e-4).double().mean()))
    assert figures["weight_l1"] == pytest.approx(float(weights.mean()))
    assert figures["weight_l2"] == pytest.approx(float(weights.square().mean() ** 0.5))
    assert figures["method"] == "binmask"


def test_logistic_regression_is_scikit_learns(table: Path, tmp_path: Path) -> None:
    figures = result(train_here(tmp_path, "run", dataset=str(table), **{**PROTOCOL, "method": "logistic"}))
    task: Any = make_task(TrainConfig(dataset=str(table), **PROTOCOL))
    model = LogisticRegression(max_iter=1000).fit(task.train.inputs, task.train.labels)
    for name, part in (("train", task.train), ("validation", task.validation), ("test", task.test)):
        expected = roc_auc_score(part.labels, model.decision_function(part.inputs))
        assert figures[f"{name}_auc"] == pytest.approx(expected)
        assert figures[f"{name}_accuracy"] == pytest.approx(model.score(part.inputs, part.labels))
    assert figures["weight_l1"] == pytest.approx(np.abs(model.coef_).mean())


def test_the_report_has_the_rows_of_the_papers_table(table: Path, tmp_path: Path) -> None:
    for method in ("binmask", "logistic"):
        for seed in (0, 1):
            options = {**PROTOCOL, "method": method, "seed": seed}
            train_here(tmp_path / "trials", f"{method}-{seed}", dataset=str(table), **options)
    make_report(ReportOptions([str(tmp_path)], metric="auc"))
    (problem,) = json.loads((tmp_path / "report" / "summary.json").read_text())["problems"]
    columns = {each["method"]: each for each in problem["configurations"]}
    assert columns.keys() == {"binmask", "logistic"}
    for method, column in columns.items():
        figures = [result(tmp_path / "trials" / f"{method}-{seed}") for seed in (0, 1)]
        for name in ("train_auc", "test_auc", "weight_l0", "weight_l1", "weight_l2"):
            assert column["metrics"][name]["mean"] == pytest.approx(np.mean([one[name] for one in figures]))
    text = (tmp_path / "report" / "tables.md").read_text()
    assert all(f"| {row} " in text for row in ("test AUC", "train AUC", "weight l0", "weight l1", "weight l2"))


def test_mistakes_are_named(table: Path, tmp_path: Path) -> None:
    def problem(dataset: Any, **more: Any) -> str:
        with pytest.raises(RunError) as error:
            make_task(TrainConfig(dataset=str(dataset), **{**PROTOCOL, **more}))
        return str(error.value)

    inputs = scipy.sparse.identity(20, format="csr")
    write(tmp_path / "no_y.npz", inputs)
    write(tmp_path / "short.npz", inputs, y=np.array([0, 1]))
    write(tmp_path / "nan.npz", inputs * np.nan, y=np.arange(20) % 2)
    write(tmp_path / "one.npz", inputs, y=(np.arange(20) == 3).astype(int))
    np.savez(tmp_path / "dense.npz", x=np.ones(3))
    assert "there is no file" in problem(tmp_path / "none.npz")
    assert "has no array 'y'" in problem(tmp_path / "no_y.npz")
    assert "has no array 'z'" in problem(table, label_column="z")
    assert "must have one entry for each of 20 rows" in problem(tmp_path / "short.npz")
    assert "NaN or inf" in problem(tmp_path / "nan.npz")
    assert "has no rows of some class" in problem(tmp_path / "one.npz")
    assert "holds no sparse matrix" in problem(tmp_path / "dense.npz")
    assert "for the tabular task on a .npz file" in problem("digits", task="image", model="test_resnet")
    assert "takes the models mlp_bn and mlp_tanh" in problem(table, model="resnet18")
