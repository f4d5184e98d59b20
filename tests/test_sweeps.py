"""Sweeps that run: two workers, kill -9, signals, failures; and a real one of launch/train.py."""

import json
import multiprocessing
import os
import random
import re
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import wandb
import yaml
from accelerate.state import AcceleratorState, GradientState
from jobs import ROOT, records, result
from ranks.launchers import wait_for
from safetensors.torch import load_file
from scipy import stats
from sklearn.datasets import load_wine

from binmask_dist.report.main import ReportOptions, make_report
from binmask_dist.sweeps import sweep_file
from binmask_dist.sweeps.main import main, parse_sweep
from binmask_dist.sweeps.trial import Trial, make_trials
from binmask_dist.training.config import parse_config
from binmask_dist.training.main import accelerator_for, train

STAND_IN = str(Path(__file__).parent / "stand_in.py")
PLAIN = ["${interpreter}", "${program}", "${args}"]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


class Sweep:
    """A sweep file and its folder."""

    def __init__(self, folder: Path, program: str = STAND_IN, command: list[str] = PLAIN, **values: Any) -> None:
        self.file, self.folder = folder / "some.yaml", folder / "sweep"
        parameters = {key: {"values": value} for key, value in values.items()}
        content = {"program": program, "method": "grid", "parameters": parameters, "command": command}
        self.file.write_text(yaml.safe_dump(content))

    @cached_property
    def trials(self) -> list[Trial]:
        return make_trials(sweep_file.read(self.file), self.folder)

    def arguments(self, *options: str) -> list[str]:
        return [str(self.file), "--folder", str(self.folder), *options]

    def run(self, *options: str) -> int:
        return main(parse_sweep(self.arguments(*options)))

    @contextmanager
    def worker(self, *options: str) -> Iterator[multiprocessing.Process]:
        """A worker in a process of its own, which need not import everything anew."""
        process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(self.run(*options)))
        process.start()
        try:
            yield process
        finally:
            process.kill()
            process.join()

    def starts(self) -> dict[str, int]:
        return {trial.id: lines(trial.folder / "starts") for trial in self.trials}

    def ends(self) -> list[int]:
        return [lines(trial.folder / "ends") for trial in self.trials]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_all_trials_run_each_once(tmp_path: Path, capsys: Any) -> None:
    """Two at once, on different devices; the second start finds nothing to do, and a longer file adds to it."""
    sweep = Sweep(tmp_path, seed=[0, 1, 2], lr=[0.2])
    assert sweep.run("--jobs=2", "--devices=4,5") == 0
    assert sweep.ends() == [1, 1, 1]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"sweep some in {sweep.folder}: 3 trials, 0 finished already, 2 at once"
    assert re.match(r"[12]/3 finished, [12] running, 0 failed, [01] left, about 0:00:\d\d to go: digits-", said[1])
    assert said[3].startswith("3/3 finished, 0 running, 0 failed, 0 left: digits-test_resnet-lam2e-05-")
    assert said[4] == f"3 of 3 trials finished in {sweep.folder}"
    used = [(trial.folder / "starts").read_text().split()[1] for trial in sweep.trials]
    assert used[:2] == ["4", "5"]
    record = sweep.trials[0].record()
    assert record["parameters"] == {"lr": 0.2, "seed": 0}
    assert {key: record[key] for key in ("status", "attempts", "exit_code")} == {
        "status": "finished",
        "attempts": 1,
        "exit_code": 0,
    }
    assert record["host"]
    assert (sweep.folder / "sweep.yaml").read_text() == sweep.file.read_text()

    longer = Sweep(tmp_path, seed=[1, 2, 3], lr=[0.2], log_every=[5, 10])
    assert longer.run() == 0
    assert longer.ends() == [1, 1, 1]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"sweep some in {sweep.folder}: 3 trials, 2 finished already, ")
    assert said[1] == "3 settings more would compute the same as these, and are left out"
    assert said[2] == f"1 trials in {sweep.folder} are not in {sweep.file} and are left alone"


def test_a_failed_trial_stops_nothing_and_is_reported(tmp_path: Path, capsys: Any) -> None:
    sweep = Sweep(tmp_path, seed=[7, 0, 1], lr=[0.01])
    assert sweep.run("--jobs=1") == 1
    assert sweep.ends() == [0, 1, 1]
    out = capsys.readouterr().out
    assert "seed 7 failed with exit code 3; the end of " in out
    assert "    error: seven is not a good seed\n" in out
    assert "2 of 3 trials finished in" in out
    assert ", 1 failed; --retry-failed runs these again" in out
    failed = sweep.trials[0]
    assert (failed.status(), failed.record()["exit_code"]) == ("failed", 3)

    assert sweep.run() == 1  # reported again, not run again
    assert sweep.starts()[failed.id] == 1
    assert "error: seven is not a good seed" in capsys.readouterr().out
    assert sweep.run("--retry-failed") == 1  # once, not for ever
    assert sweep.starts()[failed.id] == 2
    (sweep.folder / "mended").touch()
    assert sweep.run("--retry_failed") == 0
    assert (failed.status(), failed.record()["attempts"]) == ("finished", 3)
    assert sweep.ends() == [1, 1, 1]


def test_a_program_that_is_told_its_folder(tmp_path: Path, capsys: Any) -> None:
    """Nothing is known of it but its words: the same as for training, under the names of the parameters."""
    sweep = Sweep(tmp_path, command=[*PLAIN, "${folder}"], seed=[7, 0], lr=[0.01])
    assert sweep.run("--jobs=1") == 1
    assert sweep.ends() == [0, 1]
    out = capsys.readouterr().out
    assert "lr = 0.01, seed = 7 failed with exit code 3; the end of " in out
    assert "    error: seven is not a good seed\n" in out
    assert "lr = 0.01, seed = 0 finished after 0:00:0" in out
    assert sweep.run() == 1
    (sweep.folder / "mended").touch()
    assert sweep.run("--retry-failed") == 0
    assert list(sweep.starts().values()) == [2, 1]
    assert sweep.ends() == [1, 1]
    words = f"{sys.executable} {STAND_IN} --lr=0.01 --seed=0 --folder={sweep.trials[1].folder}\n"
    assert sweep.trials[1].log.read_text().endswith(words)


def test_the_end_of_a_log_is_the_programs_own(tmp_path: Path) -> None:
    """`accelerate launch` ends with forty lines about a process that has said in one what is wrong."""
    (trial,) = Sweep(tmp_path, seed=[0]).trials
    trial.folder.mkdir(parents=True)
    launcher = 'Traceback (most recent call last):\n  File "/x/bin/accelerate", line 8, in <module>\n' + "    x\n" * 40
    own = 'Traceback (most recent call last):\n  File "launch/train.py", line 8, in <module>\nOSError: full\n'
    steps = "step\n" * 99
    trial.log.write_text(f"=== attempt 1 on a\nerror: old\n=== attempt 2 on a: x\n{steps}{own}{launcher}")
    assert trial.end_of_log(5) == ["step", "step", *own.splitlines()]
    trial.log.write_text(f"=== attempt 1 on a\nold\n=== attempt 2 on a\nerror: new\n{launcher}")
    assert trial.end_of_log(5) == ["error: new"]


def test_a_program_that_cannot_start_is_a_failed_trial(tmp_path: Path, capsys: Any) -> None:
    sweep = Sweep(tmp_path, seed=[0], lr=[0.01], command=["no_such_launcher", "${program}", "${args}"])
    assert sweep.run() == 1
    assert "error: no_such_launcher cannot be started: No such file or directory" in capsys.readouterr().out
    assert sweep.trials[0].record()["exit_code"] == 127


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, capsys: Any) -> None:
    sweep = Sweep(tmp_path, seed=[0], lr=[0.01])
    sweep.folder.touch()
    assert sweep.run() == 1
    assert capsys.readouterr().err.startswith(f"error: the sweep in {sweep.folder} cannot go on: File exists")


def test_two_workers_share_the_trials(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, seed=list(range(8)), lr=[0.15])
    (sweep.folder).mkdir()
    (sweep.folder / "mended").touch()
    with sweep.worker("--jobs=2") as first, sweep.worker("--jobs=2") as second:
        for worker in (first, second):
            worker.join(30)
            assert worker.exitcode == 0
    assert set(sweep.starts().values()) == {1}
    assert sweep.ends() == [1] * 8


def test_a_worker_waits_for_others_unless_told_not_to(tmp_path: Path, capsys: Any) -> None:
    sweep = Sweep(tmp_path, seed=[0], lr=[2.5])
    with sweep.worker() as first:
        wait_for(lambda: sweep.starts()[sweep.trials[0].id], 10)
        assert sweep.run("--wait=false") == 0
        assert capsys.readouterr().out.splitlines()[-1] == "1 are at work elsewhere"
        assert sweep.run() == 0
        assert sweep.trials[0].is_finished
        first.join(10)
        assert first.exitcode == 0
    assert sweep.starts() == {sweep.trials[0].id: 1}


def test_accelerate_launch_and_what_it_started_end_with_the_worker(tmp_path: Path) -> None:
    """Its launcher of a single process passes no signal on, and the stand-in does not look for its launcher."""
    launcher = ["${env}", "accelerate", "launch", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"]
    command = [*launcher, "--dynamo_backend=no", "${program}", "${args}"]
    sweep = Sweep(tmp_path, seed=[0], lr=[100.0], command=command)
    (trial,) = sweep.trials
    with sweep.worker() as worker:
        wait_for(lambda: lines(trial.folder / "starts"), 60)
        worker.kill()
    wait_for(trial.claim, 10)
    assert not psutil.pid_exists(int((trial.folder / "starts").read_text().split()[0]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_sweep_goes_on_later(tmp_path: Path, number: int, capfd: Any) -> None:
    sweep = Sweep(tmp_path, seed=[0, 1], lr=[30.0])
    with sweep.worker("--jobs=1") as worker:
        trial = sweep.trials[0]
        wait_for(lambda: lines(trial.folder / "starts"), 10)
        os.kill(worker.pid or 0, number)
        worker.join(10)
        assert worker.exitcode == 128 + number
    assert not psutil.pid_exists(int((trial.folder / "starts").read_text().split()[0]))
    assert (trial.status(), trial.record()["exit_code"]) == ("interrupted", 128 + signal.SIGTERM)
    out = capfd.readouterr().out
    assert f"{signal.Signals(number).name}: 1 trials save and end" in out
    assert "stopped; the same command goes on" in out
    with sweep.worker() as worker:  # nothing stands in the way of the next
        wait_for(lambda: list(sweep.starts().values()) == [2, 1], 10)


def test_kill_9_at_any_moment_loses_nothing_and_leaves_no_process(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, seed=list(range(6)), lr=[0.1])
    sweep.folder.mkdir()
    (sweep.folder / "mended").touch()
    finished: set[str] = set()
    moments = random.Random(0)
    for _ in range(6):
        with sweep.worker("--jobs=2") as worker:
            time.sleep(moments.uniform(0.02, 0.5))
            worker.kill()
        now = {trial.id for trial in sweep.trials if trial.is_finished}
        assert finished <= now
        finished = now
    before = sweep.starts()
    assert sweep.run("--jobs=2") == 0
    assert {id for id in finished if sweep.starts()[id] != before[id]} == set()
    assert sweep.ends() == [1] * 6
    pids = {int(line.split()[0]) for trial in sweep.trials for line in (trial.folder / "starts").open()}
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_claim_lasts_as_long_as_any_process_of_the_trial(tmp_path: Path) -> None:
    """Here one that takes no notice of its launcher's end, nor of the signal, for a while."""
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "folder = next(word[11:] for word in sys.argv if word.startswith('--run_root='))\n"
        "if sys.argv[1] != 'child':\n"
        "    sys.exit(subprocess.call([sys.executable, __file__, 'child', *sys.argv[1:]]))\n"
        "signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(folder, 'told').touch())\n"
        "pathlib.Path(folder, 'ready').touch()\n"
        "while not pathlib.Path(folder, 'let_go').exists(): time.sleep(0.02)\n"
    )
    sweep = Sweep(tmp_path, program=str(script), seed=[0])
    (trial,) = sweep.trials
    there = trial.folder.parent
    with sweep.worker() as worker:
        wait_for((there / "ready").exists, 10)
        worker.kill()
        worker.join()
    wait_for((there / "told").exists, 10)
    assert trial.claim() is None
    (there / "let_go").touch()
    wait_for(trial.claim, 10)


def test_a_run_by_hand_in_a_trials_folder_is_left_alone(tmp_path: Path) -> None:
    import fcntl

    (trial,) = Sweep(tmp_path, seed=[0]).trials
    trial.folder.mkdir(parents=True)
    with (trial.folder / ".lock").open("w") as lock:  # as the training command holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert trial.claim() is None
    first = trial.claim()
    assert first
    assert trial.claim() is None
    first.close()
    assert trial.claim()


def test_the_script(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["launch/sweep.py", "configs/sweeps/digits.yaml", "--count=2", "--dry-run"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path("launch/sweep.py", run_name="__main__")
    assert exit.value.code == 0
    assert capsys.readouterr().out.count("accelerate launch") == 2


OPTIONS = ["--task=tabular", "--model=mlp_bn", "--epochs=8", "--batch_size=16", "--checkpoint_every=4"]


def wine(path: Path) -> str:
    """As small as a job of launch/train.py gets: most of its time goes into starting."""
    data = load_wine()
    rows = [",".join([*map(str, row), f"kind{kind}"]) for row, kind in zip(data.data, data.target, strict=True)]
    path.write_text("\n".join([",".join([*(f"x{i}" for i in range(data.data.shape[1])), "label"]), *rows]) + "\n")
    return f"--dataset={path}"


def checkpoints(trial: Trial) -> list[Path]:
    return list(trial.folder.glob("checkpoints/*/checkpoint.json"))


@pytest.mark.slow
def test_a_real_sweep_with_two_workers_one_of_them_killed(tmp_path: Path) -> None:
    """Two configurations, three seeds; the trial that was cut short ends with the masks that it has alone."""
    values = dict(program="launch/train.py", lam=[1e-4, 1e-3], seed=[0, 1, 2])
    options = [*OPTIONS, wine(tmp_path / "wine.csv")]
    sweep = Sweep(tmp_path, **values, command=[*PLAIN[:2], *options, "--trackers=[]", PLAIN[2]])
    ours, theirs = sweep.trials[:2]
    with sweep.worker("--jobs=1") as first:
        wait_for(lambda: ours.status() == "running", 20)
        with sweep.worker("--jobs=1") as second:
            wait_for(lambda: theirs.status() == "running", 20)
            wait_for(lambda: checkpoints(ours) or ours.status() == "failed", 120)
            assert not ours.is_finished, "it was too fast to be stopped in the middle"
            first.kill()
            first.join()
            assert sweep.run("--jobs=1") == 0
            second.join(10)
            assert second.exitcode == 0
    for trial in sweep.trials:
        assert trial.is_finished
        times = 2 if trial.id == ours.id else 1
        assert trial.record()["attempts"] == times
        assert len(json.loads((trial.folder / "environment.json").read_text())) == times
        assert [record["epoch"] for record in records(trial.folder)] == list(range(8))
    assert "=== attempt 2 on " in ours.log.read_text()
    check_report(sweep)

    (tmp_path / "alone").mkdir()
    same = Sweep(tmp_path / "alone", **values, command=[*PLAIN[:2], *options, PLAIN[2]]).trials[0]
    assert same.id == ours.id
    words = same.words(same.command.launcher, "some_sweep", "offline")
    same.folder.mkdir(parents=True)
    train_alone(words[words.index("launch/train.py") + 1 :])
    mine, other = (load_file(trial.folder / "masks.safetensors") for trial in (ours, same))
    assert mine.keys() == other.keys()
    assert 0.01 < result(ours.folder)["sparsity"] < 0.99
    assert all(torch.equal(mine[key], other[key]) for key in mine)
    (kept,) = same.folder.glob("wandb/offline-run-*/*.wandb")
    content = kept.read_bytes()
    assert same.name.split(" seed")[0].encode() in content  # the group
    assert b"some_sweep" in content


def check_report(sweep: Sweep) -> None:
    """Its numbers are scipy's of the raw files."""
    make_report(ReportOptions([str(sweep.folder)]))
    (problem,) = json.loads((sweep.folder / "report" / "summary.json").read_text())["problems"]
    assert sorted(each["settings"]["lam"] for each in problem["configurations"]) == [1e-4, 1e-3]
    for each in problem["configurations"]:
        raw = [result(trial.folder) for trial in sweep.trials if trial.config.lam == each["settings"]["lam"]]
        assert len(raw) == 3
        for name in ("test_accuracy", "sparsity"):
            values = np.array([one[name] for one in raw])
            error = values.std(ddof=1) / 3**0.5
            found = each["metrics"][name]
            assert found["mean"] == pytest.approx(values.mean())
            assert found["std"] == pytest.approx(values.std(ddof=1), abs=1e-12)
            assert found["high"] - found["mean"] == pytest.approx(stats.t.ppf(0.975, 2) * error, abs=1e-12)


def train_alone(arguments: list[str]) -> None:
    """The same command line, in this process, where most is imported already."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config = parse_config(arguments)
    train(config, accelerator_for(config))
    wandb.teardown()
