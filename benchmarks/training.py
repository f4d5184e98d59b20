"""launch/train.py against the same loop written bare with Accelerate and without masks, in one run.

Every round starts each of them once, on one process and on two; the ratios are medians over rounds. The networks are
that of the command's own example, the smallest there is, and one of the paper's. The command keeps freed memory and
lays images out with their channels last, which a bare loop does not: `tuned` is the bare loop that does both. Also:
seconds from the command to the first step, and seconds for a checkpoint.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import binmask_dist

ROOT = Path(__file__).parent.parent
BATCH, IMAGE_SIZE = 64, 32
EPOCHS = {"test_resnet": 12, "wide_resnet32": 3}  # some ten seconds or more of each
NOT_MEASURED = 1  # epochs at the start, in which memory is found and steps are compiled
CPU2 = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml", "--main_process_port", "0")


def bare_loop(model_name: str, out: str, tuned: bool) -> None:
    """What one would write without binmask_dist: the same data, network, optimizer and batches."""
    from binmask_dist.training.config import TrainConfig
    from binmask_dist.training.heap import keep_freed_memory
    from binmask_dist.training.tasks import make_task

    if tuned:
        keep_freed_memory()
    accelerator = binmask_dist.make_accelerator()  # a plain Accelerator would run two processes that do not talk
    torch.manual_seed(0)
    task = make_task(TrainConfig(model=model_name, image_size=IMAGE_SIZE))
    loader = torch.utils.data.DataLoader(task.train, BATCH // accelerator.num_processes, shuffle=True, drop_last=True)
    model = timm.create_model(model_name, in_chans=1, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    speeds = []
    for epoch in range(EPOCHS[model_name]):
        start = time.perf_counter()
        for images, labels in loader:
            if tuned:
                images = images.to(memory_format=torch.channels_last)
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        if epoch >= NOT_MEASURED:
            speeds.append(len(loader) * BATCH / (time.perf_counter() - start))
    if accelerator.is_main_process:
        Path(out).write_text(json.dumps(statistics.median(speeds)))


def launch(processes: int, *arguments: str, until: Path | None = None) -> float:
    """Run it to its end. Returns the seconds until it ended, or until it had written something to a file."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
    command = [sys.executable, *(CPU2 if processes == 2 else ()), *arguments]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        while until and process.poll() is None and not (until.exists() and until.stat().st_size):
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        if process.wait():
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{log.read().decode()[-2000:]}")
    return seconds


def speed_bare(model_name: str, processes: int, folder: Path, *options: str) -> float:
    out = folder / "bare.json"
    launch(processes, __file__, "--models", model_name, "--bare", str(out), *options)
    return json.loads(out.read_text())


def speed_tuned(model_name: str, processes: int, folder: Path) -> float:
    return speed_bare(model_name, processes, folder, "--tuned")


def speed_ours(model_name: str, processes: int, folder: Path) -> float:
    """With all logging on: W&B offline, metrics.jsonl, a record every ten steps. The masks learn all the time."""
    epochs = f"--epochs={EPOCHS[model_name]}"
    launch(processes, "launch/train.py", *options(model_name, folder), epochs, "--wandb_mode=offline")
    records = [json.loads(line) for line in (newest(folder) / "metrics.jsonl").read_text().splitlines()]
    seconds: dict[int, list[float]] = {}  # for an example, by epoch
    for record in records:
        if record["kind"] == "step" and record["epoch"] > NOT_MEASURED:  # how many have passed
            seconds.setdefault(math.ceil(record["epoch"]), []).append(1 / record["examples_per_second"])
    return statistics.median(1 / statistics.mean(of_epoch) for of_epoch in seconds.values())


def seconds_to_first_step(model_name: str, processes: int, folder: Path) -> float:
    name = f"first-{model_name}-{processes}"
    once = ["--epochs=1", "--steps_per_epoch=1", "--log_every=1", f"--name={name}"]
    until = folder / name / "metrics.jsonl"
    return launch(processes, "launch/train.py", *options(model_name, folder), *once, until=until)


def options(model_name: str, folder: Path) -> list[str]:
    return [
        f"--run_root={folder}",
        f"--model={model_name}",
        f"--image_size={IMAGE_SIZE}",
        f"--batch_size={BATCH}",
        "--warmup=0",
    ]


def newest(folder: Path) -> Path:
    return max(folder.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime).parent


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
    parser.add_argument("--models", nargs="+", choices=list(EPOCHS), default=list(EPOCHS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--tuned", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare_loop(arguments.models[0], arguments.bare, arguments.tuned)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; batch {BATCH}, {IMAGE_SIZE} px")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model_name in arguments.models:
            compare(model_name, arguments.rounds, folder)
        print_checkpoint(seconds_for_a_checkpoint(folder))


def compare(model_name: str, rounds: int, folder: Path) -> None:
    measures = {"bare": speed_bare, "tuned": speed_tuned, "ours": speed_ours}
    rows = []
    for number in range(rounds):
        print(f"{model_name}: round {number + 1} of {rounds} ...", flush=True)
        rows.append({(kind, n): measure(model_name, n, folder) for n in (1, 2) for kind, measure in measures.items()})

    def ratio(upper: tuple[str, int], lower: tuple[str, int]) -> float:
        return statistics.median(row[upper] / row[lower] for row in rows)

    columns = (*(f"{kind}, examples/s" for kind in measures), "ours / bare", "ours / tuned", "first step, s")
    print(f"\n{model_name + ', processes':<26}" + "".join(f"{column:>18}" for column in columns))
    for n in (1, 2):
        speeds = [statistics.median(row[kind, n] for row in rows) for kind in measures]
        ratios = [ratio(("ours", n), (kind, n)) for kind in ("bare", "tuned")]
        shown = "".join(f"{speed:>18.0f}" for speed in speeds) + "".join(f"{value:>18.3f}" for value in ratios)
        print(f"{n:<26}{shown}{seconds_to_first_step(model_name, n, folder):>18.1f}")
    scaling = {kind: ratio((kind, 2), (kind, 1)) for kind in measures}
    told = ", ".join(f"{kind} {value:.3f}" for kind, value in scaling.items())
    print(
        f"two processes / one: {told}; ours over bare's {scaling['ours'] / scaling['bare']:.3f}, "
        f"over tuned's {scaling['ours'] / scaling['tuned']:.3f}\n",
        flush=True,
    )


def print_checkpoint(of: dict[str, float]) -> None:
    print(
        f"checkpoint of resnet18: {of['bytes'] / 2**20:.0f} MiB, saved in {of['save']:.2f} s, "
        f"loaded in {of['load']:.2f} s; the same bytes by safetensors alone {of['plain']:.2f} s"
    )


if __name__ == "__main__":
    main()
