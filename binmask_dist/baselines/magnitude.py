"""Gradual magnitude pruning (Zhu and Gupta, "To Prune, or Not to Prune", 2017).

    s_t = s * (1 - (1 - (t - t_0) / (t_1 - t_0))^3)    # sparsity at step t, from zero at t_0 to s at t_1
    b   = the (1 - s_t) N largest |W| of all layers together, every mask_interval steps and at t_1

t_0 is the end of the warm-up, t_1 three quarters of the way. Zhu and Gupta prune every layer to the same sparsity; one
ranking of all layers is what later work found to be better.
"""

from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from binmask_dist.baselines.base import Settings, largest, set_mask
from binmask_dist.baselines.hard_masks import HardMasks, Row

END = 0.75  # of the steps


def cubic_sparsity(step: int, start: int, end: int, target: float) -> float:
    done = min(1.0, max(0.0, (step - start) / max(1, end - start)))
    return target * (1 - (1 - done) ** 3)


class Magnitude(HardMasks):
    @classmethod
    def around(cls, model: nn.Module, optimizer: Optimizer, settings: Settings, **numbers: Any) -> Self:
        end = max(1, round(END * settings.steps))
        start = min(round(settings.warmup * settings.steps), end - 1)
        times = {"start": start, "end": end, "interval": settings.mask_interval}
        return super().around(model, optimizer, settings, target=settings.target, **times, **numbers)

    def after_update(self, rows: list[Row], step: int) -> None:
        numbers = self.numbers
        is_time = numbers["start"] < step < numbers["end"] and step % numbers["interval"] == 0
        if not (is_time or step == numbers["end"]):
            return
        sparsity = cubic_sparsity(step, numbers["start"], numbers["end"], numbers["target"])
        total = sum(param.numel() for param, _ in rows)
        masks = largest([param.detach().abs() for param, _ in rows], total - round(sparsity * total))
        for (_, state), keep in zip(rows, masks, strict=True):
            set_mask(state, keep)
