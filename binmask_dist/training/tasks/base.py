"""What the training loop asks of a task. It knows nothing of images, texts or tables itself."""

import difflib
import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from binmask_dist.training.config import TrainConfig

Batch = Any  # what `collate` makes of examples: tensors in a tuple or dict, first dimension the examples


class RunError(Exception):
    """A run cannot start or go on; the text is one sentence that says what to do."""

    def __init__(self, text: str) -> None:
        # torch raises the error of a process that loads data anew, with the traceback there as its text
        super().__init__(text.rpartition("RunError: ")[2].rstrip())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known; empty if none is near it."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


class Task(ABC):
    """Data, model, loss and metrics of one kind of problem. Making one loads and checks the data."""

    train: Dataset | IterableDataset  # random transforms are seeded by place, see `Examples`
    test: Dataset
    validation: Dataset | None = None  # what epochs are judged by; None: the test data
    measures_training: bool = False  # whether the closing figures are also those of the training data
    collate: Callable[[list], Batch] | None = None  # None: torch's default
    metrics: tuple[str, ...]  # what can be watched by early stopping
    training_metrics: tuple[str, ...] = ()  # what `learn` measures beside the loss

    @property
    def metric(self) -> str:
        """What early stopping watches unless told otherwise."""
        return self.metrics[0]

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The model that was asked for, sized for the data."""

    @abstractmethod
    def learn(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The mean `loss` of a training batch, and the mean of each of `training_metrics`."""

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """One row per example of a test batch: what `summarise` needs, and nothing as large as the logits."""

    @abstractmethod
    def summarise(self, rows: dict[str, Tensor]) -> dict[str, float | int]:
        """The metrics, from the rows of all test examples, each of them once: loss, accuracy, ..., and examples."""

    @abstractmethod
    def save_model(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> list[Path]:
        """Write the model so that its own library loads it; returns the safetensors files."""


def seed_everything(*numbers: int) -> None:
    """Seed Python, numpy and torch by numbers such as (seed, epoch, example): a run that goes on where another was
    killed then draws what that one would have drawn, with no generator's state to be saved."""
    seed = seed_transforms(*numbers)
    if _has_devices():
        torch.manual_seed(seed)


@functools.cache
def _has_devices() -> bool:
    return torch.accelerator.is_available()  # which looks for NVIDIA's library, and takes longer than all the rest


def seed_transforms(*numbers: int) -> int:
    """The same for what is drawn on the CPU alone, and the seed: torch.manual_seed takes half a millisecond to tell all
    kinds of devices, which is too long for every example."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    return seed


class Examples(Dataset):
    """A list of examples with a random transform: what is drawn depends on seed, epoch and example only."""

    def __init__(self, source: Any, transform: Callable[[Any], Any], seed: int) -> None:
        self.source = source  # anything with len and [index]
        self.transform = transform
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:  # Accelerate calls it, from its loader's own set_epoch
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        seed_transforms(self.seed, self.epoch, index)
        return self.transform(self.source[index])
