"""The training job, top to bottom: `main` makes the Accelerator, `train` does the work."""

import math
import time
from typing import Any

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from binmask_dist import BinMask, make_accelerator, patch
from binmask_dist.engines.accelerator import engine_from_environment
from binmask_dist.training import report
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.data import load_images
from binmask_dist.training.progress import Progress
from binmask_dist.training.run_folder import RunFolder


def main(config: TrainConfig) -> None:
    accelerator = make_accelerator()
    train(config, accelerator)
    accelerator.end_training()


def train(config: TrainConfig, accelerator: Accelerator) -> None:
    """Train, save and report, in a new run folder."""
    set_seed(config.seed)
    data = load_images(config.image_size)
    batch_size = examples_per_process(config.batch_size, accelerator.num_processes, len(data.train))
    train_loader = DataLoader(data.train, batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(data.test, batch_size)
    model = timm.create_model(config.model, in_chans=data.channels, num_classes=data.classes)
    binmask = mask(model, config)
    folder = RunFolder.create(config, accelerator)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, binmask, train_loader, test_loader)

    progress = Progress(config.epochs, config.epochs * len(train_loader), accelerator)
    flips = dict.fromkeys(("on_to_off", "off_to_on", "returns"), 0)
    records = []
    start = time.perf_counter()
    for epoch in range(config.epochs):
        binmask.set_epoch(epoch)
        train_loss = train_epoch(model, optimizer, train_loader, epoch, config, accelerator, progress)
        before, flips = flips, flips_so_far(binmask)
        record = {
            "epoch": epoch,
            "train_loss": train_loss,
            **evaluate(model, test_loader, accelerator),
            "sparsity": binmask.sparsity(),
            "layer_sparsity": binmask.layer_sparsity(),
            **{key: flips[key] - before[key] for key in flips},
            "mask_lr": mask_rate(binmask),
            "seconds": time.perf_counter() - start,
        }
        records.append(record)
        folder.add_metrics(record)
        progress.epoch(record)
    progress.close()
    finish(folder, model, records, accelerator)


def examples_per_process(batch_size: int, processes: int, examples: int) -> int:
    if batch_size % processes:
        raise SystemExit(f"error: batch_size {batch_size} cannot be shared equally by {processes} processes")
    if batch_size > examples:
        raise SystemExit(f"error: batch_size {batch_size} is more than the {examples} examples there are")
    return batch_size // processes


def mask(model: nn.Module, config: TrainConfig) -> BinMask:
    optimizer = SGD(
        model.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=True
    )
    return patch(
        model,
        optimizer,
        lam=config.lam,
        epochs=config.epochs,
        targets=config.targets,
        exclude=config.exclude,
        warmup=config.warmup,
        mask_lr=config.mask_lr,
        mask_lr_final=config.mask_lr_final,
        alpha0=config.alpha0,
    )


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader,
    epoch: int,
    config: TrainConfig,
    accelerator: Accelerator,
    progress: Progress,
) -> float:
    """One pass over the training data; the mean loss over all processes."""
    model.train()
    total = torch.zeros((), device=accelerator.device)
    for step, (images, labels) in enumerate(loader, start=epoch * len(loader)):
        rate = cosine(config.lr, step / (config.epochs * len(loader)))
        for group in optimizer.param_groups:
            group["lr"] = rate  # from the step alone, so resuming needs no scheduler state
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        progress.step()
    return float(accelerator.reduce(total, "mean")) / len(loader)


def cosine(initial: float, done: float) -> float:
    """From `initial` to zero as `done` goes from zero to one."""
    return initial * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, accelerator: Accelerator) -> dict[str, Any]:
    """Loss and accuracy, with every example counted once however many processes share them."""
    model.eval()
    for buffer in model.buffers():
        broadcast(buffer)  # as DDP does: elsewhere processes keep running statistics of their own, and one set is saved
    losses, hits = [], []
    for images, labels in loader:
        logits = model(images)
        loss, hit = F.cross_entropy(logits, labels, reduction="none"), logits.argmax(dim=-1) == labels
        # it drops what Accelerate repeated to give every process the same number of examples
        loss, hit = accelerator.gather_for_metrics((loss, hit))
        losses.append(loss)
        hits.append(hit)
    correct = torch.cat(hits)
    return {
        "test_loss": float(torch.cat(losses).mean()),
        "test_accuracy": float(correct.double().mean()),
        "test_correct": int(correct.sum()),
        "test_examples": len(correct),
    }


def flips_so_far(binmask: BinMask) -> dict[str, int]:
    flips = binmask.flips()
    return {"on_to_off": flips.on_to_off, "off_to_on": flips.off_to_on, "returns": flips.returns}


def mask_rate(binmask: BinMask) -> float:
    """The masks' learning rate; zero while they do not learn."""
    group = binmask.masked_groups[0]
    return group["mask_lr"] if group["learning"] else 0.0


def finish(folder: RunFolder, model: nn.Module, records: list[dict[str, Any]], accelerator: Accelerator) -> None:
    """Save the model, then report on what the saved file holds."""
    last = records[-1]
    path = folder.save_model(model)
    if not accelerator.is_main_process:
        return
    result = {
        **{key: last[key] for key in ("test_accuracy", "test_correct", "test_examples", "test_loss", "seconds")},
        **report.saved_figures(path, last["layer_sparsity"]),
        "engine": engine_from_environment(),
        "mixed_precision": accelerator.mixed_precision,
        "processes": accelerator.num_processes,
    }
    folder.write_json("result.json", result)
    report.plot(records, folder.path / "sparsity.png")
    print(report.table(result, folder.path), flush=True)
