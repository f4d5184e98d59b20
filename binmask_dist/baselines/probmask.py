"""ProbMask (Zhou et al., "Effective Sparsification of Neural Networks with Global Sparsity Constraint", CVPR 2021).

A weight is on with probability s. In training the gate is a relaxed Bernoulli variable, with Gumbel noise:

    m = sigmoid(T * (log s - log(1 - s) + G_0 - G_1)), and G_0 - G_1 = log u - log(1 - u)
    s = clip(s' - v, 0, 1) after every step s' of Adam, with the smallest v >= 0 for which sum(s) <= density * N

over all layers together. Epoch e of E sets the temperature and the budget:

    T       = 1 / (0.97 (1 - e / E) + 0.03)
    density = 1 before 0.16 E, then k + (1 - k) (1 - (e - 0.16 E) / (0.6 E - 0.16 E))^3, and k from 0.6 E on

k = 1 - target_sparsity. All this is as in the authors' code, whose other settings are: mask_lr 6e-3 to zero, two masks
for every batch (mask_samples), gradients clipped to a norm of 3, and 20 epochs of fine-tuning with a learning rate of
1e-3. They draw the final mask from s; here it is the k * N weights with the largest s: the sparsity is as asked for.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from binmask_dist.baselines.base import Settings, largest
from binmask_dist.baselines.random_gates import RandomGates, Row

TINY = 1e-20  # keeps logarithms finite
BEGIN, END = 0.16, 0.6  # of the epochs: between them the budget falls


def temperature(epoch: int, epochs: int) -> float:
    """The factor T: the larger, the closer gates are to zero and one."""
    return 1 / (0.97 * (1 - epoch / epochs) + 0.03)


def density_at(epoch: int, epochs: int, final: float) -> float:
    begin, end = int(BEGIN * epochs), int(END * epochs)
    if epoch < begin:
        return 1.0
    if epoch >= end:
        return final
    return final + (1 - final) * (1 - (epoch - begin) / (end - begin)) ** 3


def relaxed_bernoulli(probability: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    logit = torch.log(probability + TINY) - torch.log(1 - probability + TINY)
    return torch.sigmoid(temperature * (logit + torch.logit(uniform, eps=1e-7)))


def project_to_budget_(probabilities: Sequence[Tensor], budget: float) -> None:
    """The nearest probabilities in [0, 1] whose sum is at most `budget`."""
    flat = torch.cat([tensor.view(-1) for tensor in probabilities])

    def total(shift: float) -> float:
        return float((flat - shift).clamp_(0, 1).sum(dtype=torch.float64))

    low, high = 0.0, float(flat.max())
    if total(low) <= budget:
        high = low
    while high - low > 1e-7:
        middle = (low + high) / 2
        spent = total(middle)
        low, high = (middle, high) if spent > budget else (low, middle)
        if 0 <= budget - spent < 1e-3:
            break
    for tensor in probabilities:
        tensor.sub_(high).clamp_(0, 1)  # on the side of `high` the budget is kept


class ProbMask(RandomGates):
    first_score = 1.0

    @classmethod
    def around(cls, model: nn.Module, optimizer: Optimizer, settings: Settings, **numbers: Any) -> Self:
        start = {"mask_sample": 0, "temperature": 1.0, "gate_temperature": 1.0, "density": 1.0}
        return super().around(
            model, optimizer, settings, target=settings.target, mask_seed=settings.seed, **start, **numbers
        )

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for group in self.masked_groups:
            group["temperature"] = temperature(epoch, group["epochs"])
            group["density"] = density_at(epoch, group["epochs"], 1 - group["target"])

    def gate(self, score: Tensor, uniform: Tensor) -> Tensor:
        return relaxed_bernoulli(score, uniform, self.numbers["gate_temperature"])

    def gate_slope(self, score: Tensor, gate: Tensor) -> Tensor:
        logit_slope = 1 / (score + TINY) + 1 / (1 - score + TINY)
        return logit_slope.mul_(gate * (1 - gate)).mul_(self.numbers["gate_temperature"])

    def draw(self, rows: list[Row]) -> None:
        for group in self.masked_groups:
            group["gate_temperature"] = group["temperature"]  # the slope is taken in the next epoch, perhaps
        super().draw(rows)

    def project(self, scores: Sequence[Tensor]) -> None:
        project_to_budget_(scores, self.numbers["density"] * sum(score.numel() for score in scores))

    def final_gates(self, scores: Sequence[Tensor]) -> list[Tensor]:
        elements = sum(score.numel() for score in scores)
        off = round((1 - self.numbers["density"]) * elements)
        return [chosen.float() for chosen in largest(scores, elements - off)]
