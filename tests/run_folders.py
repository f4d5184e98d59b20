"""Run folders as the training command leaves them, made up in a moment: numbers that look like a run's, and are not."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from binmask_dist.training.config import TrainConfig

LAYERS = ("conv1.weight", "layers.0.conv.weight", "layers.1.conv.weight", "fc.weight")
WEIGHTS = 10_000
STEPS_PER_EPOCH = 22


def write_run(folder: Path, epochs: int = 6, finetune_epochs: int = 2, **options: Any) -> Path:
    """`options` are keys of the configuration; a larger lam is sparser and a little worse."""
    method = options.pop("method", None)
    name = {"name": folder.name, "run_root": str(folder.parent)}
    config = asdict(TrainConfig(epochs=epochs, finetune_epochs=finetune_epochs, trackers=(), **name, **options))
    config |= {"method": method} if method else {}
    records = make_records(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "environment.json").write_text("[]\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "result.json").write_text(json.dumps(make_result(config, records), indent=2) + "\n")
    return folder


def write_sweep(folder: Path, lams: tuple[float, ...], seeds: range | tuple[int, ...], **options: Any) -> Path:
    """As a sweep lays them out: a folder for each trial."""
    for lam in lams:
        for seed in seeds:
            method = options.get("method", "binmask")
            write_run(folder / "trials" / f"{method}-{lam:g}-{seed}", lam=lam, seed=seed, **options)
    return folder


def make_records(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Two of steps and one of the epoch, for every epoch."""
    method = config.get("method", "binmask")
    random = np.random.default_rng([config["seed"], int(1e9 * config["lam"]), len(method)])
    goal = 0.0 if method == "dense" else 1 - 0.3 / (1 + 1e6 * config["lam"]) * np.exp(0.05 * random.normal())
    luck = np.random.default_rng(config["seed"]).normal()  # what trials of one seed share
    level = 0.97 - 0.02 * goal**8 - 0.01 * (method == "probmask") + 0.004 * luck + 0.001 * random.normal()
    last = config["epochs"] - 1
    before, records = 0.0, []
    for epoch in range(config["epochs"] + config["finetune_epochs"]):
        tuning = epoch > last
        progress = min(1.0, epoch / max(1, last))
        sparsity = goal * progress**0.7
        loss = 0.1 + 2 * np.exp(-5 * progress) + 0.02 * abs(random.normal()) - 0.03 * tuning
        records += [
            {
                "kind": "step",
                "step": STEPS_PER_EPOCH * epoch + step,
                "epoch": epoch + step / STEPS_PER_EPOCH,
                "loss": loss,
            }
            for step in (10, 20)
        ]
        counts = [0] * 64
        counts[10], counts[50] = round(WEIGHTS * sparsity), WEIGHTS - round(WEIGHTS * sparsity)
        accuracy = level - 0.3 * np.exp(-5 * progress) - (0 if tuning else 0.01 + 0.1 * (method == "probmask"))
        records.append(
            {
                "kind": "epoch",
                "phase": "fine-tune" if tuning else "train",
                "epoch": epoch,
                "step": STEPS_PER_EPOCH * (epoch + 1),
                "train_loss": loss,
                "test_loss": 1.3 * loss,
                "test_accuracy": accuracy,
                "test_correct": round(360 * accuracy),
                "test_examples": 360,
                "sparsity": sparsity,
                "layer_sparsity": {name: sparsity ** (1 + index) for index, name in enumerate(LAYERS)},
                "on_to_off": round(WEIGHTS * max(0, sparsity - before)) + 30 * (0 < progress < 1),
                "off_to_on": 30 * (0 < progress < 1),
                "returns": 10 * (0 < progress < 1),
                "latent_histogram": {"counts": counts, "edges": [index / 32 - 1 for index in range(65)]},
                "near_zero": 7,
                "near_zero_fraction": 0.0007,
                "mask_lr": 0.01,
                "lam": config["lam"],
                "frozen": tuning,
                "skipped_steps": 0,
                "peak_rss_bytes": 10**9,
                "seconds": 1.5 * (epoch + 1),
            }
        )
        before = sparsity
    return records


def make_result(config: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    def measured(record: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record.items() if key.startswith("test_")}

    epochs = [record for record in records if record["kind"] == "epoch"]
    sparsity = epochs[-1]["sparsity"]
    return {
        "task": config["task"],
        "model": config["model"],
        **measured(epochs[-1]),
        "before_finetuning": measured(epochs[config["epochs"] - 1]) if config["finetune_epochs"] else None,
        "sparsity": sparsity,
        "layer_sparsity": epochs[-1]["layer_sparsity"],
        "masked_weights": WEIGHTS,
        "weights_left": round(WEIGHTS * (1 - sparsity)),
        "files": ["model.safetensors"],
        "file_bytes": 4 * WEIGHTS,
        "gzip_bytes": 2 * WEIGHTS,
        "seconds": epochs[-1]["seconds"],
        "steps": epochs[-1]["step"],
        "skipped_steps": 0,
        "lam": config["lam"],
        "engine": "ddp",
        "mixed_precision": "no",
        "processes": 1,
    }
