"""launch/train.py against the same loop written bare with Accelerate and without masks, in one run.

All programs, on one process and on two, are started once and take turns of a few seconds, in which the others are
stopped (SIGSTOP): a machine may be shared and drift, but not much from one turn to the next. Ratios are of the turns of
one round; printed are medians over rounds, with their 95% intervals. The networks are that of the command's own
example, the smallest there is, and one of the paper's. Programs:

    bare    the loop as one would write it
    tuned   the bare loop with what else the command sets: it keeps freed memory, has channels last, a fused optimizer,
            and DDP send no buffers
    dense   the command without masks (--method dense)
    ours    the command

Also: seconds from the command to the first step, and seconds for a checkpoint.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import timm
import torch
import torch.nn.functional as F
from intervals import FEWEST, Interval, ratios
from safetensors.torch import save_file
from tqdm import tqdm

import binmask_dist
from binmask_dist.training.metrics_file import read_records

ROOT = Path(__file__).parent.parent
BATCH, IMAGE_SIZE = 64, 32
LOG_EVERY = {"test_resnet": 11, "wide_resnet32": 2}  # of the 22 steps of an epoch: a few records in every turn
TURN = 6  # records
CPU2 = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml", "--main_process_port", "0")


def bare_loop(model_name: str, out: str, tuned: bool) -> None:
    """What one would write without binmask_dist: the same data, network, optimizer and batches. It never ends."""
    from binmask_dist.training.config import TrainConfig
    from binmask_dist.training.heap import keep_freed_memory
    from binmask_dist.training.main import DDP
    from binmask_dist.training.tasks import make_task

    if tuned:
        keep_freed_memory()
    # a plain Accelerator would run two processes that do not talk
    accelerator = binmask_dist.make_accelerator(kwargs_handlers=[DDP] if tuned else [])
    torch.manual_seed(0)
    task = make_task(TrainConfig(model=model_name, image_size=IMAGE_SIZE))
    loader = torch.utils.data.DataLoader(task.train, BATCH // accelerator.num_processes, shuffle=True, drop_last=True)
    model = timm.create_model(model_name, in_chans=1, num_classes=10)
    fused = True if tuned else None
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=fused
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    every = LOG_EVERY[model_name]
    with Path(out if accelerator.is_main_process else os.devnull).open("w", buffering=1) as records:
        while True:
            start = time.perf_counter()
            for number, (images, labels) in enumerate(loader, 1):
                if tuned:
                    images = images.to(memory_format=torch.channels_last)
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                if number % every == 0:
                    now = time.perf_counter()
                    speed = every * BATCH / (now - start)
                    records.write(json.dumps({"kind": "step", "examples_per_second": speed}) + "\n")
                    start = now


class Program:
    """A program on its processes, which runs in its turns only. It writes a record of its speed every few steps."""

    def __init__(self, processes: int, arguments: Sequence[str], records: Path, log: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
        environment |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
        command = [sys.executable, *(CPU2 if processes == 2 else ()), *arguments]
        self.records, self.log = records, log
        with log.open("wb") as output:
            self.process = psutil.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._all():
            process.kill()
        self.process.wait()

    def begin(self) -> None:
        """Let it start, find its memory and compile its step; then it waits for its turn."""
        self._run_until(TURN)
        self._stop()

    def turn(self) -> float:
        """Examples per second, from records whose steps all lie in this turn: the first has steps before it."""
        before = len(self._speeds())
        for process in self._all():
            process.resume()
        self._run_until(before + 1 + TURN)
        self._stop()
        return statistics.harmonic_mean(self._speeds()[before + 1 : before + 1 + TURN])

    def wait_for_first_record(self) -> float:
        """Seconds from the command on."""
        self._run_until(1)
        return time.time() - self.process.create_time()

    def _run_until(self, count: int) -> None:
        while len(self._speeds()) < count:
            if self.process.poll() is not None:
                raise SystemExit(f"{' '.join(self.process.args)} failed:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def _stop(self) -> None:
        for process in self._all():
            process.suspend()

    def _all(self) -> list[psutil.Process]:
        if not self.process.is_running():
            return []
        return [self.process, *self.process.children(recursive=True)]

    def _speeds(self) -> list[float]:
        records = read_records(self.records)
        return [record["examples_per_second"] for record in records if record["kind"] == "step"]


def bare(model_name: str, processes: int, folder: Path, *options: str) -> Program:
    out = folder / f"bare{''.join(options)}-{processes}.jsonl"
    return Program(
        processes, [__file__, "--models", model_name, "--bare", str(out), *options], out, out.with_suffix(".log")
    )


def tuned(model_name: str, processes: int, folder: Path) -> Program:
    return bare(model_name, processes, folder, "--tuned")


def ours(model_name: str, processes: int, folder: Path, *more: str, method: str = "binmask") -> Program:
    """With all logging on: W&B offline, metrics.jsonl, a record every few steps. The masks learn all the time."""
    name = f"{method}-{model_name}-{processes}{''.join(more)}"
    options = [
        f"--run_root={folder}",
        f"--name={name}",
        f"--model={model_name}",
        f"--image_size={IMAGE_SIZE}",
        f"--batch_size={BATCH}",
        f"--method={method}",
        "--warmup=0",
        "--wandb_mode=offline",
        *(more or ("--epochs=1000000", f"--log_every={LOG_EVERY[model_name]}")),
    ]
    return Program(processes, ["launch/train.py", *options], folder / name / "metrics.jsonl", folder / f"{name}.log")


def dense(model_name: str, processes: int, folder: Path) -> Program:
    return ours(model_name, processes, folder, method="dense")


def seconds_to_first_step(model_name: str, processes: int, folder: Path) -> float:
    with ours(model_name, processes, folder, "--epochs=1", "--log_every=1") as program:
        return program.wait_for_first_record()


def seconds_for_a_checkpoint(folder: Path) -> dict[str, float]:
    """Of resnet18 with SGD: save, load, and its bytes; the same bytes by safetensors alone for comparison."""
    model = timm.create_model("resnet18", num_classes=10)
    binmask = binmask_dist.patch(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), lam=1e-6, epochs=1)
    binmask.set_epoch(0)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    binmask.step()
    path = folder / "checkpoint"
    binmask_dist.save_checkpoint(path, binmask)
    size = sum(file.stat().st_size for file in path.glob("*"))
    content = torch.zeros(size, dtype=torch.uint8)
    actions = {
        "save": lambda: binmask_dist.save_checkpoint(path, binmask),
        "load": lambda: binmask_dist.load_checkpoint(path, binmask),
        "plain": lambda: save_file({"all": content}, folder / "plain.safetensors"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(5):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - start)
    return {**{name: statistics.median(values) for name, values in seconds.items()}, "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(LOG_EVERY), default=list(LOG_EVERY), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=10, help=f"{FEWEST} or more (default 10)")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--tuned", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < FEWEST:
        parser.error(f"--rounds must be {FEWEST} or more: with fewer there is no interval")
    if arguments.bare:
        bare_loop(arguments.models[0], arguments.bare, arguments.tuned)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; batch {BATCH}, {IMAGE_SIZE} px")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model_name in arguments.models:
            compare(model_name, arguments.rounds, folder)
        print_checkpoint(seconds_for_a_checkpoint(folder))


PROGRAMS = {"bare": bare, "tuned": tuned, "dense": dense, "ours": ours}


def speeds(model_name: str, rounds: int, folder: Path) -> list[dict[tuple[str, int], float]]:
    """Examples per second of each program on one process and on two, in every round."""
    with ExitStack() as stack:
        programs = {}
        starts = [(kind, processes) for processes in (1, 2) for kind in PROGRAMS]
        for kind, processes in tqdm(starts, desc=f"{model_name}: starting"):
            program = stack.enter_context(PROGRAMS[kind](model_name, processes, folder))
            program.begin()
            programs[kind, processes] = program
        turns = tqdm(range(rounds), desc=f"{model_name}: rounds")
        return [{key: program.turn() for key, program in programs.items()} for _ in turns]


def compare(model_name: str, rounds: int, folder: Path) -> None:
    rows = speeds(model_name, rounds, folder)

    def of(kind: str, processes: int) -> list[float]:
        return [row[kind, processes] for row in rows]

    def scaling(kind: str) -> list[float]:
        return [two / one for two, one in zip(of(kind, 2), of(kind, 1), strict=True)]

    columns = ("two / one", "ours over it: one", "two", "two / one")
    print(f"\n{model_name:<15}{'one, ex/s':>10}{'two, ex/s':>10}" + "".join(f"{column:>24}" for column in columns))
    for kind in PROGRAMS:
        shown = f"{kind:<15}" + "".join(f"{statistics.median(of(kind, n)):>10.0f}" for n in (1, 2))
        compared = [Interval.of(scaling(kind))]
        if kind != "ours":
            compared += [ratios(of("ours", n), of(kind, n)) for n in (1, 2)]
            compared += [ratios(scaling("ours"), scaling(kind))]
        print(shown + "".join(f"{interval!s:>24}" for interval in compared))
    starts = [seconds_to_first_step(model_name, n, folder) for n in (1, 2)]
    print("first step after {:.1f} s on one process, {:.1f} s on two".format(*starts), flush=True)


def print_checkpoint(of: dict[str, float]) -> None:
    print(
        f"checkpoint of resnet18: {of['bytes'] / 2**20:.0f} MiB, saved in {of['save']:.2f} s, "
        f"loaded in {of['load']:.2f} s; the same bytes by safetensors alone {of['plain']:.2f} s"
    )


if __name__ == "__main__":
    main()
