"""What the command is told: one flat dataclass, from YAML and the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from binmask_dist.training.config import option, parse_options


@dataclass(frozen=True)
class SelectConfig:
    """The values of section 3.1 of the paper, for networks on tables."""

    data: str = option("", "file: csv, parquet, json, svmlight, npz, mat or arff", section="the data")
    target: str = option("", "column to be predicted, by name or place (--target=-1); empty: found")
    ignore_columns: tuple[str, ...] = option((), "columns that are no features")
    task: Literal["auto", "classification", "regression"] = option("auto", "by the values of the target, if auto")
    input_shape: tuple[int, ...] = option((), "what the network takes a row as, [1, 28, 28], say; empty: flat")
    class_weight: Literal["", "balanced"] = option("", "balanced: rare classes count as much as frequent ones")
    scale: bool = option(True, "map features to [0, 1] for the network")

    n_features: int | tuple[int, ...] = option(
        (),
        "how many features; a list such as [100, 50] gives a selection for each; none: masks of 0.5 or more",
        section="the selection",
    )
    lam: float = option(1e-3, "penalty per feature; where the search for n_features starts")
    max_steps: int = option(16, "most lams that the search for one count tries")
    alpha0: float = option(0.02, "where latents start")
    warmup: float = option(0.1, "fraction of the epochs before the masks learn")
    mask_lr: float = option(1e-3, "learning rate of the masks after the warm-up")
    mask_lr_final: float = option(1e-5, "learning rate of the masks in the last epoch; a cosine in between")

    network: Literal["mlp_tanh", "mlp_bn", "lenet5_bn"] = option("mlp_tanh", "one of the paper's", section="training")
    seed: int = option(0, "seed of the weights and of the order of the rows")
    epochs: int = option(100, "passes over the rows for one lam")
    batch_size: int = option(256, "rows per step, over all processes together")
    min_batches: int = option(30, "all rows are repeated as often as it takes for so many batches in an epoch")
    lr: float | None = option(None, "learning rate of the network at the start; none given: 0.1, 0.02 for regression")
    lr_final: float = option(1e-5, "learning rate of the network in the last epoch; a cosine in between")
    momentum: float = option(0.9, "momentum of the network's SGD")
    weight_decay: float = option(5e-4, "weight decay of the network")

    name: str = option("", "name of the folder; empty: the data and the time of the start", section="what comes out")
    run_root: str = option("runs", "folder that holds the folders")
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = option((), "beside metrics.jsonl; '[wandb]', say")
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = option(
        "auto", "auto: online if somebody is logged in, otherwise offline"
    )
    project: str = option("binmask_dist", "W&B project")
    group: str = option("", "W&B group; empty: the name of the data")
    tags: tuple[str, ...] = option((), "W&B tags, beside the task and the data")

    resume = "never"  # a selection is made again from the start

    @property
    def counts(self) -> tuple[int, ...]:
        return (self.n_features,) if isinstance(self.n_features, int) else self.n_features

    @property
    def model(self) -> str:
        """What a folder without a name is called after."""
        return f"select-{Path(self.data).stem}"


def parse_select_config(args: Sequence[str] | None = None) -> SelectConfig:
    config: Any = parse_options(
        SelectConfig, "launch/select.py", "Choose features with a mask on the inputs of a network.", args
    )
    return config
