"""benchmarks/feature_selection.py on a table of its own: methods, going on, the report. (LassoNet takes too long.)"""

import importlib.util
import json
import os
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    import feature_selection

    yield feature_selection
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, benchmark) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    rng = np.random.default_rng(0)
    x = rng.random((120, 12))
    np.savez(folder / "small.npz", x=x, y=x[:, 0] + x[:, 1] > 1)
    return folder


def run(benchmark, folder: Path, monkeypatch, *arguments: str) -> str:
    stg = ["STG"] if importlib.util.find_spec("stg") else []
    methods = ["BinMask", "F-score", "mutual information", "L1 logistic", *stg]
    command = ["--datasets", str(folder / "small.npz"), "--methods", *methods, "--results", str(folder / "results")]
    command += ["--document", str(folder / "docs" / "report.md"), "--trials", "2", "--epochs", "2", "--max_steps", "2"]
    monkeypatch.setattr(sys, "argv", ["feature_selection.py", *command, *arguments])
    benchmark.main()
    return (folder / "docs" / "report.md").read_text()


def test_it_runs_goes_on_and_reports(benchmark, folder, monkeypatch, capsys):
    text = run(benchmark, folder, monkeypatch)
    results = folder / "results" / "small"
    n_t = json.loads((results / "counts.json").read_text())["n_t"]
    counts = list(dict.fromkeys(n_t - i * (n_t // 5) for i in range(5)))
    for trial in range(2):
        selected = json.loads((results / f"F-score-{trial}.json").read_text())
        assert {int(count) for count in selected["selections"]} == set(counts)
        for count in counts:
            assert {0, 1} <= set(selected["selections"][str(count)]["columns"])
            assert 0 <= json.loads((results / f"BinMask-{trial}-{count}.json").read_text())["accuracy"] <= 1
    assert "| small |" in text and "BinMask" in text and "±" in text and "of 1 (bar: 5 of 6)" in text
    assert "search steps on average (bar: 1.7)" in text and "converged (bar: 75%" in text
    assert (folder / "docs" / "report.png").stat().st_size > 5000
    assert f"of {2 * len(counts)} known exactly)" in text
    assert f"| small | 96 | 12 | 2 | 2 | 2 | 0.001 | {platform.machine()}, {os.cpu_count()} cores, " in text
    assert f" threads | {torch.__version__} | " in text
    printed = capsys.readouterr().out
    assert text in printed and "small, job 2 of " in printed and ": trial 2 of 2, F-score, about 0." in printed

    lost = results / f"BinMask-1-{counts[0]}.json"
    kept = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    before = lost.read_text()
    lost.unlink()
    assert run(benchmark, folder, monkeypatch) == text
    assert lost.read_text() == before  # the same accuracy again
    assert {path: path.stat().st_mtime_ns for path in results.iterdir() if path != lost} == {
        path: time for path, time in kept.items() if path != lost
    }


def test_results_of_other_settings_are_not_mixed(benchmark, folder, monkeypatch):
    run(benchmark, folder, monkeypatch)
    with pytest.raises(SystemExit, match=r"holds results of other settings.* give another --results"):
        run(benchmark, folder, monkeypatch, "--epochs", "3")


def test_without_any_feature_the_largest_class_is_guessed(benchmark, folder, monkeypatch):
    import selection_methods

    options = benchmark.argparse.Namespace(target="", ignore_columns=[], epochs=2, max_steps=2, rows=0)
    small = benchmark.load(str(folder / "small.npz"), options)
    data, _, y_test = small.trial(0)
    guess = np.bincount(data.y).argmax()
    assert benchmark.evaluate(small, selection_methods.Choice([]), 0) == np.mean(y_test == guess)


def test_bars_turn_when_the_results_do(benchmark, tmp_path):
    import selection_report

    def results(name, accuracies, seconds):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"rows": 9, "features": 9, "classes": 2, "epochs": 1, "max_steps": 1, "count_lam": 1e-3}
        (folder / "counts.json").write_text(json.dumps({"n_t": 5, "settings": settings}))
        for method, values in accuracies.items():
            for trial, accuracy in enumerate(values):
                (folder / f"{method}-{trial}-5.json").write_text(json.dumps({"accuracy": accuracy, "chosen": 5}))
                content = {"seconds": seconds[method], "processor_seconds": seconds[method], "selections": {}}
                (folder / f"{method}-{trial}.json").write_text(json.dumps(content))
        return selection_report.Results(folder)

    fast, slow = {"BinMask": 1.0, "STG": 2.0, "LassoNet": 3.0}, {"BinMask": 2.5, "STG": 2.0, "LassoNet": 3.0}
    level = {"STG": (0.80, 0.82), "LassoNet": (0.7, 0.7)}
    first = results("first", {"BinMask": (0.90, 0.92), **level}, fast)
    within = results("within", {"BinMask": (0.75, 0.75), **level}, slow)  # 0.81 ± 0.127
    below = results("below", {"BinMask": (0.60, 0.60), **level}, fast)
    text = "\n".join(selection_report.bars([first, within, below]))
    assert "best: 2 of 3 (bar: 5 of 6)" in text
    assert "first: best, 10.00 points above STG" in text
    assert "within: 6.00 points below STG, within its interval of ± 12.71" in text
    assert "below: 21.00 points below STG, outside its interval" in text
    assert "selects in less time than STG: on 2 of 3 (bar: all)" in text
    assert "selects in less time than LassoNet: on 3 of 3 (bar: all)" in text and "STG packaged" not in text
    assert "within: STG 0.80, LassoNet 1.20 times BinMask's time" in text


def test_a_search_for_one_count_is_replayed(benchmark):
    from selection_methods import steps_alone
    from selection_report import steps_alone as told

    from binmask_dist.selection.search import Fit, Search

    def fit(lam):  # 100 features at 1e-3, half as many with twice the lam
        return Fit(lam, (np.arange(400) < 0.1 / lam).astype(float), 0.0)

    shared = Search(fit)
    selections = [shared.exactly(count) for count in (100, 50, 25)]
    assert [(one.steps, one.fits) for one in selections] == [(1, 1), (2, 1), (2, 1)]
    alone = [steps_alone(shared, count) for count in (100, 50, 25, 12, 200)]
    assert alone == [
        *({"steps": steps, "known": True} for steps in (1, 2, 3)),
        {"steps": 4, "known": False},
        {"steps": 2, "known": False},
    ]
    searches = [{"steps": one.steps, "fits": one.fits} for one in selections]
    whole = [{**one, "alone": replay} for one, replay in zip(searches, alone, strict=False)]
    assert told(whole).startswith("2.00 steps") and "(3 of 3 known exactly)" in told(whole)
    assert told(searches).startswith("at least 1.00 steps") and "(1 of 3 known exactly)" in told(searches)


def test_fisher_score(benchmark, folder):
    import selection_methods

    x = np.array([[0.0, 1.0, 5.0, 0.1], [0.2, 1.0, 5.0, 0.8], [1.0, 1.0, 6.0, 0.2], [0.8, 1.0, 6.0, 0.9]])
    data = selection_methods.Data(x, np.array([0, 0, 1, 1]), 2, None, None, None, 1)
    chosen = selection_methods.fisher_score(data, [1, 2, 3], 0)
    near = selection_methods._nearest([np.arange(9) < size for size in (8, 5, 2)], [7, 3, 1])  # of a path of sets
    assert [len(near[count].columns) for count in (7, 3, 1)] == [8, 2, 2]
    assert [chosen[count].columns for count in (1, 2, 3)] == [[2], [0, 2], [0, 2, 3]]
