"""The kinds of problems that can be trained on. `make_task` imports only the one that is asked for."""

import importlib

from binmask_dist.training.config import TrainConfig
from binmask_dist.training.tasks.base import RunError, Task

TASKS = {
    "image": ("image", "ImageClassification"),
    "text": ("text", "TextClassification"),
    "lm": ("language", "LanguageModelling"),
    "tabular": ("tabular", "TableClassification"),
}


def make_task(config: TrainConfig) -> Task:
    """The task that was asked for, with its data opened and checked; raises RunError if they cannot be used."""
    sparse = config.task == "tabular" and config.dataset.endswith(".npz")
    if (config.validation_fraction or config.split_by_seed) and not sparse:
        raise RunError("validation_fraction and split_by_seed are for the tabular task on a .npz file")
    module, name = ("sparse_table", "SparseTableClassification") if sparse else TASKS[config.task]
    task: Task = getattr(importlib.import_module(f"{__name__}.{module}"), name)(config)
    if config.metric and config.metric not in task.metrics:
        raise RunError(f"metric '{config.metric}' is not measured here; there is {', '.join(task.metrics)}")
    return task
