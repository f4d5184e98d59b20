"""Where a report's trials come from: run folders, sweep folders and W&B."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
import run_folders
import wandb
import wandb_server
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from binmask_dist.report import figures
from binmask_dist.report.analysis import analyse
from binmask_dist.report.main import make_report, parse_options
from binmask_dist.report.trials import Trials, read_trials
from binmask_dist.report.wandb_trials import add_wandb_trials
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.tasks.base import RunError
from binmask_dist.training.tracking import Tracking


def test_folders_made_up_here_have_the_keys_of_real_ones(tmp_path: Path) -> None:
    real = jobs.train_here(tmp_path, "real", epochs=1, finetune_epochs=1)
    made = run_folders.write_run(tmp_path / "made", epochs=1, finetune_epochs=1)
    for file in ("config.json", "result.json"):
        ours, theirs = (json.loads((folder / file).read_text()) for folder in (made, real))
        assert ours.keys() <= theirs.keys(), file
    for kind in ("step", "epoch"):
        ours, theirs = (jobs.records(folder, kind)[0] for folder in (made, real))
        assert ours.keys() <= theirs.keys(), kind
    before = [jobs.result(folder)["before_finetuning"] for folder in (made, real)]
    assert before[0].keys() <= before[1].keys()
    trials = read_trials([str(real)])
    assert not trials.left_out
    assert trials.used[0].metrics["test_accuracy"] == jobs.result(real)["test_accuracy"]
    assert trials.used[0].metrics["before_finetuning.test_loss"] == before[1]["test_loss"]
    assert trials.used[0].metrics["train_loss"] == jobs.records(real)[-1]["train_loss"]
    (problem,) = analyse(trials).problems
    (images,) = (each.figure for each in figures.draw(problem) if each.name == "layers")
    layers = [label.get_text() for label in images.axes[0].get_yticklabels()]
    assert layers == list(jobs.result(real)["layer_sparsity"])


# folders


def test_runs_are_found_at_any_depth_and_each_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = run_folders.write_sweep(tmp_path / "sweep", (1e-6, 2e-6), range(2))
    (sweep / "trials" / ".hidden").mkdir()
    (sweep / "trials" / "round").symlink_to(sweep)
    (sweep / "config.json").write_text("{}")  # of the sweep, if it likes to have one
    one = run_folders.write_run(tmp_path / "alone", seed=7)
    model = one / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")  # of transformers: not a run of its own
    trials = read_trials([str(tmp_path), str(sweep), str(one)])
    assert not trials.left_out
    assert sorted(Path(trial.source).name for trial in trials.used) == [
        "alone",
        "binmask-1e-06-0",
        "binmask-1e-06-1",
        "binmask-2e-06-0",
        "binmask-2e-06-1",
    ]
    assert capsys.readouterr() == ("", "")  # a progress bar is for terminals


def test_a_second_run_of_a_trial_does_not_count(tmp_path: Path) -> None:
    run_folders.write_run(tmp_path / "first", seed=3)
    run_folders.write_run(tmp_path / "second", seed=3, workers=2)  # no setting that decides the result
    trials = read_trials([str(tmp_path)])
    assert [Path(trial.source).name for trial in trials.used] == ["first"]
    assert trials.left_out == [(str(tmp_path / "second"), f"is the same trial as {tmp_path / 'first'}")]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def without(path: Path, key: str) -> None:
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))


def replaced(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def test_what_is_broken_is_named_and_left_out(tmp_path: Path) -> None:
    """One run folder for each way to be broken, and a good one."""
    run_folders.write_run(tmp_path / "good", seed=100)
    ways = {
        "unfinished": (lambda run: (run / "result.json").unlink(), "is not finished: it has no result.json"),
        "no config": (lambda run: (run / "config.json").unlink(), "has no config.json"),
        "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl cannot be read"),
        "cut config": (lambda run: cut(run / "config.json"), "config.json cannot be read"),
        "cut result": (lambda run: cut(run / "result.json"), "result.json cannot be read"),
        "cut metrics": (lambda run: cut(run / "metrics.jsonl"), "metrics.jsonl ends within a line"),
        "not text": (lambda run: (run / "result.json").write_bytes(b"\xff\xfe\x00"), "result.json cannot be read"),
        "a list": (lambda run: (run / "result.json").write_text("[1]"), "result.json holds no object"),
        "no sparsity": (lambda run: without(run / "result.json", "sparsity"), "result.json has no 'sparsity'"),
        "no seed": (lambda run: without(run / "config.json", "seed"), "config.json has no 'seed'"),
        "empty": (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl has no record of an epoch"),
        "half a line": (
            lambda run: (run / "metrics.jsonl").write_text('{"kind": "epoch", "ep\n'),
            "line 1 of metrics.jsonl is no JSON",
        ),
        "a number": (lambda run: (run / "metrics.jsonl").write_text("7\n"), "line 1 of metrics.jsonl holds no object"),
        "no losses": (
            lambda run: (run / "metrics.jsonl").write_text('{"kind": "epoch", "epoch": 0, "step": 1}\n'),
            "metrics.jsonl has no 'phase'",
        ),
        "too sparse": (
            lambda run: (run / "result.json").write_text('{"sparsity": 1.5, "test_loss": 1}'),
            "sparsity = 1.5, which is no fraction",
        ),
        "no number": (lambda run: replaced(run / "config.json", "lam", None), "config.json has lam = None"),
        "wrong kind": (lambda run: replaced(run / "result.json", "before_finetuning", [1]), "that is no object"),
    }
    for seed, (name, (damage, _)) in enumerate(ways.items()):
        damage(run_folders.write_run(tmp_path / name, seed=seed))
    trials = read_trials([str(tmp_path)])
    assert [Path(trial.source).name for trial in trials.used] == ["good"]
    reasons = {Path(source).name: reason for source, reason in trials.left_out}
    assert reasons.keys() == ways.keys()
    for name, (_, reason) in ways.items():
        assert reason in reasons[name], name


def test_an_archive_holds_what_a_report_needs(tmp_path: Path) -> None:
    sweep = run_folders.write_sweep(tmp_path / "sweep", (1e-6, 1e-5), (0, 1))
    unfinished = run_folders.write_run(tmp_path / "sweep" / "trials" / "unfinished", lam=1e-4)
    (unfinished / "result.json").unlink()
    file = tmp_path / "sweep.zip"
    assert make_report(parse_options([str(sweep), "--archive", str(file)])) == f"4 trials: {file}"
    assert not (sweep / "report").exists()
    whole, packed = read_trials([str(sweep)]), read_trials([str(file)])
    assert len(packed.used) == 4 and not packed.left_out
    for ours, theirs in zip(packed.used, whole.used, strict=True):
        assert (ours.config, ours.result, ours.epochs) == (theirs.config, theirs.result, theirs.epochs)
        assert ours.source.endswith(f"trials/{Path(theirs.source).name}")
    for paths, message in (
        ([str(file)], "an archive is made of run folders alone"),
        ([str(run_folders.write_sweep(tmp_path / "b", (1e-4,), (0,))), str(sweep)], ""),
        ([str(run_folders.write_sweep(tmp_path / "c", (1e-6,), (0,), epochs=9)), str(sweep)], "have the same place"),
    ):
        other = parse_options([*paths, "--archive", str(tmp_path / "other.zip")])
        with pytest.raises(RunError, match=message) if message else nullcontext():
            make_report(other)
    make_report(parse_options([str(file), "--output", str(tmp_path / "report")]))
    assert (tmp_path / "report" / "report.html").exists()


def test_a_path_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"there is no folder .*nowhere; give run folders"):
        read_trials([str(tmp_path / "nowhere")])
    with pytest.raises(RunError, match="holds no run folder"):
        read_trials([str(tmp_path)])


# a thousand trials


def test_a_thousand_trials_cost_little_more_than_reading_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = run_folders.write_run(tmp_path / "pattern", epochs=30)
    texts = {name: (pattern / name).read_text() for name in ("config.json", "metrics.jsonl", "result.json")}
    for number in range(1000):
        folder = tmp_path / "sweep" / "trials" / str(number)
        folder.mkdir(parents=True)
        config = json.loads(texts["config.json"]) | {"seed": number % 5, "lam": 1e-6 * (1 + number // 5)}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.jsonl").write_text(texts["metrics.jsonl"])
        numbers = {"test_accuracy": 1 - 1 / (2 + number), "test_loss": 1 / (2 + number), "sparsity": number / 1000}
        (folder / "result.json").write_text(json.dumps(json.loads(texts["result.json"]) | numbers))
    start = time.process_time()
    for folder in (tmp_path / "sweep" / "trials").iterdir():
        for line in (folder / "metrics.jsonl").read_bytes().splitlines():
            json.loads(line)
        for name in ("config.json", "result.json"):
            json.loads((folder / name).read_bytes())
    plain = time.process_time() - start
    reads: Counter[str] = Counter()
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.update([str(path)]) or read_bytes(path))
    start = time.process_time()
    analysis = analyse(read_trials([str(tmp_path / "sweep")]))
    spent = time.process_time() - start
    assert len(analysis.problems[0].columns) == 200
    assert set(reads.values()) == {1} and len(reads) == 3000
    print(f"1,000 trials: {spent:.1f} s, {spent / plain:.1f} times of reading their files")
    assert spent < 4 * plain


# W&B


@pytest.fixture
def server(stranger: pytest.MonkeyPatch) -> Iterator[wandb_server.Server]:
    """Somebody is logged in to a server of their own, whoever runs the tests."""
    stranger.setenv("WANDB_API_KEY", "0" * 40)
    with wandb_server.running() as running:
        stranger.setenv("WANDB_BASE_URL", running.url)
        wandb.teardown()
        yield running
        wandb.teardown()


def test_a_trial_from_wandb_is_the_one_in_the_run_folder(tmp_path: Path, server: wandb_server.Server) -> None:
    """Uploaded by the training command's tracker, read back by W&B's public API, both with the real client."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = TrainConfig(epochs=3, finetune_epochs=1, lam=1e-5, run_root=str(tmp_path), seed=4)
    folder = run_folders.write_run(tmp_path / "run", epochs=3, finetune_epochs=1, lam=1e-5, seed=4)
    result, records = jobs.result(folder), jobs.records(folder)
    shutil.copytree(folder, tmp_path / "kept")
    tracking = Tracking(folder, config, Accelerator(cpu=True), None)
    for record in records:
        tracking.log(record)
    tracking.log(records[-1])  # as after a resume
    tracking.finish(result)
    unfinished = Tracking(tmp_path / "home", config, Accelerator(cpu=True), None)
    unfinished.log(records[0])
    unfinished.finish({}, exit_code=1)
    AcceleratorState._reset_state(reset_partial_state=True)
    wandb.teardown()
    trials = read_trials(["wandb:somebody/binmask_dist"])
    (trial,), (local,) = trials.used, read_trials([str(tmp_path / "kept")]).used
    assert trial.source.startswith("wandb:somebody/binmask_dist/")
    assert trial.metrics == pytest.approx(local.metrics)
    assert [each["epoch"] for each in trial.epochs] == [0, 1, 2, 3]
    for theirs, ours in zip(trial.epochs, local.epochs, strict=True):
        assert {key: theirs[key] for key in ours} == ours
    ours = json.loads(json.dumps(asdict(config)))
    assert trial.config == ours
    ((source, reason),) = trials.left_out
    assert "is not finished" in reason
    assert source.startswith("wandb:somebody/binmask_dist/")


def test_a_project_that_wandb_does_not_give_is_an_error() -> None:
    class Api:
        def runs(self, project: str, lazy: bool) -> Any:
            if project == "none/such":
                raise ValueError("Could not find project such")
            return []

    with pytest.raises(RunError, match=r"W&B does not give the runs of none/such: Could not find project such"):
        add_wandb_trials(Trials(), "none/such", Api())
    with pytest.raises(RunError, match="the W&B project some/empty has no runs"):
        add_wandb_trials(Trials(), "some/empty", Api())


def test_numbers_that_wandb_lacks_leave_a_trial_out() -> None:
    run = SimpleNamespace(path=["a", "b", "c"], state="finished", config={"lam": 0}, scan_history=lambda: iter(()))
    run.summary = {"result": {"sparsity": 0.5, "test_loss": 1.0}}
    trials = Trials()
    add_wandb_trials(trials, "a/b", SimpleNamespace(runs=lambda project, lazy: [run]))
    assert trials.left_out == [("wandb:a/b/c", "config.json has no 'seed'")]
