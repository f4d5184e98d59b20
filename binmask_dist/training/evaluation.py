"""Metrics over the test data, with every example counted once however many processes share them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from binmask_dist.training.tasks.base import Task


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, loader: DataLoader, accelerator: Accelerator, part: str = "test"
) -> dict[str, float | int]:
    """The task's metrics, under names that start with the part's: test_accuracy."""
    model.eval()
    for buffer in model.buffers():
        broadcast(buffer)  # processes have running statistics of their own, and the main one's are saved
    batches = []
    for batch in loader:
        # it drops what Accelerate repeated to give every process the same number of examples
        batches.append(accelerator.gather_for_metrics(task.measure(model, batch)))
    rows = {key: torch.cat([rows[key] for rows in batches]).cpu() for key in batches[0]}
    return {f"{part}_{key}": value for key, value in task.summarise(rows).items()}


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Inside the block batch normalisation has no running statistics, and uses those of the batch it is given."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    running = [(norm.running_mean, norm.running_var) for norm in norms]
    for norm in norms:
        norm.running_mean = norm.running_var = None
    try:
        yield
    finally:
        for norm, (mean, variance) in zip(norms, running, strict=True):
            norm.running_mean, norm.running_var = mean, variance
