"""Data loaders whose order depends on the seed and the epoch alone, whatever the number of processes."""

import atexit
import multiprocessing
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from binmask_dist.training.config import TrainConfig
from binmask_dist.training.tasks.base import RunError, Task


class EpochSampler(Sampler[int]):
    """A new order for every epoch, and a place in it to start from: resuming skips nothing, it starts later.

    Accelerate gives the processes consecutive batches in turn, so that a step takes the same examples on one process
    as on many.
    """

    def __init__(self, examples: int, used: int, seed: int) -> None:
        self.examples = examples
        self.used = used  # per epoch: the rest would not fill a batch
        self.seed = seed
        self.epoch = 0
        self.start = 0

    def set_position(self, epoch: int, start: int) -> None:
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return iter(torch.randperm(self.examples, generator=generator)[self.start : self.used].tolist())

    def __len__(self) -> int:
        return self.used - self.start


def examples_per_process(config: TrainConfig, processes: int) -> int:
    """Of one forward pass."""
    if config.batch_size % (processes * config.accumulation):
        raise RunError(
            f"batch_size {config.batch_size} cannot be shared equally by {processes} processes "
            f"with {config.accumulation} parts each; make it a multiple of {processes * config.accumulation}"
        )
    return config.batch_size // processes // config.accumulation


def steps_per_epoch(config: TrainConfig, task: Task) -> int:
    if isinstance(task.train, IterableDataset):
        return config.steps_per_epoch
    examples = len(task.train)  # type: ignore[arg-type]
    available = examples // config.batch_size
    if available == 0:
        raise RunError(f"batch_size {config.batch_size} is more than the {examples} examples there are")
    return min(available, config.steps_per_epoch or available)


def ignore_signals(worker: int) -> None:
    """Launchers signal whole groups of processes, and those that load data must live until the run has been saved."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def end_workers() -> None:
    """Those that an error has left behind: at exit Python asks them to end by SIGTERM, and would wait for ever."""
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch takes the end of a worker for one more error
    for process in workers:
        process.kill()


def evaluation_loader(task: Task, part: Any, config: TrainConfig, processes: int) -> DataLoader:
    """Of a data set as it is, in its order."""
    return DataLoader(part, max(examples_per_process(config, processes), 64), **_common(task, config))


def _common(task: Task, config: TrainConfig) -> dict[str, Any]:
    return {
        "collate_fn": task.collate,
        "num_workers": config.workers,
        "worker_init_fn": ignore_signals,
        "pin_memory": torch.cuda.is_available(),
    }


def make_loaders(task: Task, config: TrainConfig, processes: int) -> tuple[DataLoader, DataLoader, EpochSampler | None]:
    """For training and for testing, and the sampler of the first unless it is a stream."""
    share = examples_per_process(config, processes)
    common = _common(task, config)
    test = evaluation_loader(task, task.test, config, processes)
    if isinstance(task.train, IterableDataset):
        return DataLoader(task.train, share, drop_last=True, **common), test, None
    used = steps_per_epoch(config, task) * config.batch_size
    sampler = EpochSampler(len(task.train), used, config.seed)  # type: ignore[arg-type]
    return DataLoader(task.train, share, sampler=sampler, drop_last=True, **common), test, sampler
