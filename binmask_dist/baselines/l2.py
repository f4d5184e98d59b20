"""L2 regularisation as weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019).

    W = U(W, g) with U's weight decay set to lam

For SGD that is the gradient of L + lam / 2 * sum W^2; AdamW subtracts lr * lam * W beside its own step.
"""

from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from binmask_dist.baselines.base import Settings
from binmask_dist.baselines.dense import Dense


class L2(Dense):
    @classmethod
    def around(cls, model: nn.Module, optimizer: Optimizer, settings: Settings, **numbers: Any) -> Self:
        method = super().around(model, optimizer, settings, **numbers)
        for group in method.masked_groups:
            if "weight_decay" not in group:
                raise ValueError(f"{type(optimizer).__name__} has no weight decay, which is what l2 sets; take another")
            group["weight_decay"] = settings.lam
        return method
