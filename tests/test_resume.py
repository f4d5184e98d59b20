"""Runs that are killed, stopped, resumed, and started twice."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from jobs import SHORT, environment, full_disk, kill_started, options, records, result, run, start, train_here
from safetensors import SafetensorError
from safetensors.torch import load_file

import binmask_dist
from binmask_dist.training.checkpoints import Checkpoints
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.loop import Interrupted, Loop
from binmask_dist.training.main import accelerator_for, main
from binmask_dist.training.progress import Progress
from binmask_dist.training.tasks.base import RunError

# dropout, augmentation, accumulation, an average and steering: whatever has a state or draws random numbers
OPTIONS = dict(
    **SHORT,
    checkpoint_every=5,
    augment="crop",
    model_args={"drop_rate": 0.2},
    accumulation=2,
    ema_decay=0.9,
    target_sparsity=0.8,
    finetune_epochs=1,
    log_every=3,
    optimizer="adamw",
    lr=2e-3,
)
TIMINGS = {"seconds", "steps_per_second", "examples_per_second"}


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    yield
    kill_started()


def wait_for(condition: Callable[[], object], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoints/step-*/checkpoint.json"))


def without_timings(record: dict) -> dict:
    return {key: value for key, value in record.items() if key not in TIMINGS and not key.endswith("_bytes")}


def assert_same(ours: Path, theirs: Path) -> None:
    """To the last bit: the model, the masks and every record but for times."""
    for name in ("model/model.safetensors", "masks.safetensors"):
        mine, other = load_file(ours / name), load_file(theirs / name)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in mine)
    for kind in ("step", "epoch"):
        assert [without_timings(r) for r in records(ours, kind)] == [without_timings(r) for r in records(theirs, kind)]


def test_stopped_in_every_way_and_resumed_is_bit_for_bit(tmp_path: Path) -> None:
    """kill -9 in the middle of an epoch and of writing a checkpoint, SIGTERM and SIGINT; against a run left alone."""
    arguments = options(run_root=tmp_path, name="stopped", **OPTIONS)
    folder = tmp_path / "stopped"

    def is_writing() -> bool:  # there is a folder without its index
        return any(not (path / "checkpoint.json").exists() for path in folder.glob("checkpoints/step-*"))

    stops = [
        (signal.SIGKILL, lambda: len(checkpoints(folder)) >= 1),
        (signal.SIGTERM, lambda: len(records(folder, "step")) >= 6),
        (signal.SIGKILL, is_writing),
        (signal.SIGINT, lambda: len(records(folder)) >= 2),
    ]
    for number, moment in stops:
        process = start(*arguments, "--resume", "auto")
        wait_for(moment, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        if number == signal.SIGKILL:
            assert process.returncode == -number
        else:
            assert process.returncode == 128 + number, err
            assert "interrupted and saved" in out
    train_here(tmp_path, "stopped", resume="must", **OPTIONS)
    train_here(tmp_path, "alone", **OPTIONS)
    assert_same(folder, tmp_path / "alone")
    assert len(json.loads((folder / "environment.json").read_text())) == 5
    assert len(list(folder.glob("checkpoints/*"))) == 2  # nothing is left of the one that was being written


def test_a_stream_is_taken_up_in_the_middle_of_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        **SHORT,
        "streaming": True,
        "steps_per_epoch": 9,
        "shuffle_buffer": 200,
        "accumulation": 2,
        "log_every": 2,
    }
    train_here(tmp_path, "alone", **values)
    step = Progress.step
    taken = []

    def stopped(self: Progress, loss: float | None = None) -> None:
        step(self, loss)
        taken.append(1)
        if len(taken) == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "step", stopped)
    with pytest.raises(Interrupted):
        train_here(tmp_path, "stopped", **values)
    assert [path.parent.name for path in checkpoints(tmp_path / "stopped")][-1] == "step-00000014"  # of 2 x 9
    train_here(tmp_path, "stopped", resume="must", **values)
    assert_same(tmp_path / "stopped", tmp_path / "alone")


def test_a_mean_is_over_the_steps_it_was_summed_over(tmp_path: Path) -> None:
    """Also where the run is resumed with other intervals."""
    values = {**SHORT, "epochs": 1, "checkpoint_every": 15}
    losses = [record["loss"] for record in records(train_here(tmp_path, "alone", log_every=1, **values), "step")]
    folder = train_here(tmp_path, "resumed", **values)
    for log_every in (4, 10):
        shutil.rmtree(checkpoints(folder)[-1].parent)
        (folder / "result.json").unlink()
        train_here(tmp_path, "resumed", resume="must", log_every=log_every, **values)
        assert records(folder)[0]["train_loss"] == pytest.approx(sum(losses) / 22)
        first_since = next(record for record in records(folder, "step") if record["step"] > 15)
        assert first_since["loss"] == pytest.approx(np.mean(losses[10 : first_since["step"]]))


def test_another_engine_and_number_of_processes_go_on(tmp_path: Path) -> None:
    """What was saved under ZeRO-3 on two processes goes on in one, with an average, too."""
    values = {**SHORT, "ema_decay": 0.9, "clip": 1.0}
    arguments = options(run_root=tmp_path, name="moving", **values)
    folder = tmp_path / "moving"
    process = start(*arguments, config="zero3")
    wait_for(lambda: (folder / "metrics.jsonl").exists() and records(folder, "epoch"), process)
    process.terminate()  # the launcher, which tells its processes
    _, err = process.communicate(timeout=90)
    assert process.returncode != 0
    assert checkpoints(folder), err
    train_here(tmp_path, "moving", resume="must", **values)
    assert [record["epoch"] for record in records(folder)] == [0, 1, 2]
    assert (result(folder)["engine"], result(folder)["processes"]) == ("single", 1)
    starts = json.loads((folder / "environment.json").read_text())
    assert len(starts) == 2


def test_the_second_launch_into_a_folder_refuses(tmp_path: Path) -> None:
    arguments = options(run_root=tmp_path, name="one", **{**SHORT, "epochs": 200})
    process = start(*arguments)
    wait_for(lambda: (tmp_path / "one" / "metrics.jsonl").exists(), process)
    second = run(*arguments, "--resume", "auto")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert second.returncode == 1
    assert second.stderr.strip().splitlines()[-1].startswith("error: another process is at work in")


def test_a_rank_that_dies_takes_the_job_down(tmp_path: Path) -> None:
    folder = tmp_path / "dies"
    process = start(*options(run_root=tmp_path, name="dies", **{**SHORT, "epochs": 200}), config="cpu2")
    wait_for(lambda: (folder / "metrics.jsonl").exists(), process)
    ranks = [
        child for child in psutil.Process(process.pid).children(recursive=True) if "launch/train.py" in child.cmdline()
    ]
    assert len(ranks) == 2
    ranks[1].kill()
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30  # seconds, where gloo's own timeout is half an hour
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in err
    assert not any(rank.is_running() for rank in ranks)


def test_resume_says_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"there is no run in .*nothing to go on with"):
        train_here(tmp_path, "nothing", resume="must")
    folder = train_here(tmp_path, "done", epochs=1)
    (folder / "result.json").unlink()
    with pytest.raises(RunError, match=r"has lam = 1e-05 and not 0\.5; resume it with the same settings"):
        train_here(tmp_path, "done", epochs=1, lam=0.5, resume="must")
    with pytest.raises(RunError, match="has accumulation = 1 and not 2"):  # batch norm would see other batches
        train_here(tmp_path, "done", epochs=1, accumulation=2, resume="must")
    with pytest.raises(RunError, match="holds a run already; give another --name, or --resume"):
        train_here(tmp_path, "done", epochs=1)
    train_here(tmp_path, "done", epochs=1, resume="must", log_every=7)  # which changes nothing that is computed
    config = json.loads((folder / "config.json").read_text())
    del config["mask_samples"]  # a run from before there was such a key
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="has mask_samples = 1 and not 2"):
        train_here(tmp_path, "done", epochs=1, resume="must", method="probmask", target_sparsity=0.5, mask_samples=2)
    train_here(tmp_path, "done", epochs=1, resume="must")  # finished: there is nothing to do


def test_a_folder_whose_run_was_killed_before_it_began_is_taken(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".lock").touch()
    assert result(train_here(tmp_path, "killed", epochs=1))["steps"] == 22


def test_processes_that_outlive_a_killed_run_are_waited_for(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    lock = (tmp_path / "held" / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    threading.Timer(1.0, lock.close).start()
    assert result(train_here(tmp_path, "held", epochs=1, resume="auto"))["steps"] == 22


def test_a_lost_average_is_passed_over(tmp_path: Path) -> None:
    folder = train_here(tmp_path, "average", ema_decay=0.9)
    whole = load_file(folder / "model" / "model.safetensors")
    (folder / "result.json").unlink()
    (checkpoints(folder)[-1].parent / "average.safetensors").write_bytes(b"cut off")
    with pytest.warns(UserWarning, match=r"average.safetensors is missing or damaged.*the checkpoint before"):
        train_here(tmp_path, "average", ema_decay=0.9, resume="must")
    again = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    folder = train_here(tmp_path, "damaged")
    whole = load_file(folder / "model" / "model.safetensors")
    (folder / "result.json").unlink()
    newest = checkpoints(folder)[-1].parent
    file = next(newest.glob("*-00000.safetensors"))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="missing or cut off.*the checkpoint before it is used"):
        train_here(tmp_path, "damaged", resume="must")
    again = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_old_checkpoints_go_and_a_full_disk_destroys_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = train_here(tmp_path, "kept", epochs=3, keep_checkpoints=2)
    assert [path.parent.name for path in checkpoints(folder)] == ["step-00000044", "step-00000066"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(RunError, match=r"3 checkpoints need 30 MiB and .* has 0 left"):
        train_here(tmp_path, "full")


def test_a_checkpoint_that_cannot_be_written_leaves_the_ones_before(tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    model = torch.nn.Linear(128, 128)
    binmask = binmask_dist.patch(model, torch.optim.SGD(model.parameters(), lr=0.1), lam=1e-6, epochs=1)
    kept = Checkpoints(tmp_path, 2, binmask, None, accelerator_for(TrainConfig()))
    assert kept.save(1, {"step": 1})
    told = r"could not be written to .*; the run goes on, and the checkpoints before"
    with full_disk(20_000), pytest.warns(UserWarning, match=told):
        assert not kept.save(2, {"step": 2})
    assert kept.load_newest() == {"step": 1}
    assert not (tmp_path / "step-00000002").exists()


def test_a_signal_on_a_full_disk_does_not_say_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "_write", lambda *arguments: False)
    monkeypatch.setattr(Progress, "step", lambda *arguments: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="interrupted, and could not be saved; --resume goes on"):
        train_here(tmp_path, "stopped")


def test_ctrl_c_outside_of_the_loop_ends_as_inside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*arguments: object) -> None:
        raise KeyboardInterrupt

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr("binmask_dist.training.main.train", pressed)
    for of_the_process in ("keep_freed_memory", "end_with_the_launcher"):
        monkeypatch.setattr(f"binmask_dist.training.main.{of_the_process}", lambda: None)
    with pytest.raises(SystemExit) as left:
        main(TrainConfig())
    assert left.value.code == 130
    assert capsys.readouterr().out == "interrupted before the first step or after the last; --resume auto goes on\n"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_model_that_cannot_be_written_is_written_by_resume(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("binmask_dist.training.main.save_masks", full)
        told = r"the model in .*full cannot be written \(No space left on device\); once it can, go on with --resume"
        with pytest.raises(RunError, match=told):
            train_here(tmp_path, "full", epochs=1)
    assert result(train_here(tmp_path, "full", epochs=1, resume="must"))["steps"] == 22


def test_the_best_epoch_is_one_that_could_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for a while: the run ends with the best of the epochs that are there, or with the last."""
    write, look = Checkpoints._write, Loop._look_for_the_best
    full = {"until": 0}

    def sometimes(self: Checkpoints, path: Path, extra: dict) -> bool:
        is_full = path.name.startswith("best") and extra["epoch"] <= full["until"]
        return False if is_full else write(self, path, extra)

    def falling(self: Loop, record: dict) -> None:
        look(self, {**record, "test_accuracy": -record["epoch"]})

    monkeypatch.setattr(Checkpoints, "_write", sometimes)
    monkeypatch.setattr(Loop, "_look_for_the_best", falling)
    for name, full["until"], expected in (("late", 1, 1), ("never", 99, 2)):
        folder = train_here(tmp_path, name, patience=3)
        assert result(folder)["test_loss"] == records(folder)[expected]["test_loss"]
        assert len(list(folder.glob("checkpoints/best-*"))) == (1 if name == "late" else 0)


LONELY = """
import torch.distributed as dist
from binmask_dist import make_accelerator
from binmask_dist.training.mistakes import TOLD, told_in_a_sentence
from binmask_dist.training.tasks.base import RunError

accelerator = make_accelerator()
try:
    with told_in_a_sentence(accelerator):
        raise RunError("all of us")
except SystemExit as error:
    assert error.code == 1
dist.barrier()
if accelerator.is_main_process:
    dist.distributed_c10d._get_default_store().delete_key(TOLD)
dist.barrier()
with told_in_a_sentence(accelerator):
    if accelerator.process_index == 1:
        raise RunError("only me")
    dist.barrier()
"""


def test_what_one_process_alone_has_met_is_said_and_what_all_have_met_once(tmp_path: Path) -> None:
    (tmp_path / "lonely.py").write_text(LONELY)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(tmp_path / "lonely.py")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert told == ["error: all of us", "error in process 1: only me"]
    assert "[rank0]: Traceback" not in done.stderr  # it was waiting for the other process


def test_an_unwritable_folder_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="the run folder cannot be made in"):
        train_here(tmp_path / "file", "x")


def test_runs_of_two_wandb_agents_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from binmask_dist.training.run_folder import _choose

    monkeypatch.setattr(time, "strftime", lambda layout: "now")
    assert _choose(TrainConfig(run_root=str(tmp_path))).name == "test_resnet-now"
    monkeypatch.setenv("WANDB_RUN_ID", "abcd")
    assert _choose(TrainConfig(run_root=str(tmp_path))).name == "test_resnet-now-abcd"


def test_resume_without_a_name_finds_the_same_configuration(tmp_path: Path) -> None:
    from binmask_dist.training.run_folder import _choose

    folder = train_here(tmp_path, "first", epochs=1)
    same = TrainConfig(run_root=str(tmp_path), resume="auto", **{**SHORT, "epochs": 1})
    assert _choose(same) == folder
    other = TrainConfig(run_root=str(tmp_path), resume="auto", **{**SHORT, "epochs": 2})
    assert _choose(other).name.startswith("test_resnet-")
    for content in ("[1, 2]", "no json"):  # of another program
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "config.json").write_text(content)
        (tmp_path / "other" / "results").touch()
        assert _choose(same) == folder
        with pytest.raises(RunError, match=r"other.config.json is not the configuration of a run; give another --name"):
            train_here(tmp_path, "other", resume="auto")
