"""Records as a run would make them, and what the trackers have made of them."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS = 40
STEPS_PER_EPOCH = 10
LAYERS = ("conv1.weight", "layers.0.conv.weight", "fc.weight")


def make_records(steps: int = STEPS) -> list[dict[str, Any]]:
    """One for every second step and for every epoch, the last of which fine-tunes."""
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        epoch = (step - 1) // STEPS_PER_EPOCH
        if step % 2 == 0:
            numbers = {"loss": 2 / step, "lr": 0.1 / step, "mask_lr": 0.01, "lam": 1e-5, "grad_norm": None}
            records.append({"kind": "step", "step": step, "epoch": step / 10, **numbers, "examples_per_second": 900.0})
        if step % STEPS_PER_EPOCH == 0:
            records.append(epoch_record(epoch, step, "train" if step < steps else "fine-tune"))
    return records


def epoch_record(epoch: int, step: int, phase: str) -> dict[str, Any]:
    counts = [0] * 64
    counts[10], counts[50] = 100 * epoch, 1000 - 100 * epoch
    return {
        "kind": "epoch",
        "phase": phase,
        "epoch": epoch,
        "step": step,
        "train_loss": 1 / (epoch + 1),
        "test_loss": 1.5 / (epoch + 1),
        "test_accuracy": 1 - 0.5 / (epoch + 1),
        "test_examples": 360,
        "sparsity": epoch / 10,
        "layer_sparsity": {name: epoch / 10 + index / 100 for index, name in enumerate(LAYERS)},
        "on_to_off": 120,
        "off_to_on": 20,
        "returns": 20,
        "latent_histogram": {"counts": counts, "edges": [index / 32 - 1 for index in range(65)]},
        "near_zero": 7,
        "near_zero_fraction": 0.007,
        "mask_lr": 0.01,
        "lam": 1e-5,
        "frozen": phase == "fine-tune",
        "skipped_steps": 0,
        "peak_rss_bytes": 10**9,
        "seconds": 1.5 * step,
    }


def read_wandb(folder: Path) -> dict[str, list[Any]]:
    """What W&B's own file in a run folder holds: kind of record -> protobuf messages."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service closes the file after `finish` has returned
    (path,) = folder.glob("wandb/*run-*/*.wandb")
    found: dict[str, list[Any]] = {}
    for content in _leveldb_records(path.read_bytes()):
        record = Record.FromString(content)
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """One dict per call of `run.log`, without the entries that W&B adds."""
    rows = []
    for row in read_wandb(folder).get("history", []):
        values: dict[str, Any] = {}
        for item in row.item:
            key, *rest = item.nested_key or [item.key]
            if rest:
                values.setdefault(key, {})[rest[0]] = json.loads(item.value_json)
            else:
                values[key] = json.loads(item.value_json)
        rows.append({key: value for key, value in values.items() if not key.startswith("_")})
    return rows


def _leveldb_records(content: bytes) -> Iterator[bytes]:
    """The log format of LevelDB: blocks of 32 kB, in which records lie whole or in parts."""
    block, position, parts = 2**15, 7, b""
    while position + 7 <= len(content):
        left = block - position % block
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def service_process() -> Any:
    """W&B's service of this process."""
    import psutil

    (service,) = (child for child in psutil.Process().children() if child.name().startswith("wandb-core"))
    return service


def main(folder: Path, signal_name: str) -> None:
    """A run whose W&B service gets a signal halfway."""
    import signal
    import time

    from accelerate import Accelerator

    from binmask_dist.training import tracking
    from binmask_dist.training.config import TrainConfig

    tracking.FINISH_LIMIT = 3.0
    tracked = tracking.Tracking(folder, TrainConfig(wandb_mode="offline"), Accelerator(cpu=True), None)
    records = make_records()
    for index, record in enumerate(records):
        if index == len(records) // 2:
            while tracked.followers[0].waiting.qsize():
                time.sleep(0.05)
            service_process().send_signal(getattr(signal, signal_name))
        tracked.log(record)
        time.sleep(0.01)
    start = time.perf_counter()
    tracked.finish({"sparsity": 0.9})
    print(json.dumps({"finish_seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
