"""What a run is told: one flat dataclass, from YAML and the command line."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import jsonargparse


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """The defaults are the job of `make train`: scikit-learn's digits, under a minute on two cores."""

    name: str = _option("", "name of the run folder; empty: the model and the time of the start")
    run_root: str = _option("runs", "folder that holds the run folders")
    seed: int = _option(0, "seed of the weights and of the order of the data")

    model: str = _option("test_resnet", "any timm name; trained from scratch")
    image_size: int = _option(16, "images are resized to this many pixels, both ways")
    epochs: int = _option(30, "passes over the training data")
    batch_size: int = _option(64, "examples per step, over all processes together")

    lr: float = _option(0.05, "learning rate of the weights at the start; falls to zero as a cosine over the steps")
    momentum: float = _option(0.9, "Nesterov momentum of the weights")
    weight_decay: float = _option(5e-4, "weight decay, masked weights too")

    lam: float = _option(2e-5, "penalty per weight that is on: larger is sparser")
    mask_lr: float = _option(3e-2, "learning rate of the masks after the warm-up")
    mask_lr_final: float = _option(1e-4, "learning rate of the masks in the last epoch; a cosine in between")
    warmup: float = _option(0.1, "fraction of the epochs before the masks learn")
    alpha0: float = _option(0.3, "where latents start")
    targets: str | tuple[str, ...] = _option("auto", "weights to mask: auto, a regex, or a list of names")
    exclude: str | tuple[str, ...] = _option((), "weights not to mask: a regex or a list of names, checked first")

    def __post_init__(self) -> None:
        for key in ("image_size", "epochs", "batch_size", "lr"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be above zero, not {getattr(self, key)}")


class _Parser(jsonargparse.ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Leave with one sentence, which names the nearest key if a key is unknown."""
        unknown = re.search(r"unrecognized arguments: --([^\s=]+)|Option '([^']+)' is not accepted", message)
        if unknown:
            key = unknown[1] or unknown[2]
            near = difflib.get_close_matches(key, [option.name for option in fields(TrainConfig)], n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else "--help lists the keys."
            message = f"unknown key '{key}': {hint}"
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def parse_config(args: Sequence[str] | None = None) -> TrainConfig:
    """Read `--config some.yaml` and `--key value` or `--key=value`; what stands further right wins."""
    parser = _Parser(
        prog="launch/train.py",
        usage="accelerate launch launch/train.py [--config FILE.yaml] [--key value | --key=value ...]",
        description="Train a model whose weights are masked by BinMask.",
        allow_abbrev=False,  # --epoch would be taken for --epochs, and a typo for another key
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below")
    for option in fields(TrainConfig):
        parser.add_argument(f"--{option.name}", type=option.type, default=option.default, help=option.metadata["help"])
    values = parser.parse_args(args).as_dict()
    try:
        return TrainConfig(**{option.name: values[option.name] for option in fields(TrainConfig)})
    except ValueError as error:
        parser.error(str(error))
