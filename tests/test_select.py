"""launch/select.py: files of all kinds, what comes out, two ranks, and mistakes."""

import csv
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.io
import scipy.sparse as sp
from accelerate.state import AcceleratorState, GradientState
from jobs import ROOT, environment, records
from ranks import run_two_ranks
from sklearn.datasets import dump_svmlight_file

from binmask_dist import BinMaskSelector, make_accelerator
from binmask_dist.selection.arff import read_arff
from binmask_dist.selection.config import parse_select_config
from binmask_dist.selection.main import main, select
from binmask_dist.selection.table import read_table
from binmask_dist.training.tasks.base import RunError

QUICK = dict(epochs=12, batch_size=64, min_batches=10, lam=0.03)
USEFUL = [2, 5, 11]


def options(**values: Any) -> list[str]:
    return [f"--{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in values.items()]


def select_here(**values: Any) -> Path:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return select(parse_select_config(options(**{**QUICK, **values})), make_accelerator())


@pytest.fixture(scope="module")
def numbers() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(250, 16)).astype(np.float32)
    return x, (x[:, USEFUL] @ [2.0, -2.0, 1.5] > 0).astype(np.int64)


@pytest.fixture(scope="module")
def runs(numbers, tmp_path_factory) -> Path:
    """The same selection by one process, here, and by two ranks."""
    folder = tmp_path_factory.mktemp("selection")
    x, y = numbers
    np.savez(folder / "table.npz", x=x, y=y, names=np.array([f"gene{i}" for i in range(16)]))
    job = {**QUICK, "data": str(folder / "table.npz"), "n_features": [3, 2], "seed": 4}
    (folder / "arguments.json").write_text(json.dumps(options(**job)))
    (folder / "estimator.json").write_text(json.dumps({**QUICK, "n_features": 3, "random_state": 0}))
    run_two_ranks("selection.py", folder)
    select_here(**{**job, "run_root": str(folder), "name": "one"})
    return folder


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_the_command_on_two_processes_chooses_what_one_process_does(runs):
    folders = [runs / "one", runs / "command"]
    arguments = [*json.loads((runs / "arguments.json").read_text()), f"--run_root={runs}", "--name=command"]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml"]
    launcher += ["--main_process_port", "0"]
    command = [sys.executable, *launcher, "launch/select.py", *arguments, "--wandb_mode=disabled"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "features.csv, result.json and plots are in" in done.stdout
    assert result(runs / "command")["processes"] == 2
    here, there = ([[f["column"] for f in one["features"]] for one in r["selections"]] for r in map(result, folders))
    assert here == there
    assert all((folder / "features.csv").exists() for folder in folders)


def test_two_ranks_choose_what_one_process_does(runs, numbers):
    one, two = result(runs / "one"), result(runs / "two")
    assert (one["processes"], two["processes"]) == (1, 2)
    for alone, shared in zip(one["selections"], two["selections"], strict=True):
        assert [feature["column"] for feature in alone["features"]] == [f["column"] for f in shared["features"]]
        assert (alone["lam"], alone["steps"], alone["chosen"]) == (shared["lam"], shared["steps"], shared["chosen"])
    losses = [[record["loss"] for record in records(runs / name, "fit")] for name in ("one", "two")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def test_the_estimator_on_two_ranks(runs, numbers):
    alone = BinMaskSelector(3, **QUICK, random_state=0).fit(*numbers)
    shared = np.load(runs / "estimator.npy")
    assert np.array_equal(shared >= alone.cut_, alone.get_support())
    np.testing.assert_allclose(shared, alone.smoothed_mask_, atol=0.2)


def test_what_comes_out(runs):
    folder = runs / "one"
    three, two = result(folder)["selections"]
    assert {feature["name"] for feature in three["features"]} == {f"gene{i}" for i in USEFUL}
    assert three["exact"] and three["steps"] >= 1 and 0.2 <= three["cut"] <= 0.8 and three["converged"]
    assert [feature["mask"] for feature in three["features"]] == sorted(
        (feature["mask"] for feature in three["features"]), reverse=True
    )
    with (folder / "features.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16 and rows[0].keys() == {"feature", "column", "mask", "chosen"}
    assert sum(int(row["chosen"]) for row in rows) == two["chosen"] == 2
    assert (folder / "mask.png").stat().st_size > 5000 and not (folder / "pixels.png").exists()
    fits = records(folder, "fit")
    assert len(fits) == QUICK["epochs"] * (three["fits"] + two["fits"])
    assert fits[-1].keys() >= {"lam", "loss", "selected", "undecided"}
    assert json.loads((folder / "config.json").read_text())["seed"] == 4


def test_an_image_of_pixels_groups_and_wandb(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.random((200, 144)).astype(np.float32)
    scipy.io.savemat(tmp_path / "pixels.mat", {"X": x, "Y": (x[:, 40] + x[:, 41] > 1).astype(int)[:, None]})
    monkeypatch.setenv("WANDB_MODE", "offline")
    images = dict(data=tmp_path / "pixels.mat", input_shape=[1, 12, 12], network="lenet5_bn", run_root=tmp_path)
    folder = select_here(**{**images, "epochs": 2, "trackers": ["wandb"], "wandb_mode": "offline", "name": "pixels"})
    assert (folder / "pixels.png").stat().st_size > 5000
    assert list((folder / "wandb").glob("offline-run-*"))
    (only,) = result(folder)["selections"]
    assert only["asked"] is None and only["cut"] == 0.5

    color = rng.choice(["red", "green", "blue"], 200)
    noise = rng.random((200, 2))
    frame = pd.DataFrame({"a": noise[:, 0], "color": color, "b": noise[:, 1], "goal": color == "red"})
    frame.to_csv(tmp_path / "words.csv", index=False)
    folder = select_here(data=tmp_path / "words.csv", target="goal", n_features=1, run_root=tmp_path, name="words")
    (only,) = result(folder)["selections"]
    assert only["groups"] == ["color"]
    assert {feature["name"] for feature in only["features"]} == {"color=blue", "color=green", "color=red"}


ARFF = """% a comment
@RELATION 'AP'
@attribute ID_REF string
@attribute '1007_s at' numeric
@ATTRIBUTE b REAL
@attribute Tissue {Breast, 'Ovary two'}
@data
GSM1,1.5,?,Breast
'GSM 2',2.5,3e2,'Ovary two'
"""


def test_files_of_all_kinds(numbers, tmp_path):
    x, y = numbers
    frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(16)]).assign(label=np.where(y, "yes", "no"))
    frame.to_csv(tmp_path / "t.csv", index=False)
    pd.DataFrame({"x": list(x), "label": y}).to_parquet(tmp_path / "lists.parquet")
    dump_svmlight_file(x, y, str(tmp_path / "t.svmlight"))
    sparse = sp.csr_matrix(x)
    parts = dict(data=sparse.data, indices=sparse.indices, indptr=sparse.indptr, shape=sparse.shape, format=b"csr")
    np.savez(tmp_path / "sparse.npz", y=y, **parts)
    scipy.io.savemat(tmp_path / "t.mat", {"X": sparse, "Y": y[:, None]})
    for name in ("t.csv", "lists.parquet", "t.svmlight", "sparse.npz", "t.mat"):
        table = read_table(tmp_path / name)
        rows = table.x.toarray() if sp.issparse(table.x) else table.x
        np.testing.assert_allclose(rows, x, rtol=1e-5, atol=1e-6)
        assert np.array_equal(np.unique(table.y, return_inverse=True)[1], y), name
        assert sp.issparse(table.x) == (name in ("t.svmlight", "sparse.npz", "t.mat"))
        assert len(table.names) == 16 and table.groups is None
    assert read_table(tmp_path / "t.csv").names[3] == "c3"

    frame.to_csv(tmp_path / "T.CSV", index=False)
    assert read_table(tmp_path / "T.CSV", ignore=["c1"]).names[:2] == ["c0", "c2"]
    np.savez(tmp_path / "named.npz", x=x, y=y, names=frame.columns[:16].to_numpy().astype(str))
    fewer = read_table(tmp_path / "named.npz", ignore=["c1", "c3"])
    assert fewer.names[:3] == ["c0", "c2", "c4"] and np.array_equal(fewer.x[:, 1], x[:, 2])
    words = np.where(y, "yes", "no")
    for labels in (words.astype(object), words):  # cells, and words of one length
        scipy.io.savemat(tmp_path / "words.mat", {"x": x, "y": labels})
        assert read_table(tmp_path / "words.mat").y.tolist() == words.tolist()

    frame.to_csv(tmp_path / "index.csv")
    frame.sort_values("label").to_parquet(tmp_path / "rows.parquet")
    for name in ("index.csv", "rows.parquet"):
        with pytest.warns(UserWarning, match="the index of a pandas table"):
            assert read_table(tmp_path / name).names == [f"c{i}" for i in range(16)]

    (tmp_path / "a.arff").write_text(ARFF.replace("?", "2"))
    table = read_table(tmp_path / "a.arff", target="Tissue", ignore=["ID_REF"])
    assert table.names == ["1007_s at", "b"] and table.x.tolist() == [[1.5, 2.0], [2.5, 300.0]]
    assert table.y.tolist() == ["Breast", "Ovary two"]
    quoted = ARFF.replace("?", "2").replace("'GSM 2'", '"GSM, 2"').replace("GSM1", r"'it\'s'")
    (tmp_path / "q.arff").write_text(quoted)
    assert read_arff(tmp_path / "q.arff")["ID_REF"].tolist() == ["it's", "GSM, 2"]
    sparse_rows = "@attribute a numeric\n@attribute b numeric\n@attribute class {u, v}\n@data\n{0 1}\n{1 2, 2 v}\n"
    (tmp_path / "s.arff").write_text(sparse_rows)
    table = read_table(tmp_path / "s.arff")
    assert table.x.tolist() == [[1.0, 0.0], [0.0, 2.0]] and table.y.tolist() == ["u", "v"]


def test_tables_that_cannot_be_used(tmp_path):
    def table(text: str, name: str = "t.csv") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    good = "a,b,label\n1,2,u\n3,4,v\n5,6,u\n"
    unnamed = table("a,b,\n1,2,u\n3,4,v\n", "unnamed.csv")
    assert read_table(unnamed, target="-1").y.tolist() == ["u", "v"]
    for path, arguments, message in (
        (tmp_path / "none.csv", {}, "there is no file"),
        (unnamed, {}, "no column has a usual name.* give --target, a name or a place"),
        (table(good, "1.csv"), {"target": "lable"}, "no column 'lable' .* did you mean 'label'"),
        (table(good, "2.csv"), {"ignore": ["c"]}, "ignore_columns: there is no column 'c'"),
        (table(good, "3.csv"), {"ignore": ["a", "b"]}, "no column beside the target"),
        (table("a,y,label\n1,2,3\n1,2,3\n", "4.csv"), {}, r"more than one column \(y, label\)"),
        (table("a,b,label\n1,,u\n3,4,v\n", "5.csv"), {}, "column 'b' has empty, NaN or inf cells"),
        (table("a,b,label\n1,inf,u\n3,4,v\n", "6.csv"), {}, "column 'b' has empty, NaN or inf cells"),
        (table("a,b,label\n1,2,u\n3,4,\n", "7.csv"), {}, "target column 'label' has rows without a value"),
        (table("a,label\n1,u\n", "8.csv"), {}, "1 rows and 1 features: too few"),
        (table("no arff", "9.arff"), {}, "give --target"),
        (table("0.5,2,1\n3,4,0\n5,6,1\n", "11.csv"), {"target": "-1"}, "numbers and no names; put a line of names"),
        (table("1 1:0.5\n0 1:2\n", "12.svmlight"), {"target": "y"}, "leave out --target"),
        (table("1 1:0.5\n0 1:2\n", "13.svmlight"), {"ignore": ["y"]}, "ignore_columns: there is no column 'y'"),
        (table("@attribute a numeric\n@attribute class {u}\n@data\n1\n", "10.arff"), {}, "a row has 1 values"),
        (table(ARFF, "11.arff"), {"target": "Tissue", "ignore": ["ID_REF"]}, "column 'b' has empty, NaN"),
        (table("no zip", "12.npz"), {}, "cannot be read as npz"),
        (table("no mat", "13.mat"), {}, "cannot be read as mat"),
    ):
        with pytest.raises(RunError, match=message):
            read_table(path, **arguments)
    np.savez(tmp_path / "names.npz", q=np.ones((3, 2)), y=np.arange(3))
    with pytest.raises(RunError, match="one array with inputs, called x"):
        read_table(tmp_path / "names.npz")
    for number, x in enumerate((np.ones(3), np.full((3, 2), "a"), np.ones((3, 2), complex))):
        np.savez(tmp_path / f"x{number}.npz", x=x, y=np.arange(3))
        with pytest.raises(RunError, match="must be a matrix of numbers"):
            read_table(tmp_path / f"x{number}.npz")
    np.savez(tmp_path / "bool.npz", x=np.eye(3, 2, dtype=bool), y=np.arange(3), names=np.array([b"p", b"q"]))
    table = read_table(tmp_path / "bool.npz")
    assert (table.x.sum(), table.names) == (2, ["p", "q"])
    np.savez(tmp_path / "rows.npz", x=np.ones((3, 2)), y=np.arange(4))
    with pytest.raises(RunError, match="3 rows of inputs and 4 targets"):
        read_table(tmp_path / "rows.npz")


def test_mistakes_end_with_one_sentence(numbers, tmp_path, capsys):
    x, y = numbers
    np.savez(tmp_path / "t.npz", x=x, y=y)
    np.savez(tmp_path / "one.npz", x=x, y=np.zeros(250))
    (tmp_path / "taken" / "wandb").mkdir(parents=True)
    for arguments, message in (
        ({}, "give --data"),
        ({"data": tmp_path / "t.npz", "n_features": 17}, "from 1 to the number of features, 16, not 17"),
        ({"data": tmp_path / "t.npz", "n_features": 0}, "from 1 to the number of features, 16, not 0"),
        ({"data": tmp_path / "one.npz"}, "at least two classes"),
        ({"data": tmp_path / "t.npz", "network": "lenet5_bn"}, "give --input_shape"),
        ({"data": tmp_path / "t.npz", "input_shape": [3, 3]}, "9 places, but there are 16 features"),
        ({"data": tmp_path / "t.npz", "lr": 1e12, "task": "regression"}, "lower lr"),
        ({"data": tmp_path / "t.npz", "name": "taken"}, "holds a run already; give another --name\n"),
    ):
        with pytest.raises(SystemExit) as exit:
            main(parse_select_config(options(**{"epochs": 2, "run_root": tmp_path, **arguments})))
        error = capsys.readouterr().err.splitlines(keepends=True)[-1]  # a warning of torch's may come first
        assert exit.value.code == 1 and error.startswith("error: ") and message in error, error
    with pytest.raises(SystemExit):
        parse_select_config(["--n_feature=3"])
    assert "unknown key 'n_feature': did you mean 'n_features'?" in capsys.readouterr().err
    assert parse_select_config(["--n_features", "100"]).counts == (100,)
    assert parse_select_config(["--n_features", "[100, 50]"]).counts == (100, 50)
    assert parse_select_config([]).counts == ()
    with pytest.raises(SystemExit):
        parse_select_config(["--help"])
    assert "--n_features" in capsys.readouterr().out


@pytest.mark.parametrize("entry", [str(ROOT / "launch"), "launch"])  # as python puts it, and as profilers do
def test_the_script_does_not_hide_the_standard_library(monkeypatch, entry):
    """`launch` is the first entry of the path of every script in it, and torch imports `select`."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(entry)
    monkeypatch.delitem(sys.modules, "select")
    assert callable(importlib.import_module("select").select)
