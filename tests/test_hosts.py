"""Training by the launch scripts: on one host, under SLURM's script, and on two hosts with addresses of their own."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from jobs import ROOT, SHORT, options, result
from ranks.launchers import calls, run, started, stub, trainers, wait_for
from ranks.two_hosts import Host, NoNamespaces, two_hosts
from safetensors.torch import load_file

MODEL = "model/model.safetensors"
MULTI_NODE = str(ROOT / "launch" / "multi_node.sh")
JOB = str(os.getpid())  # the port follows from it, and tests may run side by side

pytestmark = pytest.mark.slow


def train_options(root: Path, **more: Any) -> list[str]:
    return options(run_root=root, name="run", **{**SHORT, **more})


def has_begun(folder: Path) -> bool:
    """Steps were made and written down."""
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


@pytest.fixture(scope="module")
def slurm_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with two launchers on this host that reached its time limit; SLURM's commands are stand-ins."""
    root = tmp_path_factory.mktemp("slurm")
    stub(root, "scontrol", "echo localhost")
    start_two = 'shift 7; for node in 0 1; do SLURM_NODEID=$node "$@" & done'  # seven words are srun's own
    stub(root, "srun", f'{start_two}; echo $$ > {root}/pid; status=0; wait -n || status=$?; wait; exit "$status"')
    # as SLURM does: it signals all processes of a step, not only those that it started
    signal_all = "import psutil; [p.terminate() for p in psutil.Process({}).children(recursive=True)]"
    path = stub(root, "scancel", f'{sys.executable} -c "{signal_all.format(f"$(< {root}/pid)")}"')
    command = [str(ROOT / "launch" / "slurm.sbatch"), "--processes", "1", *train_options(root, workers=1)]
    job = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "2"}
    log = root / "log"
    with started(log, command, PATH=path, SLURM_SUBMIT_DIR=str(ROOT), **job) as script:
        wait_for(lambda: has_begun(root / "run"), 150)
        script.send_signal(signal.SIGUSR1)
        assert script.wait(60) != 0, log.read_text()
    return root


@pytest.fixture(scope="module")
def one_host(slurm_job: Path) -> Path:
    """The same run, which went on to its end with two processes of one launcher."""
    done = run("single_node.sh", "--processes", "2", "--resume", *train_options(slurm_job))
    assert done.returncode == 0, done.stderr
    return slurm_job / "run"


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        try:
            both = stack.enter_context(two_hosts())
        except NoNamespaces as reason:
            pytest.skip(f"NOT TESTED ON TWO HOSTS: no network namespaces can be made here: {reason}")
        yield both


def launch_on(hosts: tuple[Host, Host], stack: ExitStack, root: Path, **more: Any) -> list[Popen[bytes]]:
    """The launcher on each host. The last starts first: the order must not matter."""
    processes = []
    for rank, host in reversed(list(enumerate(hosts))):
        job = ("--nodes", "2", "--rank", str(rank), "--head", hosts[0].address, "--processes", "1")
        command = host.inside(MULTI_NODE, *job, *train_options(root, **more))
        processes.append(stack.enter_context(started(root / f"host{rank}.log", command)))
    return processes[::-1]


def assert_same_run(folder: Path, expected: Path) -> None:
    """As complete, on two processes, and with the same masks and weights, bit for bit."""
    assert {path.name for path in folder.iterdir()} == {path.name for path in expected.iterdir()}
    assert result(folder)["processes"] == 2
    assert 0 < result(folder)["sparsity"] < 1
    for name in (MODEL, "masks.safetensors"):
        ours, theirs = load_file(expected / name), load_file(folder / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_at_the_time_limit_slurm_saves_and_queues_the_job_again(slurm_job: Path) -> None:
    assert calls(slurm_job)[-2:] == [f"scancel --signal=TERM {JOB}.0", f"scontrol requeue {JOB}"]
    assert "interrupted and saved" in (slurm_job / "log").read_text()
    assert list(slurm_job.glob("run/checkpoints/*/checkpoint.json"))


def test_one_host_goes_on_with_it(one_host: Path) -> None:
    assert result(one_host)["processes"] == 2
    assert result(one_host)["steps"] == 3 * 22
    assert len(json.loads((one_host / "environment.json").read_text())) == 2  # starts


def test_two_hosts_train_together(hosts: tuple[Host, Host], one_host: Path, tmp_path: Path) -> None:
    before = [host.bytes_sent() for host in hosts]
    with ExitStack() as stack:
        launchers = launch_on(hosts, stack, tmp_path)
        assert [launcher.wait(150) for launcher in launchers] == [0, 0], (tmp_path / "host0.log").read_text()
    assert_same_run(tmp_path / "run", one_host)
    size = sum(weight.nbytes for weight in load_file(one_host / MODEL).values())
    for host, start in zip(hosts, before, strict=True):
        assert host.bytes_sent() - start > 0.9 * result(one_host)["steps"] * size  # a gradient per step


def test_a_dead_process_takes_the_other_host_down(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    with ExitStack() as stack:
        launchers = launch_on(hosts, stack, tmp_path, epochs=1000)
        wait_for(lambda: has_begun(tmp_path / "run"), 150)
        (victim,) = trainers(launchers[1])
        victim.send_signal(signal.SIGKILL)
        assert [launcher.wait(30) for launcher in launchers] == [1, 1]
    assert "by peer" in (tmp_path / "host0.log").read_text()
    assert "Signal 9 (SIGKILL) received" in (tmp_path / "host1.log").read_text()
