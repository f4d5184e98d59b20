"""RigL (Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020).

Each layer starts with a random mask and keeps the number of its weights. Every mask_interval steps, until t_1, in place
of an update of the weights:

    k = alpha / 2 * (1 + cos(pi t / t_1)) * n     # of the layer's n weights that are on
    drop the k with the smallest |W|
    grow the k with the largest |g| among those that are off then, from zero: one just dropped may be among them

The authors' code differs in this: a weight that is dropped and grown in the same change keeps its value there.

g = dL/dp is dense already. How many weights a layer gets follows Erdős-Rényi-Kernel: its density is proportional to
sum(shape) / prod(shape), at most one, with the density of all layers together as asked for.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from binmask_dist.baselines.base import Settings, largest, set_mask
from binmask_dist.baselines.hard_masks import HardMasks, Row

ALPHA = 0.3  # part of a layer's weights that the first change exchanges
END = 0.75  # of the steps


def erk_densities(shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, float]:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    ratios = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    dense: set[str] = set()  # layers for which the proportion would be more than one
    while True:
        budget = (1 - sparsity) * sum(sizes.values()) - sum(sizes[name] for name in dense)
        rest = sum(ratios[name] * sizes[name] for name in shapes if name not in dense)
        factor = budget / rest if rest else 0.0
        more = {name for name in shapes if name not in dense and factor * ratios[name] > 1}
        if not more:
            return {name: 1.0 if name in dense else factor * ratios[name] for name in shapes}
        dense |= more


def drop_fraction(step: int, end: int) -> float:
    return ALPHA / 2 * (1 + math.cos(math.pi * step / end))


def drop_and_grow(weight: Tensor, grad: Tensor, keep: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The weights that stay, and those that grow: `count` of them, and as many are dropped."""
    left = int(torch.count_nonzero(keep)) - count
    (stay,) = largest([torch.where(keep, weight.abs(), -1.0)], left)
    (grow,) = largest([torch.where(stay, -1.0, grad.abs())], count)
    return stay, grow


class RigL(HardMasks):
    @classmethod
    def around(cls, model: nn.Module, optimizer: Optimizer, settings: Settings, **numbers: Any) -> Self:
        times = {"end": max(1, round(END * settings.steps)), "interval": settings.mask_interval}
        method = super().around(
            model, optimizer, settings, target=settings.target, mask_seed=settings.seed, **times, **numbers
        )
        with torch.no_grad():  # the first forward pass is sparse already
            for param in method.plan.masked.values():
                param.mul_(method.first_mask(param))
        return method

    def first_mask(self, param: Tensor) -> Tensor:
        """Random, and the same whenever it is asked for."""
        names = list(self.plan.masked)
        name = next(name for group in self.masked_groups for name, one in _named(group) if one is param)
        density = erk_densities({name: one.shape for name, one in self.plan.masked.items()}, self.numbers["target"])
        generator = torch.Generator().manual_seed(self.numbers["mask_seed"] * 1_000_003 + names.index(name))
        order = torch.randperm(param.numel(), generator=generator)
        return (order < round(density[name] * param.numel())).view(param.shape).to(param.device)

    def replaces_update(self, rows: list[Row], step: int) -> bool:
        end, interval = self.numbers["end"], self.numbers["interval"]
        if step >= end or step % interval:
            return False
        for param, state in rows:
            keep = state["latent"] >= 0
            count = int(drop_fraction(step, end) * int(torch.count_nonzero(keep)))
            assert param.grad is not None
            stay, grow = drop_and_grow(param.detach(), param.grad, keep, count)
            self._forget(param, ~stay)
            set_mask(state, stay | grow)
        return True

    def _forget(self, param: Tensor, where: Tensor) -> None:
        """The value and the optimizer's memory of weights that were dropped, or grow from zero."""
        param.masked_fill_(where, 0.0)
        for key, value in self.state.get(param, {}).items():
            if key not in self.state_keys and isinstance(value, Tensor) and value.shape == param.shape:
                value.masked_fill_(where, 0.0)


def _named(group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return list(zip(group["param_names"], group["params"], strict=True))
