"""What a run is told: one flat dataclass, from YAML and the command line."""

import difflib
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, get_args, get_origin

import jsonargparse

from binmask_dist.method.algorithm import warmup_epochs


def option(default: Any, text: str, section: str = "") -> Any:
    return field(default=default, metadata={"help": text, "section": section})


@dataclass(frozen=True)
class TrainConfig:
    """The defaults are the job of `make train`: scikit-learn's digits, under a minute on two cores."""

    name: str = option("", "name of the run folder; empty: the model and the time of the start", section="the run")
    run_root: str = option("runs", "folder that holds the run folders")
    seed: int = option(0, "seed of the weights, the order of the data and everything else that is random")
    resume: Literal["never", "must", "auto"] = option(
        "never", "--resume goes on with an interrupted run; --resume auto does so if there is one, and starts it if not"
    )
    checkpoint_every: int = option(0, "steps between checkpoints; 0: at the end of every epoch")
    keep_checkpoints: int = option(2, "older checkpoints are removed")
    on_nan: Literal["stop", "skip"] = option(
        "stop", "what to do when the loss is NaN or inf; a step whose gradients are not finite is always left out"
    )

    task: Literal["image", "text", "lm", "tabular"] = option(
        "image", "classification of images, texts or table rows, or causal language modelling (lm)", section="the data"
    )
    dataset: str = option(
        "digits", "digits, a name on the Hugging Face hub, a file (csv, json, parquet, ...), or a folder"
    )
    dataset_config: str = option("", "which configuration of a hub data set")
    train_split: str = option("train", "split to train on")
    test_split: str = option("", "split or file to test on; empty: found, or a part of the training split")
    test_fraction: float = option(0.2, "how much of the training split is held out if there is no other")
    validation_fraction: float = option(
        0.0, "npz tables: how much is held out for early stopping, so that the test data are used once, at the end"
    )
    split_by_seed: bool = option(False, "npz tables: hold out other rows for each seed, not the same for all")
    input_columns: tuple[str, ...] = option((), "columns with the input; empty: found")
    label_column: str = option("", "column with the class; empty: found")
    streaming: bool = option(False, "read the training data as it comes, for what does not fit on the disk")
    steps_per_epoch: int = option(0, "most steps in an epoch; needed with streaming; 0: all training data")
    shuffle_buffer: int = option(10_000, "with streaming: examples among which the next is chosen at random")
    image_size: int = option(
        16, "images are resized to this many pixels, both ways; for its pretrained models, timm may cut off their edges"
    )
    channels_last: bool = option(True, "lay images out with the channels last in memory, as convolutions like them")
    augment: str = option("", "none if empty; flip, crop, or one of timm's, such as rand-m9-mstd0.5")
    max_length: int = option(128, "tokens per text, or per block of a language model")
    workers: int = option(0, "processes that load data, for each training process")

    model: str = option("test_resnet", "any timm name, or a transformers name or local folder", section="the model")
    pretrained: bool = option(False, "start from the model's pretrained weights")
    model_args: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "further arguments of timm.create_model, or entries of the model's config", "section": ""},
    )
    tokenizer: str = option("", "transformers name or folder of the tokenizer; empty: the model's")
    compile: bool = option(False, "torch.compile the model")

    epochs: int = option(30, "passes over the training data", section="the weights")
    batch_size: int = option(64, "examples per step, over all processes together, accumulation included")
    accumulation: int = option(1, "parts in which a process takes its share of a batch")
    optimizer: str = option("sgd", "name in timm's factory (sgd, adamw, lion, ...) or in torch.optim (SGD, ...)")
    optimizer_args: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "further arguments of the optimizer", "section": ""}
    )
    lr: float = option(0.05, "learning rate of the weights after its warm-up")
    lr_final: float = option(0.0, "learning rate of the weights at the end of the cosine")
    lr_warmup_epochs: float = option(0.0, "epochs in which the learning rate of the weights rises from zero")
    schedule: Literal["cosine", "constant"] = option(
        "cosine", "how the learning rate of the weights goes on from there"
    )
    momentum: float = option(0.9, "momentum of the weights, for optimizers that have it")
    weight_decay: float = option(5e-4, "weight decay; biases and norms have none")
    clip: float = option(0.0, "largest norm of the gradient; 0: no clipping")
    label_smoothing: float = option(0.0, "part of a label that is spread over all classes")
    ema_decay: float = option(0.0, "evaluate and save a moving average of the weights; 0: the weights; 0.999, say")
    mixed_precision: Literal["", "fp32", "fp16", "bf16"] = option("", "empty: what accelerate launch was told")
    patience: int = option(
        0,
        "stop after so many epochs without a better metric, and keep the best; 0: never. The best is chosen on the "
        "test data, whose closing figure is then too good, unless validation_fraction holds others out",
    )
    metric: str = option("", "what patience watches: loss, accuracy, auc; empty: the task's first")

    method: Literal[
        "binmask", "dense", "probmask", "l1", "l2", "dropout", "magnitude", "rigl", "hard_concrete", "logistic"
    ] = option("binmask", "what makes the model sparse or regular; see docs/methods.md", section="the masks")
    lam: float = option(
        2e-5, "penalty per weight that is on: larger is sparser. Coefficient of l1 and l2, probability of dropout"
    )
    target_sparsity: float | None = option(
        None, "fraction of masks that are off at the end: binmask steers lam; probmask, magnitude and rigl need it"
    )
    mask_interval: int = option(100, "magnitude and rigl: steps between changes of the masks")
    mask_samples: int = option(1, "probmask and hard_concrete: masks that are drawn for each batch")
    mask_lr: float = option(3e-2, "learning rate of the masks after the warm-up")
    mask_lr_final: float = option(1e-4, "learning rate of the masks in the last epoch; a cosine in between")
    warmup: float = option(0.1, "fraction of the epochs before the masks learn")
    alpha0: float = option(0.3, "where latents start")
    targets: str | tuple[str, ...] = option("auto", "weights to mask: auto, a regex, or a list of names")
    exclude: str | tuple[str, ...] = option((), "weights not to mask: a regex or a list of names, checked first")
    finetune_epochs: int = option(0, "epochs with fixed masks after the others")
    finetune_lr: float = option(0.01, "learning rate at the start of these; falls to zero as a cosine")
    batch_statistics: bool = option(
        False, "before these, also measure with each batch's own statistics in batch normalisation, not running ones"
    )

    log_every: int = option(10, "steps between records of loss, rates and speed", section="what is logged")
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = option(("wandb",), "beside metrics.jsonl; [] for none")
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = option(
        "auto", "auto: online if somebody is logged in, otherwise offline"
    )
    project: str = option("binmask_dist", "W&B project")
    group: str = option("", "W&B group; empty: the configuration without its seed")
    tags: tuple[str, ...] = option((), "W&B tags, beside the task and the model")

    def __post_init__(self) -> None:
        for key in ("image_size", "max_length", "epochs", "batch_size", "accumulation", "lr", "log_every"):
            _check(getattr(self, key) > 0, f"{key} must be above zero, not {getattr(self, key)}")
        rates = ("lam", "mask_lr", "mask_lr_final", "lr_final", "finetune_lr", "weight_decay", "clip")
        numbers = ("seed", "workers", "patience", "lr_warmup_epochs", "finetune_epochs", "steps_per_epoch")
        for key in (*rates, *numbers, "checkpoint_every"):
            _check(getattr(self, key) >= 0, f"{key} must not be below zero, but it is {getattr(self, key)}")
        for key in ("warmup", "label_smoothing", "ema_decay", "validation_fraction", "momentum"):
            _check(0 <= getattr(self, key) < 1, f"{key} must be from 0 to below 1, not {getattr(self, key)}")
        _check(
            self.lr_warmup_epochs <= self.epochs,
            f"lr_warmup_epochs is {self.lr_warmup_epochs:g}, more than the {self.epochs} epochs there are",
        )
        _check(self.shuffle_buffer > 0, f"shuffle_buffer must be above zero, not {self.shuffle_buffer}")
        _check(0 < self.test_fraction < 1, f"test_fraction must be between 0 and 1, not {self.test_fraction}")
        _check(self.keep_checkpoints >= 1, "keep_checkpoints must be at least 1, or there is nothing to resume from")
        target = self.target_sparsity
        _check(target is None or 0 < target < 1, f"target_sparsity must be between 0 and 1, not {target}")
        held_out = self.test_fraction + self.validation_fraction
        _check(held_out < 1, f"test_fraction and validation_fraction leave nothing to train on: they are {held_out:g}")
        _check(
            self.finetune_epochs > 0 or not self.batch_statistics,
            "batch_statistics are measured before fine-tuning; give finetune_epochs",
        )
        self._check_method()
        _check(
            self.task != "lm" or self.max_length > 1,
            "max_length must be at least 2 for lm: a block of one token has none to predict",
        )
        _check(
            not self.streaming or self.steps_per_epoch > 0, "streaming needs steps_per_epoch, the length of an epoch"
        )

    def _check_method(self) -> None:
        method, target = self.method, self.target_sparsity
        if method in ("probmask", "magnitude", "rigl"):
            _check(target is not None, f"method {method} needs target_sparsity, the fraction of weights to do without")
        elif method != "binmask":
            _check(target is None, f"method {method} has no target_sparsity; leave it out")
        is_steered = method == "binmask" and target is not None
        _check(not is_steered or self.lam > 0, "target_sparsity steers lam, which must start above zero")
        _check(
            not is_steered or self.epochs - warmup_epochs(self.warmup, self.epochs) > 1,
            "target_sparsity is made exact in the last epoch, and masks must have learnt in one before that; give less "
            "warmup or more epochs, into which steps_per_epoch cuts the data",
        )
        _check(
            method == "rigl" or target is None or not self.patience,
            "patience goes back to an epoch of any sparsity, and target_sparsity is reached at the end; leave one out",
        )
        _check(method != "dropout" or self.lam < 1, f"lam is the probability of dropout, below 1, not {self.lam}")
        for key in ("mask_interval", "mask_samples"):
            _check(getattr(self, key) > 0, f"{key} must be above zero, not {getattr(self, key)}")
        if self.mask_samples > 1:
            _check(method in ("probmask", "hard_concrete"), f"method {method} draws no masks; leave out mask_samples")
            _check(self.accumulation == 1, "more than one of mask_samples cannot be had with accumulation")
            _check(self.mixed_precision != "fp16", "more than one of mask_samples cannot be had with fp16; take bf16")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


class _Parser(jsonargparse.ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Leave with one sentence, which names the nearest key if a key is unknown."""
        unknown = re.search(r"unrecognized arguments: --([^\s=]+)|Option '([^']+)' is not accepted", message)
        if unknown:
            key = unknown[1] or unknown[2]
            near = difflib.get_close_matches(key, [action.dest for action in self._actions], n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else "--help lists the keys."
            message = f"unknown key '{key}': {hint}"
        # a file that is not YAML would be printed whole
        self.exit(2, f"{self.prog}: error: {textwrap.shorten(message, 500, placeholder=' ...')}\n")


def parse_config(args: Sequence[str] | None = None) -> TrainConfig:
    description = "Train a model whose weights are masked by BinMask."
    return parse_options(TrainConfig, "launch/train.py", description, args)


def parse_options(kind: type[Any], script: str, description: str, args: Sequence[str] | None) -> Any:
    """Read `--config some.yaml` and `--key value` or `--key=value`; what stands further right wins."""
    parser = _Parser(
        prog=script,
        usage=f"accelerate launch {script} [--config FILE.yaml] [--key value | --key=value ...]",
        description=description,
        allow_abbrev=False,  # --epoch would be taken for --epochs, and a typo for another key
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below")
    section: Any = parser
    for key in fields(kind):
        if key.metadata["section"]:
            section = parser.add_argument_group(key.metadata["section"])
        default = getattr(kind, key.name, {})  # a dict has no default, but a factory
        bare: Any = {"nargs": "?", "const": "must"} if key.name == "resume" else {}
        if key.type is bool:
            bare = {"nargs": "?", "const": True}
        # one word without brackets is a tuple of one
        type_ = key.type | get_args(key.type)[0] if get_origin(key.type) is tuple else key.type
        section.add_argument(f"--{key.name}", type=type_, default=default, help=key.metadata["help"], **bare)
    may_be_null = [f"--{key.name}" for key in fields(kind) if type(None) in get_args(key.type)]
    as_yaml = {f"{key}=None": f"{key}=null" for key in may_be_null}  # as `wandb agent` writes a null
    values = parser.parse_args([as_yaml.get(word, word) for word in (sys.argv[1:] if args is None else args)]).as_dict()
    for key in fields(kind):
        if get_origin(key.type) is tuple and isinstance(values[key.name], str):
            values[key.name] = (values[key.name],)
    try:
        return kind(**{key.name: values[key.name] for key in fields(kind)})
    except ValueError as error:
        parser.error(str(error))
