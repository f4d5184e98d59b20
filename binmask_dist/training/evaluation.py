"""Metrics over the test data, with every example counted once however many processes share them."""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn
from torch.utils.data import DataLoader

from binmask_dist.training.tasks.base import Task


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, loader: DataLoader, accelerator: Accelerator) -> dict[str, float | int]:
    """The task's metrics, under names that start with test_."""
    model.eval()
    for buffer in model.buffers():
        broadcast(buffer)  # as DDP does: elsewhere processes keep running statistics of their own, and one set is saved
    batches = []
    for batch in loader:
        # it drops what Accelerate repeated to give every process the same number of examples
        batches.append(accelerator.gather_for_metrics(task.measure(model, batch)))
    rows = {key: torch.cat([rows[key] for rows in batches]).cpu() for key in batches[0]}
    return {f"test_{key}": value for key, value in task.summarise(rows).items()}
