"""Masks of zeros and ones that a rule changes now and then, in place of learning.

    p = W * b, and W is zero wherever b is

A weight that is off has no value of its own, so p is all there is to keep beside b.
"""

from typing import Any

import torch
from torch import Tensor

from binmask_dist.baselines.base import Method, signs
from binmask_dist.method.algorithm import mask
from binmask_dist.method.gradients import scale

Row = tuple[Tensor, dict[str, Any]]  # a masked weight and its state, which may not be in the optimizer's yet


class HardMasks(Method):
    state_keys = ("latent", "flips")

    def first_mask(self, param: Tensor) -> Tensor:
        return torch.ones_like(param, dtype=torch.bool, requires_grad=False)

    def replaces_update(self, rows: list[Row], step: int) -> bool:
        """Whether the masks were changed in place of an update of the weights; p.grad is the dense g."""
        return False

    def after_update(self, rows: list[Row], step: int) -> None:
        """Change the masks, if it is time to."""

    def new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        keep = self.first_mask(param)
        off = keep.numel() - int(torch.count_nonzero(keep))
        return {"latent": signs(keep), "flips": torch.tensor([0, off], device=param.device)}

    def take_step(self) -> None:
        clip = self.clip_coefficient()
        if clip is None:
            return
        step, frozen = self.count_step(), self.numbers["frozen"]
        rows: list[Row] = []
        for param, group in self.weights():
            state = self.state.get(param, {})
            rows.append((param, state if "latent" in state else self.new_state(param, group)))
        if frozen or not self.replaces_update(rows, step):
            for param, state in rows:
                param.grad.mul_(mask(state["latent"]))  # type: ignore[union-attr]
            scale([param.grad for param in self.params_with_grad()], clip)
            self.inner.step()
            if not frozen:
                self.after_update(rows, step)
        for param, state in rows:
            param.mul_(mask(state["latent"]))
            self.state[param].update(state)  # U starts its own state only where it finds none: ours comes after it
