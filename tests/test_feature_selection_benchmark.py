"""benchmarks/feature_selection.py on a table of its own: a sweep that is killed, the methods, the report."""

import importlib.util
import json
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jobs import ROOT
from ranks.launchers import wait_for

from binmask_dist.sweeps import sweep_file
from binmask_dist.sweeps.trial import Trial, make_trials


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import feature_selection

    yield feature_selection
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("benchmark") / "small.npz"
    x = np.random.default_rng(0).random((120, 12))
    np.savez(path, x=x, y=x[:, 0] + x[:, 1] > 1)
    return path


def trials(benchmark, folder: Path, *arguments: str) -> dict[tuple[str, str, int], Trial]:
    """Those of a command, by data set, method and number."""
    options = benchmark.parse(["--results", str(folder), *arguments])
    datasets = [benchmark.with_rows(name, options.rows) for name in options.datasets]
    file = folder / "some.yaml"
    file.write_text(yaml.safe_dump(benchmark.sweep(options, datasets)))
    made = make_trials(sweep_file.read(file), folder)
    return {(each.setting["dataset"], each.setting["method"], each.setting["trial"]): each for each in made}


@pytest.mark.slow
def test_a_sweep_is_killed_goes_on_and_reports(benchmark, table, tmp_path, capsys):
    results, document = tmp_path / "results", tmp_path / "docs" / "report.md"
    results.mkdir()
    own = ["--datasets", str(table), "--results", str(results), "--document", str(document)]
    own += ["--methods", "BinMask", "F-score", "--epochs", "20", "--max_steps", "2", "--jobs", "2"]
    every = trials(benchmark, results, *own, "--trials", "3")
    cut = every[str(table), "F-score", 0]

    worker = multiprocessing.get_context("fork").Process(
        target=benchmark.main, args=([*own, "--methods", "F-score", "--trials", "1"],)
    )
    worker.start()
    wait_for((cut.folder / "accuracies.json").exists, 60)
    worker.kill()
    worker.join()
    wait_for(cut.claim, 20)  # its process is gone
    assert not cut.is_finished, "it was too fast to be stopped in the middle"
    selected = (cut.folder / "selection.json").stat().st_mtime_ns

    assert benchmark.main([*own, "--trials", "2"]) == 0
    text = document.read_text()
    assert text in capsys.readouterr().out
    assert cut.record()["attempts"] == 2
    assert (cut.folder / "selection.json").stat().st_mtime_ns == selected
    n_t = json.loads((results / "counts" / "small.json").read_text())["n_t"]
    counts = list(dict.fromkeys(n_t - i * (n_t // 5) for i in range(5)))
    for (_, method, number), trial in every.items():
        assert trial.is_finished == (number < 2)
        if trial.is_finished:
            result = json.loads((trial.folder / "result.json").read_text())
            assert (result["data"], result["method"], result["trial"]) == ("small", method, number)
            assert list(result["selections"]) == list(result["accuracies"]) == list(map(str, counts))
            assert {0, 1} <= set(result["selections"][str(counts[0])]["columns"])
            assert all(0.5 < accuracy <= 1 for accuracy in result["accuracies"].values())
            assert result["seconds"] > 0 and result["processor_seconds"] > 0
    assert "| small |" in text and "BinMask" in text and "±" in text and "of 1 (bar: 5 of 6)" in text
    assert "search steps on average (bar: 1.7)" in text and "converged (bar: 75%" in text
    assert document.with_suffix(".png").stat().st_size > 5000
    assert f"of {2 * len(counts)} known exactly)" in text
    assert f"| small | 96 | 12 | 2 | 20 | 2 | 0.001 | {platform.machine()}, {os.cpu_count()} cores, 1 threads" in text
    assert f" | {torch.__version__} | " in text

    with pytest.raises(SystemExit, match=r"holds results of other settings for small: epochs 20, not 3; .*--results"):
        benchmark.main([*own, "--epochs", "3"])

    failing = every[str(table), "F-score", 2]
    failing.folder.mkdir()
    (failing.folder / "selection.json").write_text("{")
    document.unlink()
    assert benchmark.main([*own, "--methods", "F-score", "--trials", "3"]) == 1
    assert "trial = 2 failed with exit code 1; the end of" in capsys.readouterr().out
    assert document.read_text() == text  # of what is there

    archive = tmp_path / "results.zip"
    assert benchmark.main([*own, "--archive", str(archive)]) == 0
    document.unlink()
    assert benchmark.main(["--report", "--results", str(archive), "--document", str(document)]) == 0
    assert document.read_text() == text


def test_a_trial_is_its_data_method_number_and_settings(benchmark, tmp_path):
    def ids(*arguments: str) -> dict[tuple[str, str, int], str]:
        command = ["--datasets", "Isolet", "MNIST-MLP", "--methods", "F-score", "--trials", "1", *arguments]
        return {key: trial.id for key, trial in trials(benchmark, tmp_path, *command).items()}

    isolet, mnist = ("Isolet", "F-score", 0), ("MNIST-MLP", "F-score", 0)
    first = ids()
    assert ids("--data", "elsewhere") == first
    assert ids("--trials", "2", "--methods", "BinMask", "F-score").items() > first.items()
    fewer = ids("--rows", "20000")
    assert fewer[isolet] == first[isolet]
    assert fewer["MNIST-MLP:20000", "F-score", 0] != first[mnist]
    for other in ("--epochs", "--max_steps"):
        assert ids(other, "3")[isolet] != first[isolet]
    assert ids("--ignore_columns", "a", "b")[isolet] != ids("--ignore_columns", "a")[isolet]


def test_the_archive_holds_the_trials_of_the_documents_command(benchmark, tmp_path):
    archived = benchmark.unpacked(ROOT / "docs" / "results" / "feature_selection.zip")
    for (dataset, method, number), trial in trials(benchmark, tmp_path, "--trials", "3").items():
        found = json.loads((archived / "trials" / trial.id / "result.json").read_text())
        assert (found["data"], found["method"], found["trial"]) == (dataset, method, number)


def test_the_words_of_a_trial_are_what_its_program_takes(benchmark, table, tmp_path, monkeypatch):
    import selection_trial

    told = ["--data", "some", "--datasets", str(table), "--methods", "STG packaged", "--trials", "1"]
    told += ["--target", "y", "--ignore_columns", "a", "b"]
    (trial,) = trials(benchmark, tmp_path, *told).values()
    launcher = trial.command.launcher
    assert launcher == ["/usr/bin/env", "SELECTION_DATA=some", sys.executable]
    words = trial.words(launcher, "", "")[len(launcher) :]
    found: list[Any] = []
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv(*launcher[1].split("="))
    monkeypatch.setattr(selection_trial, "load", lambda *loaded: found.append(loaded) or SimpleNamespace(name="small"))
    monkeypatch.setattr(selection_trial, "run", lambda *run: found.append(run))
    selection_trial.main()
    (dataset, options), (_, method, number, folder) = found
    assert (dataset, method, number, folder) == (str(table), "STG packaged", 0, trial.folder)
    assert (options.data, options.target, options.ignore_columns) == (Path("some"), "y", ["a", "b"])
    assert (options.epochs, options.max_steps) == (0, 8)


def test_two_data_sets_of_one_name_are_refused(benchmark, table, tmp_path):
    other = tmp_path / "small.npz"
    other.write_bytes(table.read_bytes())
    with pytest.raises(SystemExit, match=r"small.npz and .*small.npz are both small: give each a --results of its own"):
        benchmark.main(["--datasets", str(table), str(other), "--results", str(tmp_path / "results")])
    assert not (tmp_path / "results").exists()


def test_trials_that_start_together_count_once(benchmark, table, tmp_path, monkeypatch):
    import selection_trial

    def search(*_: Any) -> SimpleNamespace:
        with (tmp_path / "searches").open("a") as file:
            print(os.getpid(), file=file)
        time.sleep(0.3)
        return SimpleNamespace(above_threshold=lambda: SimpleNamespace(count=7))

    monkeypatch.setattr(selection_trial, "binmask_search", search)
    small = selection_trial.load(str(table), benchmark.parse([]))
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=selection_trial.counts_of, args=(small, tmp_path)) for _ in range(2)]
    for other in others:
        other.start()
    assert selection_trial.counts_of(small, tmp_path) == [7, 6, 5, 4, 3]
    for other in others:
        other.join()
        assert other.exitcode == 0
    assert len((tmp_path / "searches").read_text().splitlines()) == 1


def test_what_cannot_be_read_is_said_before_any_trial(benchmark, tmp_path):
    with pytest.raises(SystemExit, match=r"^error: there is no file .*nothing.npz$"):
        benchmark.main(["--datasets", str(tmp_path / "nothing.npz"), "--results", str(tmp_path / "results")])
    assert not (tmp_path / "results").exists()


def test_packages_that_are_missing_are_said_before_any_trial(benchmark, table, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(SystemExit, match=r"^lassonet and stg must be installed for these methods: pip install"):
        benchmark.main(["--datasets", str(table), "--results", str(tmp_path / "results")])
    assert not (tmp_path / "results" / "trials").exists()


def test_a_row_that_is_in_a_batch_several_times_may_be_computed_once(benchmark, table):
    import selection_methods

    from binmask_dist.selection.rows import Rows

    small = importlib.import_module("selection_data").load(str(table), benchmark.parse(["--epochs", "3"]))
    data, _, _ = small.trial(0)
    x = np.asarray(data.x, dtype=np.float32)
    trained = {}
    for merge in (False, True):
        torch.manual_seed(0)
        model = data.make_network(12, 2)
        before = model[0].weight.detach().clone()
        selection_methods.train(model, Rows(x, data.y, None, (12,)), data.training, 0, merge)
        trained[merge] = model[0].weight.detach()
    assert (trained[True] - before).abs().max() > 0.1
    torch.testing.assert_close(trained[True], trained[False], rtol=1e-3, atol=1e-4)


def test_rows_of_mnist(benchmark, tmp_path, monkeypatch):
    import selection_data

    def some(path: Path, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(x=np.full((30, 784), 255.0, dtype=np.float32), y=np.arange(30) % 10)

    monkeypatch.setattr(selection_data, "read_table", some)
    options = benchmark.parse(["--max_steps", "2"])
    few = selection_data.load("MNIST-CNN:20", options)
    assert (few.name, few.settings["rows"], few.settings["epochs"]) == ("MNIST-CNN", 20, 10)
    assert selection_data.load("MNIST-CNN", options).settings["rows"] == 30
    (tmp_path / "counts").mkdir()
    few.counts_file(tmp_path).write_text(json.dumps({"n_t": 5, "settings": few.settings}))
    with pytest.raises(SystemExit, match=r"other settings for MNIST-CNN: rows 20, not 30; give the same ones"):
        benchmark.main(["--max_steps", "2", "--datasets", "MNIST-CNN", "--results", str(tmp_path)])


def test_without_any_feature_the_largest_class_is_guessed(benchmark, table):
    import selection_methods
    import selection_trial

    small = selection_trial.load(str(table), benchmark.parse(["--epochs", "2"]))
    data, _, y_test = small.trial(0)
    guess = np.bincount(data.y).argmax()
    assert selection_trial.evaluate(small, selection_methods.Choice([]), 0) == np.mean(y_test == guess)


@pytest.mark.parametrize("method", ["mutual information", "L1 logistic", "STG", "LassoNet"])
def test_every_method_finds_what_decides(benchmark, table, method):
    import selection_trial

    package = method.split()[0].lower()
    if package in ("stg", "lassonet") and not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    small = selection_trial.load(str(table), benchmark.parse(["--epochs", "9", "--max_steps", "4"]))
    data, _, _ = small.trial(0)
    torch.manual_seed(0)
    chosen = selection_trial.METHODS[method](data, [4, 2], 0)
    assert list(chosen) == [4, 2]
    assert {0, 1} <= set(chosen[4].columns) and len(chosen[4].columns) < 12


def result(method: str, trial: int, accuracy: float, seconds: float = 1.0, count: int = 5, **settings: Any) -> dict:
    known = {"rows": 9, "features": 9, "classes": 2, "epochs": 1, "max_steps": 1, "count_lam": 1e-3}
    times = {"seconds": seconds, "processor_seconds": seconds}
    which = {"data": "some", "method": method, "trial": trial, "settings": {**known, **settings}}
    return {**which, **times, "selections": {}, "accuracies": {str(count): accuracy}}


def test_bars_turn_when_the_results_do(benchmark):
    import selection_report

    def results(name, accuracies, seconds):
        every = [(method, *one) for method, values in accuracies.items() for one in enumerate(values)]
        return selection_report.Results(name, {f"{one[:2]}": result(*one, seconds[one[0]]) for one in every})

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


def test_a_report_mixes_nothing(benchmark, tmp_path):
    import selection_report

    def write(folder: str, content: dict[str, Any]) -> None:
        (tmp_path / "trials" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "trials" / folder / "result.json").write_text(json.dumps(content))

    write("a", result("BinMask", 0, 0.9))
    write("b", result("BinMask", 1, 0.8))
    (some,) = selection_report.read(tmp_path)
    assert some.means("BinMask").tolist() == [0.9, 0.8]
    write("b", result("BinMask", 0, 0.8))
    with pytest.raises(SystemExit, match=r"trials/a and .*trials/b are the same trial of some; keep one"):
        selection_report.read(tmp_path)
    write("b", result("BinMask", 1, 0.8, epochs=2))
    with pytest.raises(SystemExit, match=r"a and .*b are of different settings for some: epochs 1, not 2; keep one"):
        selection_report.read(tmp_path)
    write("b", result("BinMask", 1, 0.8, count=4))
    with pytest.raises(SystemExit, match=r"different settings for some: counts \[5\], not \[4\]; keep one"):
        selection_report.read(tmp_path)


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


def test_fisher_score(benchmark):
    import selection_methods

    x = np.array([[0.0, 1.0, 5.0, 0.1], [0.2, 1.0, 5.0, 0.8], [1.0, 1.0, 6.0, 0.2], [0.8, 1.0, 6.0, 0.9]])
    data = selection_methods.Data(x, np.array([0, 0, 1, 1]), 2, None, None, None, 1)
    chosen = selection_methods.fisher_score(data, [1, 2, 3], 0)
    near = selection_methods._nearest([np.arange(9) < size for size in (8, 5, 2)], [7, 3, 1])  # of a path of sets
    assert [len(near[count].columns) for count in (7, 3, 1)] == [8, 2, 2]
    assert [chosen[count].columns for count in (1, 2, 3)] == [[2], [0, 2], [0, 2, 3]]
