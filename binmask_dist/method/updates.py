"""U for the optimizers that most people use, so that the compiled step can do it in the same pass over memory.

Each update is a pure function (W, g_W, what the optimizer keeps, scalars) -> new values: the maths of torch's own
class, from which it differs by rounding only. The state stays where torch's class has it, under the same names.
Any other optimizer, and any option that is not covered here, runs as it is.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class KnownUpdate:
    function: Callable
    keys: tuple[str, ...]  # of the optimizer's state, tensors like the weight
    scalars: Callable[[dict[str, Any], float], list[float]]  # from the group and the number of the step


def sgd(weight: Tensor, grad: Tensor, scalars: Tensor) -> tuple[Tensor, ...]:
    lr, weight_decay = scalars.unbind()
    return (weight - lr * (grad + weight_decay * weight),)


def sgd_momentum(
    weight: Tensor, grad: Tensor, momentum_buffer: Tensor, scalars: Tensor, *, nesterov: bool
) -> tuple[Tensor, ...]:
    lr, weight_decay, momentum, one_minus_dampening = scalars.unbind()
    grad = grad + weight_decay * weight
    velocity = momentum * momentum_buffer.float() + one_minus_dampening * grad
    return weight - lr * (grad + momentum * velocity if nesterov else velocity), velocity


def adam(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Tensor) -> tuple[Tensor, ...]:
    """Adam and AdamW: coupled and decoupled weight decay, one of which is zero."""
    step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, scale, coupled, kept = scalars.unbind()
    grad = grad + coupled * weight
    m = beta1 * exp_avg.float() + one_minus_beta1 * grad
    v = beta2 * exp_avg_sq.float() + one_minus_beta2 * grad * grad
    return weight * kept - step_size * m / (v.sqrt() / scale + eps), m, v


def known_update(optimizer: Optimizer, group: dict[str, Any]) -> KnownUpdate | None:
    """The update of this group, or None if the optimizer must do it itself."""
    if any(group.get(option) for option in ("maximize", "amsgrad", "capturable", "differentiable")):
        return None
    if type(optimizer) is torch.optim.SGD:
        if not group["momentum"]:
            return KnownUpdate(sgd, (), _sgd_scalars)
        return KnownUpdate(_NESTEROV[bool(group["nesterov"])], ("momentum_buffer",), _momentum_scalars)
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return KnownUpdate(adam, ("exp_avg", "exp_avg_sq"), _adam_scalars)
    return None


# one object each: torch.compile keeps a graph for each function it is given
_NESTEROV = {nesterov: functools.partial(sgd_momentum, nesterov=nesterov) for nesterov in (False, True)}


def _sgd_scalars(group: dict[str, Any], step: float) -> list[float]:
    return [float(group["lr"]), group["weight_decay"]]


def _momentum_scalars(group: dict[str, Any], step: float) -> list[float]:
    return [*_sgd_scalars(group, step), group["momentum"], 1 - group["dampening"]]


def _adam_scalars(group: dict[str, Any], step: float) -> list[float]:
    lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
    decoupled = group.get("decoupled_weight_decay", False)
    coupled, kept = (0.0, 1 - lr * decay) if decoupled else (decay, 1.0)
    scale = math.sqrt(1 - beta2**step)
    # 1 - beta is taken here: in fp32 it would lose half its digits
    return [lr / (1 - beta1**step), beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], scale, coupled, kept]
