"""The command, top to bottom."""

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from binmask_dist.engines.accelerator import make_accelerator
from binmask_dist.selection import outputs
from binmask_dist.selection.config import SelectConfig
from binmask_dist.selection.fitting import CLASSIFICATION_LR, REGRESSION_LR, CannotFit, Training
from binmask_dist.selection.problem import Problem
from binmask_dist.selection.table import Table, read_table
from binmask_dist.training.environment import environment
from binmask_dist.training.metrics_file import jsonable
from binmask_dist.training.mistakes import made_or_told, told_in_a_sentence
from binmask_dist.training.run_folder import RunFolder
from binmask_dist.training.tasks.base import RunError
from binmask_dist.training.tracking import Tracking


@record  # so that the launcher shows the error of the process that failed first
def main(config: SelectConfig) -> None:
    accelerator = made_or_told(make_accelerator)
    with told_in_a_sentence(accelerator):
        select(config, accelerator)
    accelerator.end_training()


def select(config: SelectConfig, accelerator: Accelerator) -> Path:
    """Choose features and write what was chosen to a new folder, which is returned."""
    if not config.data:
        raise RunError("give --data, a file with a table")
    with accelerator.main_process_first():  # the others find what `datasets` has made of the file
        table = read_table(config.data, config.target, config.ignore_columns)
    problem, training = prepare(config, table)
    settings: Any = replace(config, group=config.group or Path(config.data).stem)  # has the keys that a run needs
    with RunFolder.open(settings, accelerator) as folder:
        folder.add_environment(environment())
        tracking = Tracking(folder.path, settings, accelerator, None)
        try:
            results = search(config, problem, training, table, accelerator, tracking, folder)
        except RunError:
            tracking.finish({}, exit_code=1)
            raise
        tracking.finish({"selections": results})
        accelerator.print(outputs.summary(results), flush=True)
        accelerator.print(f"features.csv, result.json and plots are in {folder.path}", flush=True)
        return folder.path


def prepare(config: SelectConfig, table: Table) -> tuple[Problem, Training]:
    """What can be checked before anything is trained."""
    try:
        problem = Problem(
            table.x,
            table.y,
            task=config.task,
            class_weight=config.class_weight or None,
            groups=table.groups,
            input_shape=config.input_shape or None,
            scale=config.scale,
        )
        for count in config.counts:
            problem.check_count(count)
        settings = {key.name: getattr(config, key.name) for key in fields(Training)}
        if config.lr is None:
            settings["lr"] = REGRESSION_LR if problem.regression else CLASSIFICATION_LR
        return problem, Training(**settings)
    except ValueError as error:
        raise RunError(str(error)) from error


def search(
    config: SelectConfig,
    problem: Problem,
    training: Training,
    table: Table,
    accelerator: Accelerator,
    tracking: Tracking,
    folder: RunFolder,
) -> list[dict[str, Any]]:
    """All counts that were asked for, from one set of fits."""
    try:
        finder = problem.search(
            accelerator,
            training,
            network=network_of(config),
            start=config.lam,
            max_steps=config.max_steps,
            seed=config.seed,
            verbose=sys.stderr.isatty(),
            log=tracking.log,
        )
        selections = [problem.select(finder, count) for count in config.counts or (None,)]
    except CannotFit as error:
        raise RunError(str(error)) from error
    results = [outputs.describe(selection, problem, table.names) for selection in selections]
    for result in results:
        numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
        tracking.log({"kind": "selection", "step": finder.fit.steps, **numbers})  # type: ignore[attr-defined]
    if accelerator.is_main_process:
        outputs.write_csv(folder.path / "features.csv", selections[-1], problem, table.names)
        outputs.draw(folder.path, selections, problem)
    folder.write_json("result.json", jsonable({"processes": accelerator.num_processes, "selections": results}))
    return results


def network_of(config: SelectConfig) -> Callable[[int, int], nn.Module] | None:
    """A function of the numbers of inputs and outputs; None: the default, which needs no import."""
    if config.network == "mlp_tanh":
        return None
    if config.network == "lenet5_bn" and len(config.input_shape) != 3:
        raise RunError("lenet5_bn takes images; give --input_shape, [1, 28, 28], say")

    def make(inputs: int, outputs: int) -> nn.Module:
        import timm

        import binmask_dist.networks  # noqa: F401, registers the names

        if config.network == "mlp_bn":
            return timm.create_model("mlp_bn", num_classes=outputs, in_features=inputs)
        channels, *size = config.input_shape
        return timm.create_model("lenet5_bn", num_classes=outputs, in_chans=channels, img_size=tuple(size))

    return make
