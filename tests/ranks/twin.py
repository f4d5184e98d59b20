"""Algorithm 1 on whole tensors, fed with the gradients that an engine delivers: that engine's own reference.

In bf16 no single process rounds like the engine does, so what is compared is the update, given the gradient.
"""

import math

import torch
from torch import nn

from binmask_dist.method.layout import placements
from binmask_dist.method.reference import Adam
from ranks.work import MASK, make_optimizer


class Twin:
    def __init__(self, binmask, whole: dict[str, torch.Tensor], max_norm: float | None) -> None:
        self.binmask, self.max_norm = binmask, max_norm
        self.weights = nn.ParameterDict({name.replace(".", "/"): value.clone() for name, value in whole.items()})
        masked = {name for group in binmask.masked_groups for name in group["param_names"]}
        self.latents = {name: torch.full_like(whole[name], 0.3) for name in masked}
        self.adam = {name: Adam() for name in masked}
        self.optimizer = make_optimizer(self.weights)
        binmask.register_step_pre_hook(self._follow)

    def weight(self, name: str) -> nn.Parameter:
        return self.weights[name.replace(".", "/")]

    @torch.no_grad()
    def _follow(self, binmask, args, kwargs) -> None:
        gradients = {}
        called = [group for group in binmask.param_groups if group["params"]]  # ZeRO-3 empties the others
        for name, place in placements(called, binmask.model).items():
            held = place.holder is not None and place.holder.grad is not None
            local = place.local(place.holder.grad).float() if held else None
            gradients[name] = place.gather(local, torch.float32).clone()
        masks = {name: (self.latents[name] >= 0) for name in gradients if name in self.latents}
        clip = self._clip(gradients, masks)
        learning = [group for group in called if group.get("learning")]
        for name, g in gradients.items():
            self.weight(name).grad = clip * (g * masks[name] if name in masks else g)
            if name in masks and learning:
                grad_b = g * self.weight(name) + MASK["lam"] * masks[name]
                moved = self.adam[name](self.latents[name], grad_b, learning[0]["mask_lr"])
                self.latents[name] = moved.clamp(-1, 1)
        self.optimizer.param_groups[0]["lr"] = called[0]["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()  # under ZeRO a call is about one group: the others must not move

    def _clip(self, gradients, masks) -> float:
        if self.max_norm is None:
            return 1.0
        squares = [(g * masks[name] if name in masks else g).double().square().sum() for name, g in gradients.items()]
        return min(1.0, self.max_norm / (math.sqrt(sum(squares)) + 1e-6))

    def differences(self, binmask, whole: dict[str, torch.Tensor]) -> tuple[int, float]:
        """How many masks differ, and by how much the products do."""
        masks = binmask.masks()
        different = sum(int((masks[name] != (self.latents[name] >= 0)).sum()) for name in masks)
        error = 0.0
        for name, value in whole.items():
            mask = self.latents[name] >= 0 if name in self.latents else 1
            error = max(error, float((value - self.weight(name).detach() * mask).abs().max()))
        return different, error
