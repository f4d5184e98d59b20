"""The weights' optimizer by its name, and its learning rate as a function of the step alone."""

import difflib
import inspect
import math
from collections.abc import Callable
from typing import Any

import timm.optim
import torch
from torch import nn
from torch.optim import Optimizer

from binmask_dist.training.config import TrainConfig
from binmask_dist.training.tasks.base import RunError, did_you_mean

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def make_optimizer(model: nn.Module, config: TrainConfig, fused: bool = False) -> Optimizer:
    """A class of torch.optim, spelt as torch does (SGD), or a name in timm's factory (sgd).

    `fused`: in torch's fused form, if there is one and optimizer_args do not ask for another.
    """
    torch_names = [name for name in torch.optim.__all__ if name not in ("Optimizer", "SparseAdam")]
    timm_names = timm.optim.list_optimizers()
    if config.optimizer == "adahessian":
        raise RunError("the optimizer 'adahessian' needs second derivatives, which are not computed here; take adamw")
    try:
        if config.optimizer in torch_names:
            made_by = getattr(torch.optim, config.optimizer)
            _check_arguments(config, made_by)
            groups = timm.optim.param_groups_weight_decay(model, config.weight_decay)
            arguments = _arguments(config, made_by, fused)
            if config.optimizer in ("SGD", "RMSprop"):
                arguments.setdefault("momentum", config.momentum)
            return made_by(groups, lr=config.lr, **arguments)
        if config.optimizer in timm_names:
            made_by = timm.optim.get_optimizer_class(config.optimizer, bind_defaults=False)
            _check_arguments(config, made_by, timm.optim.create_optimizer_v2)
            return timm.optim.create_optimizer_v2(
                model,
                config.optimizer,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                **_arguments(config, made_by, fused),
            )
    except (AssertionError, IndexError, TypeError, ValueError) as error:
        given = f" with optimizer_args {config.optimizer_args}" if config.optimizer_args else ""
        raise RunError(f"the optimizer {config.optimizer!r} cannot be made{given}: {error}") from error
    known = [*torch_names, *map(str, timm_names)]
    near = difflib.get_close_matches(config.optimizer, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "see timm.optim.list_optimizers() and torch.optim"
    raise RunError(f"no optimizer is called {config.optimizer!r}; {hint}")


def _arguments(config: TrainConfig, made_by: Any, fused: bool) -> dict[str, Any]:
    own = config.optimizer_args
    return {"fused": True, **own} if fused and made_by in FUSED and "foreach" not in own else dict(own)


def _check_arguments(config: TrainConfig, *takers: Callable) -> None:
    known = {name for taker in takers for name in inspect.signature(taker).parameters}
    for name in config.optimizer_args:
        if name in ("lr", "weight_decay"):  # which groups of weights have already
            raise RunError(f"optimizer_args: {name} is a key of its own; give it as --{name}")
        if name not in known:
            hint = did_you_mean(name, sorted(known))
            raise RunError(f"optimizer_args: the optimizer {config.optimizer!r} takes no '{name}'{hint}")


def learning_rate(config: TrainConfig, epoch: float) -> float:
    """Of the weights, `epoch` passes over the data after the start: resuming needs no scheduler's state."""
    if epoch >= config.epochs:
        return _cosine(config.finetune_lr, 0.0, (epoch - config.epochs) / config.finetune_epochs)
    if epoch < config.lr_warmup_epochs:
        return config.lr * epoch / config.lr_warmup_epochs
    if config.schedule == "constant":
        return config.lr
    return _cosine(
        config.lr, config.lr_final, (epoch - config.lr_warmup_epochs) / (config.epochs - config.lr_warmup_epochs)
    )


def _cosine(initial: float, final: float, done: float) -> float:
    return final + (initial - final) * (1 + math.cos(math.pi * done)) / 2
