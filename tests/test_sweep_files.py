"""Sweep files: what W&B makes of them, what this project does, and what is refused before a trial starts."""

import os
import shlex
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from jobs import ROOT
from wandb import wandb_agent

from binmask_dist.sweeps import devices, progress, sweep_file
from binmask_dist.sweeps.commands import Launch, agent_command, read_launcher, with_free_port
from binmask_dist.sweeps.main import main, parse_sweep
from binmask_dist.sweeps.sweep_file import SweepError
from binmask_dist.sweeps.trial import Trial, make_trials
from binmask_dist.sweeps.worker import trial_environment
from binmask_dist.training.config import TrainConfig, parse_config
from binmask_dist.training.identity import trial_id

FILES = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
GOOD = {"program": "launch/train.py", "method": "grid", "parameters": {"seed": {"values": [0, 1]}}}


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def write(folder: Path, **changes: Any) -> Path:
    content = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def agents_command(content: dict[str, Any], setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By the code of `wandb agent` itself, up to the start of the process."""
    for key in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(key, "")  # which the agent changes, and pytest puts back
    agent = object.__new__(wandb_agent.Agent)
    agent._sweep_command, agent._function, agent._in_jupyter = list(content.get("command", [])), None, False
    agent._forward_signals, agent._run_processes = False, {}
    monkeypatch.setattr(wandb_agent, "AgentProcess", lambda **start: SimpleNamespace(**start))
    args = {key: {"value": value} for key, value in setting.items()}
    agent._command_run({"run_id": "some_run", "program": content["program"], "args": args})
    return agent._run_processes["some_run"].command


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_wandb_accepts_the_file_and_training_what_an_agent_makes_of_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content, read = yaml.safe_load(path.read_text()), sweep_file.read(path)
    from sweeps import schema_violations_from_proposed_config  # only now, when its warnings have been caught

    assert schema_violations_from_proposed_config(content) == []
    assert content["program"] == "launch/train.py"
    assert "seed" in content["parameters"]
    assert Path(content["command"][content["command"].index("accelerate") + 1]).name == "launch"
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))  # the agent keeps a note of every run
    (tmp_path / "wandb").mkdir()
    found = sweep_file.settings(read, 20 if content["method"] == "random" else None, seed=0)
    assert len(found) >= 6
    for setting in found:
        command = agents_command(content, setting, monkeypatch)
        ours = agent_command(content, setting, interpreter="python")
        assert command == ours.words
        config = asdict(parse_config(command[command.index("launch/train.py") + 1 :]))
        assert {key: config[key] for key in setting} == setting
    assert read_launcher(ours.launcher).processes == (2 if path.stem == "cifar10" else 1)
    assert not read_launcher(ours.launcher).port_is_needed


def test_there_are_a_grid_and_a_random_sweep_of_the_default_job(tmp_path: Path) -> None:
    grid = make_trials(sweep_file.read(ROOT / "configs/sweeps/digits.yaml"), tmp_path)
    assert len(grid) == 20
    assert Counter(trial.config.seed for trial in grid) == {seed: 4 for seed in range(5)}
    read = sweep_file.read(ROOT / "configs/sweeps/digits_random.yaml")
    few, many = make_trials(read, tmp_path, count=3), make_trials(read, tmp_path, count=5)
    assert [trial.id for trial in many][:3] == [trial.id for trial in few]  # more are more of the same
    assert {trial.id for trial in make_trials(read, tmp_path, count=3, seed=1)}.isdisjoint(trial.id for trial in many)


def test_random_draws_are_from_wandbs_distributions(tmp_path: Path) -> None:
    parameters = {
        "lam": {"distribution": "log_uniform_values", "min": 1e-6, "max": 1e-4},
        "alpha0": {"min": 0.1, "max": 0.9},
        "batch_size": {"distribution": "q_uniform", "min": 8, "max": 64, "q": 8},
        "epochs": {"min": 3, "max": 5},
        "optimizer": {"values": ["sgd", "adamw"], "probabilities": [0.9, 0.1]},
        "model_args": {"parameters": {"drop_rate": {"values": [0.1, 0.2]}}},
    }
    read = sweep_file.read(write(tmp_path, method="random", parameters=parameters))
    drawn = sweep_file.settings(read, 400, seed=0)
    assert drawn == sweep_file.settings(read, 400, seed=0)
    assert 0.4 < sum(setting["lam"] < 1e-5 for setting in drawn) / 400 < 0.6  # half of them below the middle exponent
    assert {setting["batch_size"] % 8 for setting in drawn} == {0}
    assert {setting["epochs"] for setting in drawn} == {3, 4, 5}
    assert 0.85 < sum(setting["optimizer"] == "sgd" for setting in drawn) / 400 < 0.95
    trials = make_trials(read, tmp_path, count=3)
    assert {trial.config.model_args["drop_rate"] for trial in trials} <= {0.1, 0.2}


def test_a_trial_is_its_resolved_configuration(tmp_path: Path) -> None:
    values = ["2e-5", 2.0e-5, 1.0e-5]  # YAML reads 2e-5 as a text
    trials = make_trials(sweep_file.read(write(tmp_path, parameters={"lam": {"values": values}})), tmp_path)
    assert [trial.id for trial in trials] == [trial_id(asdict(TrainConfig(lam=lam))) for lam in (2e-5, 1e-5)]
    assert trials[0].folder == tmp_path / "trials" / trials[0].id


OWN = ["${env}", "${interpreter}", "${program}", "--words", "${folder}", "${args}"]


def test_a_trial_of_another_program_is_what_that_is_told(tmp_path: Path) -> None:
    def trial(root: str = "one", order: tuple[str, ...] = ("lr", "kind"), **changes: Any) -> Trial:
        parameters = {key: {"value": {"lr": 0.1, "kind": "new"}[key]} for key in order}
        content = {"command": OWN, "program": "tests/stand_in.py", "parameters": parameters, **changes}
        (made,) = make_trials(sweep_file.read(write(tmp_path, **content)), tmp_path / root)
        return made

    first = trial()
    own = ["--words", f"--folder={tmp_path}/one/trials/{first.id}", "--kind=new", "--lr=0.1"]
    assert first.words(["python"], "some", "") == ["python", "tests/stand_in.py", *own]
    assert first.name == "kind = new, lr = 0.1"
    same = [trial(root="two"), trial(order=("kind", "lr")), trial(command=["env", "A=b", *OWN[1:]])]
    assert {each.id for each in same} == {first.id}  # neither the place, nor the order, nor the launcher
    other = [trial(program="tests/jobs.py"), trial(order=("lr",)), trial(command=[*OWN[:3], "--more", *OWN[4:]])]
    assert len({first.id, *(each.id for each in other)}) == 4


def test_an_agent_leaves_the_folder_to_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    (tmp_path / "wandb").mkdir()
    content = {**GOOD, "command": OWN}
    command = agents_command(content, {"lr": 0.1}, monkeypatch)
    assert command == ["/usr/bin/env", "python", "launch/train.py", "--words", "--lr=0.1"]
    assert command == agent_command(content, {"lr": 0.1}, interpreter="python").words


def test_the_wandb_mode_of_another_program_is_its_own(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path, command=OWN)
    assert main(parse_sweep([str(path), "--folder", str(tmp_path), "--dry_run", "--wandb_mode=online"])) == 1
    said = "error: --wandb_mode is for the training command; set WANDB_MODE, which launch/train.py inherits\n"
    assert capsys.readouterr().err == said


def test_what_a_trial_is_told_beyond_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Its folder, to go on with what is there, and W&B's labels; no upload unless somebody asks for it."""
    monkeypatch.delenv("WANDB_MODE")
    path = write(tmp_path, name="some", parameters={"seed": {"values": [0, 1]}, "tags": {"value": ["mine"]}})
    own = ["--dry_run", "--folder", str(tmp_path)]

    def configs(*arguments: str) -> list[TrainConfig]:
        assert main(parse_sweep([str(path), *own, *arguments])) == 0
        lines = capsys.readouterr().out.splitlines()
        return [parse_config(shlex.split(line.split("launch/train.py ")[1])) for line in lines]

    first, second = configs()
    assert (first.wandb_mode, first.resume, first.run_root) == ("offline", "auto", f"{tmp_path}/trials")
    assert first.name == trial_id(asdict(first)) != second.name == trial_id(asdict(second))
    assert first.tags == second.tags  # the seed makes no configuration of its own
    assert first.tags[:2] == ("mine", "some")
    assert first.tags[2].startswith("configuration-")
    assert configs("--wandb_mode=online")[0].wandb_mode == "online"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert configs()[0].wandb_mode == "auto"  # which follows WANDB_MODE


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parameters": None}, "is no valid sweep file of W&B: 'parameters' is a required property"),
        ({"program": None}, "names no program; add `program: launch/train.py`"),
        ({"program": "train.py"}, "there is no train.py here; start from the project's folder"),
        ({"method": "gird"}, "is no valid sweep file of W&B: 'gird' is not one of"),
        ({"method": "bayes"}, "which W&B's server does and this command does not: start it there with `wandb sweep"),
        ({"method": "random"}, "a random sweep has no end of its own: give --count, the number of trials"),
        ({"parameters": {"seed": {"valeus": [1]}}}, "invalid hyperparameter configuration: seed"),
        ({"parameters": {"lam": {"min": 0.1, "max": 0.2}}}, "Parameter lam is a disallowed type with grid search"),
        (
            {"parameters": {"lamb": {"values": [1, 2]}}},
            "the trial with lamb = 1 cannot be run: unknown key 'lamb': did you mean 'lam'?",
        ),
        (
            {"parameters": {"lr": {"values": [0.1, -1]}, "seed": {"value": 3}}},
            "the trial with lr = -1, seed = 3 cannot be run: lr must be above zero, not -1.0",
        ),
        ({"parameters": {"config": {"values": ["a.yaml"]}}}, "config is no parameter: put --config=FILE into the"),
        ({"command": ["${env}", "${program}"]}, "the command of the sweep file must hold ${program} and, behind it,"),
        (
            {"command": ["accelerate", "launch", "--config_file=no.yaml", "${program}", "${args}"]},
            "the command names no.yaml, which is not there",
        ),
        ({"command": ["${folder}", "${program}", "${args}"]}, "${folder} is for the program: put it behind ${program}"),
        (
            {"command": OWN, "parameters": {"folder": {"value": "x"}}},
            "folder is no parameter: ${folder} in the command",
        ),
        ({"run_cap": "many"}, "run_cap must be a whole number above zero, not 'many'"),
    ],
)
def test_a_bad_file_is_one_sentence_before_any_trial(
    tmp_path: Path, changes: dict[str, Any], sentence: str, capsys: Any
) -> None:
    path = write(tmp_path, **changes)
    assert main(parse_sweep([str(path), "--folder", str(tmp_path / "folder")])) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "folder").exists()


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="cannot be read: No such file"):
        sweep_file.read(tmp_path / "nothing.yaml")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(SweepError, match="is no sweep file: it must hold program, method and parameters"):
        sweep_file.read(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(SweepError, match="is no YAML"):
        sweep_file.read(tmp_path / "broken.yaml")


@pytest.mark.parametrize("option", ["--job=2", "--jobs=0", "--jobs=two", "--wandb_mode=on"])
def test_options_are_checked(option: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit:
        parse_sweep(["some.yaml", option])
    assert exit.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_options() -> None:
    config = parse_sweep(["configs/sweeps/x.yaml", "--retry-failed", "--wait=false", "--jobs", "3"])
    assert (config.folder, config.retry_failed, config.wait, config.jobs) == (Path("runs/sweeps/x"), True, False, 3)
    assert parse_sweep(["x.yaml", "--retry_failed"]).retry_failed


def test_the_launcher_is_understood() -> None:
    def read(line: str) -> Launch:
        return read_launcher(line.split())

    assert read("/usr/bin/env accelerate launch --num_processes 4") == Launch(4, False, True)
    assert read("accelerate launch --num_processes=4 --main_process_port 0") == Launch(4, False, False)
    assert read("accelerate launch --config_file configs/accelerate/cpu2.yaml") == Launch(2, True, True)
    assert read("python -m accelerate.commands.launch --cpu") == Launch(1, True, False)
    assert read("/usr/bin/env python") == Launch(1, False, False)
    for start in (["env", "accelerate", "launch"], ["python", "-m", "accelerate.commands.launch"]):
        assert with_free_port([*start, "--cpu"]) == [*start, "--main_process_port", "0", "--cpu"]


def test_devices_are_shared_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def shares(processes: int, jobs: int | None, found: list[str], on_cpu: bool = False) -> list[tuple[str, ...]]:
        launch = Launch(processes, on_cpu, False)
        return [slot.devices for slot in devices.make_slots(launch, jobs, found, cores=6)]

    four = ["0", "1", "2", "3"]
    assert shares(1, None, four) == [("0",), ("1",), ("2",), ("3",)]
    assert shares(2, None, four) == [("0", "1"), ("2", "3")]
    assert shares(3, None, four) == [("0", "1", "2")]
    assert shares(2, 3, four) == [("0", "1"), ("2", "3"), ("0", "1")]  # as asked: two trials share two devices
    assert shares(2, None, []) == [()] * 3
    assert shares(2, None, four, on_cpu=True) == [()] * 3
    assert shares(8, None, []) == [()]
    with pytest.raises(SweepError, match="a trial has 8 processes, and there are 4 devices"):
        shares(8, None, four)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert devices.find_devices() == ["GPU-a", "GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert devices.find_devices() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-a)'\necho 'GPU 1: B (UUID: GPU-b)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert devices.find_devices() == ["0", "1"]


def test_the_environment_of_a_trial_depends_on_nothing_beside_it() -> None:
    outer = {"PATH": "/bin", "WANDB_RUN_ID": "outer"}
    first = trial_environment(outer, devices.Slot(0, ("2", "3")))
    assert (first["CUDA_VISIBLE_DEVICES"], first["OMP_NUM_THREADS"]) == ("2,3", "1")
    assert "WANDB_RUN_ID" not in first  # all trials would be one run of W&B
    assert first["PATH"] == f"{Path(sys.executable).parent}:/bin"  # accelerate is found without activation
    second = trial_environment(outer, devices.Slot(1, ("0", "1")))
    assert {key for key in first if first[key] != second[key]} == {"CUDA_VISIBLE_DEVICES"}
    assert "CUDA_VISIBLE_DEVICES" not in trial_environment(outer, devices.Slot(0, ()))
    assert trial_environment({**outer, "OMP_NUM_THREADS": "8"}, devices.Slot(0, ()))["OMP_NUM_THREADS"] == "8"


def test_the_time_left() -> None:
    assert progress.seconds_left([], [3.0], 5) is None
    assert progress.seconds_left([10.0, 20.0], [5.0, 0.0], 4) == (4 * 15 + 10 + 15) / 2
    assert progress.seconds_left([10.0], [1.0, 100.0], 0) == 9.0  # the last to end decides
    assert progress.duration(3725.4) == "1:02:05"


def test_the_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = progress.Progress("some", 6)
    bar.show(Counter(finished=2, running=2, failed=1, interrupted=1), 75.0)
    bar.close()
    last = capsys.readouterr().err.split("\r")[-1]
    assert last.startswith("some  33%|")
    assert "2/6 [00:00, 2 running, 1 failed, 1 left, about 0:01:15 to go]" in last
