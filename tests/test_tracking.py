"""metrics.jsonl is whole whatever happens; W&B and TensorBoard, the real ones, hold the same and never stop a run."""

import json
import math
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import tracked
import wandb
import wandb_server
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from jobs import environment, full_disk

from binmask_dist.training import trackers, tracking
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.identity import configuration_name, trial_id
from binmask_dist.training.metrics_file import jsonable, read_records
from binmask_dist.training.tasks.base import RunError
from binmask_dist.training.trackers import panels
from binmask_dist.training.tracking import Follower, Tracking

QUIET = TrainConfig(trackers=())


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def log_all(tracking: Tracking, records: list[dict[str, Any]]) -> None:
    for record in records:
        tracking.log(record)


# metrics.jsonl


def test_every_record_is_a_line_of_valid_json(tmp_path: Path, accelerator: Accelerator) -> None:
    tracking = Tracking(tmp_path, QUIET, accelerator, None)
    numbers = {"nan": math.nan, "inf": [1.0, -math.inf], "numpy": np.float32(0.5), "torch": torch.tensor(3)}
    tracking.log({"kind": "step", "step": 1, **numbers})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # there before anything is closed
    assert json.loads(line, parse_constant=pytest.fail) == {
        "kind": "step",
        "step": 1,
        "nan": None,
        "inf": [1.0, None],
        "numpy": 0.5,
        "torch": 3,
    }
    tracking.finish({})


def test_other_processes_write_nothing(tmp_path: Path, accelerator: Accelerator) -> None:
    other = SimpleNamespace(is_main_process=False)
    tracking = Tracking(tmp_path, TrainConfig(wandb_mode="offline"), other, None)
    log_all(tracking, tracked.make_records())
    tracking.finish({})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume_step", [0, 7, 10, 23, 40])
def test_a_resumed_file_is_as_if_never_interrupted(tmp_path: Path, accelerator: Accelerator, resume_step: int) -> None:
    records = tracked.make_records()
    for folder, last in (("whole", 40), ("cut", 33)):
        (tmp_path / folder).mkdir()
        tracking = Tracking(tmp_path / folder, QUIET, accelerator, None)
        log_all(tracking, [record for record in records if record["step"] <= max(last, resume_step)])
    path = tmp_path / "cut" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 5, "lo')
    tracking = Tracking(tmp_path / "cut", QUIET, accelerator, resume_step)
    assert len(read_records(path)) == sum(record["step"] <= resume_step for record in records)
    log_all(tracking, [record for record in records if record["step"] > resume_step])
    assert path.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert {item.name for item in path.parent.iterdir()} == {"metrics.jsonl"}


def test_an_epoch_that_was_recorded_but_not_saved_is_recorded_once(tmp_path: Path, accelerator: Accelerator) -> None:
    records = [record for record in tracked.make_records() if record["step"] <= 20]
    log_all(Tracking(tmp_path, QUIET, accelerator, None), records)
    tracking = Tracking(tmp_path, QUIET, accelerator, 20, open_epoch=1)  # saved by a signal at the last step of epoch 1
    tracking.log(records[-1])
    assert read_records(tmp_path / "metrics.jsonl") == records


def test_a_full_disk_ends_the_run_with_a_sentence(tmp_path: Path, accelerator: Accelerator) -> None:
    records = tracked.make_records()
    tracking = Tracking(tmp_path, QUIET, accelerator, None)
    told = r"metrics.jsonl cannot be written \(File too large\); once it can, go on with --resume"
    with full_disk(2_000), pytest.raises(RunError, match=told):
        log_all(tracking, records)
    with full_disk(2_000):
        tracking.finish({}, exit_code=1)
    kept = read_records(tmp_path / "metrics.jsonl")
    assert kept and kept == records[: len(kept)]


def test_a_run_from_the_start_drops_all_records(tmp_path: Path, accelerator: Accelerator) -> None:
    log_all(Tracking(tmp_path, QUIET, accelerator, None), tracked.make_records())
    Tracking(tmp_path, QUIET, accelerator, None)
    assert read_records(tmp_path / "metrics.jsonl") == []


# Names


def test_names_group_the_charts() -> None:
    step, epoch = tracked.make_records()[0], tracked.epoch_record(2, 30, "train")
    assert {"train/loss", "train/lr", "train/mask_lr", "speed/examples_per_second"} <= panels(step).keys()
    assert "train/grad_norm" not in panels(step)  # not known under ZeRO
    expected = {"test/accuracy", "train/epoch_loss", "sparsity/overall", "masks/on_to_off", "masks/near_zero_fraction"}
    assert expected | {"memory/peak_rss_bytes", "layers/layers.0.conv.weight"} <= panels(epoch).keys()
    assert panels({"kind": "checkpoint", "step": 3, "seconds": 0.5}) == {"checkpoint/seconds": 0.5}


def test_seeds_of_a_configuration_are_one_group() -> None:
    def name(**options: Any) -> str:
        return configuration_name(asdict(TrainConfig(**options)))

    group = name(lam=1e-6)
    assert group.startswith("digits-test_resnet-lam1e-06-")
    assert name(lam=1e-6, seed=3, name="again", wandb_mode="offline") == group
    assert name(lam=1e-6, epochs=31) != group
    assert "-target0.9-" in name(target_sparsity=0.9)
    assert len(name(model="x" * 300)) <= 128


def test_a_trial_is_what_decides_its_result() -> None:
    config = asdict(TrainConfig())
    assert trial_id(json.loads(json.dumps(config))) == trial_id(config)
    assert trial_id(asdict(TrainConfig(name="again", trackers=(), workers=2))) == trial_id(config)
    assert trial_id(asdict(TrainConfig(seed=1))) != trial_id(config)
    older = {key: value for key, value in config.items() if key != "label_smoothing"}  # from before there was one
    assert trial_id(older) == trial_id(config) != trial_id({**older, "label_smoothing": 0.1})


# W&B


def test_offline_wandb_holds_what_metrics_jsonl_holds(
    tmp_path: Path, accelerator: Accelerator, stranger: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my runs" / "my-run"
    folder.mkdir(parents=True)
    config = TrainConfig(tags=("mine", "mine"))  # auto: nobody is logged in
    tracking = Tracking(folder, config, accelerator, None)
    log_all(tracking, tracked.make_records())
    tracking.finish({"test_accuracy": 0.75})

    records = read_records(folder / "metrics.jsonl")
    rows = tracked.wandb_history(folder)
    assert len(rows) == len(records)
    for record, row in zip(records, rows, strict=True):
        histogram = row.pop("masks/latents", None)
        assert row == {**panels(record), "step": record["step"], "epoch": record["epoch"]}
        if record["kind"] == "epoch":
            assert histogram["values"] == record["latent_histogram"]["counts"]
            assert histogram["bins"] == record["latent_histogram"]["edges"]

    messages = tracked.read_wandb(folder)
    run = messages["run"][0]
    assert run.display_name == "my-run"
    assert run.project == "binmask_dist"
    assert run.run_group == configuration_name(asdict(config))
    assert sorted(run.tags) == ["image", "mine", "single", "test_resnet"]
    assert run.run_id == json.loads((folder / "wandb.json").read_text())["id"]
    assert json.loads({item.key: item.value_json for item in run.config.update}["lam"]) == config.lam
    axes = {metric.glob_name: metric.step_metric for metric in messages["metric"] if metric.glob_name}
    assert (axes["train/*"], axes["test/*"], axes["layers/*"]) == ("step", "epoch", "epoch")

    (line,) = capsys.readouterr().err.splitlines()
    (files,) = shlex.split(line.partition(" wandb sync ")[2])
    assert list(Path(files).glob("*.wandb"))


def test_a_resumed_offline_run_is_one_run_with_its_whole_history(
    tmp_path: Path, accelerator: Accelerator, stranger: pytest.MonkeyPatch
) -> None:
    config, records = TrainConfig(wandb_mode="offline"), tracked.make_records()
    tracking = Tracking(tmp_path, config, accelerator, None)
    log_all(tracking, records[:20])
    tracking.finish({}, exit_code=143)
    first = json.loads((tmp_path / "wandb.json").read_text())["id"]
    tracking = Tracking(tmp_path, config, accelerator, 10)
    log_all(tracking, [record for record in records if record["step"] > 10])
    tracking.finish({})
    assert tracked.read_wandb(tmp_path)["run"][0].run_id == first
    assert [row["step"] for row in tracked.wandb_history(tmp_path)] == [record["step"] for record in records]


def test_an_online_run_goes_on_with_the_same_id(
    tmp_path: Path, accelerator: Accelerator, stranger: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger.setenv("WANDB_API_KEY", "0" * 40)  # auto: online, because there is one
    records = tracked.make_records()
    with wandb_server.running() as server:
        stranger.setenv("WANDB_BASE_URL", server.url)
        first = Tracking(tmp_path, TrainConfig(), accelerator, None)
        log_all(first, [record for record in records if record["step"] <= 22])
        first.finish({}, exit_code=143)
        second = Tracking(tmp_path, TrainConfig(), accelerator, 20)
        log_all(second, [record for record in records if record["step"] > 20])
        second.finish({})
        wandb.teardown()
        ((run_id, rows),) = server.history.items()
    assert json.loads((tmp_path / "wandb.json").read_text())["id"] == run_id
    sent = [record["step"] for record in records if record["step"] <= 22]
    sent += [record["step"] for record in records if record["step"] > 20]
    assert [row["step"] for row in rows] == sent
    assert rows[-1]["test/accuracy"] == records[-1]["test_accuracy"]
    assert server.runs[0]["groupName"] == configuration_name(asdict(TrainConfig()))
    assert capsys.readouterr().err.count(f"W&B: {server.url}/somebody/binmask_dist/runs/{run_id}\n") == 2


def test_the_mode_of_the_environment_is_honoured(
    tmp_path: Path, accelerator: Accelerator, stranger: pytest.MonkeyPatch
) -> None:
    stranger.setenv("WANDB_MODE", "disabled")
    tracking = Tracking(tmp_path, TrainConfig(), accelerator, None)
    log_all(tracking, tracked.make_records())
    tracking.finish({})
    assert not (tmp_path / "wandb").exists()
    assert not tracking.followers


def test_online_without_a_key_is_refused_before_training(
    tmp_path: Path, accelerator: Accelerator, stranger: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match="knows no API key: run `wandb login`"):
        Tracking(tmp_path, TrainConfig(wandb_mode="online"), accelerator, None)


def test_a_server_that_cannot_be_reached_costs_training_nothing(
    tmp_path: Path, accelerator: Accelerator, stranger: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger.setenv("WANDB_API_KEY", "0" * 40)
    stranger.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    stranger.setattr(trackers, "START_LIMIT", 2.0)
    start = time.perf_counter()
    tracking = Tracking(tmp_path, TrainConfig(), accelerator, None)
    records = tracked.make_records()
    log_all(tracking, records)
    assert time.perf_counter() - start < 1
    tracking.finish({})
    assert time.perf_counter() - start < 20
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: W&B is switched off (")
    assert read_records(tmp_path / "metrics.jsonl") == jsonable(records)
    assert not [child for child in psutil.Process().children() if child.name().startswith("wandb-core")]


@pytest.mark.slow
def test_a_run_outlives_the_service_of_wandb(tmp_path: Path) -> None:
    """Killed or stopped halfway: the run goes on and ends by itself, with one warning and no traceback."""
    reasons = {"SIGKILL": "", "SIGSTOP": "it did not finish within 3 seconds"}
    runs = {}
    for signal in reasons:
        (tmp_path / signal).mkdir()
        command = [sys.executable, tracked.__file__, str(tmp_path / signal), signal]
        # without what an earlier test may have left: with a WANDB_SERVICE it would have no service of its own
        runs[signal] = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    for signal, reason in reasons.items():
        output, errors = runs[signal].communicate(timeout=120)
        assert runs[signal].returncode == 0, errors
        (warning,) = errors.splitlines()
        assert warning.startswith(f"warning: W&B is switched off ({reason}")
        assert json.loads(output)["finish_seconds"] < 10
        assert read_records(tmp_path / signal / "metrics.jsonl") == tracked.make_records()


# Any tracker


class Stuck:
    """A tracker that waits for ever."""

    name = "Stuck"

    def __init__(self) -> None:
        self.abandoned = False

    def start(self, history: list[dict[str, Any]]) -> None:
        threading.Event().wait()

    log = finish = start

    def abandon(self) -> None:
        self.abandoned = True


def test_a_tracker_that_falls_behind_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "LONGEST_QUEUE", 50)
    follower = Follower(Stuck(), [])
    start = time.perf_counter()
    for step in range(100):
        follower.log({"kind": "step", "step": step})
    follower.finish({}, 0, limit=0.2)
    assert time.perf_counter() - start < 1
    assert follower.tracker.abandoned
    text = "warning: Stuck is switched off (it is 50 records behind); metrics.jsonl has every record\n"
    assert capsys.readouterr().err == text


# TensorBoard


def read_tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    return events.Reload()


def test_tensorboard_holds_what_metrics_jsonl_holds(tmp_path: Path, accelerator: Accelerator) -> None:
    records = tracked.make_records()
    config = TrainConfig(trackers=("tensorboard",))
    interrupted = Tracking(tmp_path, config, accelerator, None)
    log_all(interrupted, [{**record, "loss": 99.0} if record["step"] > 20 else record for record in records[:30]])
    interrupted.finish({}, exit_code=1)
    tracking = Tracking(tmp_path, config, accelerator, 20)
    log_all(tracking, [record for record in records if record["step"] > 20])
    tracking.finish({"sparsity": 0.3})
    assert_tensorboard_holds_what_metrics_jsonl_holds(tmp_path)


def test_tensorboard_that_is_asked_for_later_gets_the_history(tmp_path: Path, accelerator: Accelerator) -> None:
    records = tracked.make_records()
    log_all(Tracking(tmp_path, QUIET, accelerator, None), records[:30])
    tracking = Tracking(tmp_path, TrainConfig(trackers=("tensorboard",)), accelerator, 20)
    log_all(tracking, [record for record in records if record["step"] > 20])
    tracking.finish({})
    assert_tensorboard_holds_what_metrics_jsonl_holds(tmp_path)


def assert_tensorboard_holds_what_metrics_jsonl_holds(folder: Path) -> None:
    events = read_tensorboard(folder)
    logged = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    expected: dict[str, dict[int, float]] = {}
    for record in read_records(folder / "metrics.jsonl"):
        for name, value in panels(record).items():
            expected.setdefault(name, {})[record["step"]] = pytest.approx(value, rel=1e-6)
    assert logged == expected
    histograms = events.Histograms("masks/latents")
    assert [event.step for event in histograms] == [10, 20, 30, 40]
    assert sum(histograms[-1].histogram_value.bucket) == 1000
    assert "config/text_summary" in events.Tags()["tensors"]


def test_missing_tensorboard_is_found_before_training(
    tmp_path: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(RunError, match="TensorBoard is not installed: `pip install tensorboard`"):
        Tracking(tmp_path, TrainConfig(trackers=("tensorboard",)), accelerator, None)
