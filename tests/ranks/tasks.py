"""Run by torchrun on two ranks: the training command's other tasks under engines that cut weights up."""

import dataclasses
import json
import sys
from pathlib import Path

from accelerate import DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState

sys.path.insert(0, str(Path(__file__).parents[1]))

import binmask_dist
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.main import train
from ranks import work

ENGINES = {"text": "zero3", "lm": "fsdp2", "tabular": "zero2"}  # by task
ENGINES_IN_BF16 = {"tabular": "zero2", "image": "zero3"}


def main(folder: Path) -> None:
    for values in json.loads((folder / "tasks.json").read_text()):
        config = TrainConfig(**values)
        engine = (ENGINES_IN_BF16 if config.mixed_precision == "bf16" else ENGINES)[config.task]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = binmask_dist.make_accelerator(
            engine,
            mixed_precision=config.mixed_precision or None,
            dataloader_config=DataLoaderConfiguration(non_blocking=True, dispatch_batches=False),
        )
        train(dataclasses.replace(config, name=f"{config.task}-{engine}{config.mixed_precision}"), accelerator)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    work.leave()
