"""Hard-concrete L0 (Louizos et al., "Learning Sparse Neural Networks through L0 Regularization", ICLR 2018).

    c = sigmoid((log u - log(1 - u) + score) / beta)
    m = clip(c (zeta - gamma) + gamma, 0, 1)                         # zero and one with positive probability
    penalty = lam * sum P(m != 0), P(m != 0) = sigmoid(score - beta log(-gamma / zeta))

Without chance the gate is clip(sigmoid(score) (zeta - gamma) + gamma, 0, 1). beta, gamma and zeta are the paper's.
Every weight has a gate of its own, and lam is the price of one weight, as in BinMask.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from binmask_dist.baselines.base import Settings
from binmask_dist.baselines.random_gates import RandomGates

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
FIRST_DROP_RATE = 0.3  # the paper's for wide residual networks


def hard_concrete(score: Tensor, uniform: Tensor) -> Tensor:
    return _stretch(torch.sigmoid((torch.logit(uniform, eps=1e-7) + score) / BETA))


def probability_on(score: Tensor) -> Tensor:
    """P(m != 0)."""
    return torch.sigmoid(score - BETA * math.log(-GAMMA / ZETA))


def _stretch(concrete: Tensor) -> Tensor:
    return (concrete * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


class HardConcrete(RandomGates):
    first_score = math.log((1 - FIRST_DROP_RATE) / FIRST_DROP_RATE)

    @classmethod
    def around(cls, model: nn.Module, optimizer: Optimizer, settings: Settings, **numbers: Any) -> Self:
        return super().around(model, optimizer, settings, mask_seed=settings.seed, mask_sample=0, **numbers)

    def gate(self, score: Tensor, uniform: Tensor) -> Tensor:
        return hard_concrete(score, uniform)

    def gate_slope(self, score: Tensor, gate: Tensor) -> Tensor:
        concrete = (gate - GAMMA) / (ZETA - GAMMA)
        return (concrete * (1 - concrete) * ((ZETA - GAMMA) / BETA)).mul_((gate > 0) & (gate < 1))

    def penalty_slope(self, score: Tensor) -> Tensor:
        on = probability_on(score)
        return on * (1 - on) * self.numbers["lam"]

    def final_gates(self, scores: Sequence[Tensor]) -> list[Tensor]:
        return [_stretch(score.sigmoid()) for score in scores]
