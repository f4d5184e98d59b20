"""What the optimizer keeps for a masked weight, and one step of it around the user's own optimizer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from binmask_dist.method import kernels
from binmask_dist.method.algorithm import Scalars
from binmask_dist.method.layout import local_part, placements, runs_under_zero, sharded_like
from binmask_dist.method.updates import KnownUpdate

MASK_KEYS = ("weight", "latent", "latent_exp_avg", "latent_exp_avg_sq", "latent_step", "flips")


def make_state(param: Tensor, group: dict[str, Any], model: nn.Module | None) -> dict[str, Tensor]:
    """The entries of MASK_KEYS for a weight whose mask has not learnt yet."""
    latent = torch.full_like(param, group["alpha0"], dtype=torch.float32, requires_grad=False)
    local = local_part(latent)
    if group["from_zeros"]:
        # -alpha1 and not -alpha0, which may be 0.0 and so be on
        local[local_part(param) == 0] = -group["alpha1"]
    starts_off = int(torch.count_nonzero(local < 0))
    if runs_under_zero(model):
        padding = ~_real_elements(param, local, group, model)
        starts_off -= int(torch.count_nonzero(local[padding] < 0))
        local[padding] = -group["alpha1"]
    return {
        "weight": param.detach().clone(),
        "latent": latent,
        "latent_exp_avg": torch.zeros_like(latent),
        "latent_exp_avg_sq": torch.zeros_like(latent),
        "latent_step": torch.zeros(()),
        "flips": sharded_like(param, torch.tensor([0, starts_off], device=local.device)),
    }


def _real_elements(param: Tensor, latent: Tensor, group: dict[str, Any], model: nn.Module | None) -> Tensor:
    """Where a ZeRO partition is not padding. A mask that is off and gets no gradient is never counted as a flip."""
    real = torch.zeros_like(latent, dtype=torch.bool)
    for place in placements([group], model).values():
        if place.holder is param:
            place.local(real).fill_(True)
    return real


def all_on(group: dict[str, Any], state: dict[str, Any] | None) -> bool:
    """Whether the mask is all ones because it never learnt: p is W then, and a step is the user's own."""
    if group["from_zeros"]:
        return False
    return not state or "latent_step" not in state or state["latent_step"].item() == 0


class MaskedStep:
    """One masked weight in one step. Between the two halves p holds W, and its gradient is g_W.

    Where U is known, the first half can do everything; p has no gradient then, and the optimizer passes it by.
    """

    def __init__(
        self,
        param: Tensor,
        state: dict[str, Any],  # the parameter's, or a new one that is not in the optimizer's yet
        group: dict[str, Any],
        scalars: Scalars,
        learns: bool,
        update: KnownUpdate | None,
    ) -> None:
        self.param = param
        self.state = state
        self.group = group
        self.scalars = scalars
        self.learns = learns
        self.update = update
        self.grad = param.grad
        self.exchanged = False

    def before_inner(self) -> None:
        weight, latent, *_ = tensors = self._local_state()
        grad, compile = local_part(self.grad), self.group["compile"]
        if all_on(self.group, self.state):  # W has been p so far
            weight.copy_(local_part(self.param))
        if not self.learns:
            kernels.mask_gradient_((grad, latent), self.scalars, compile)
            self._exchange()
        elif (flips := self._fused_step((grad, *tensors))) is not None:
            self.param.grad = None
            self._count(flips)
        else:
            self._count(kernels.learn_((grad, *tensors), self.scalars, compile))
            self._exchange()
        self.state["latent_step"] += int(self.learns)

    def after_inner(self) -> None:
        self.param.grad = self.grad
        if self.exchanged:
            self._exchange()
            weight, latent, *_ = self._local_state()
            kernels.product_((local_part(self.param.detach()), weight, latent), self.group["compile"])

    def _fused_step(self, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Do U and the product as well, if U is known, compiled, and has made its state in a first step of its own.

        Returns how many masks flipped, or None if nothing was done.
        """
        if self.update is None or not self.group["compile"]:
            return None
        kept = [self.state.get(key) for key in self.update.keys]
        if any(tensor is None for tensor in kept):
            return None
        step = float(self.state["step"]) + 1 if "step" in self.state else 1.0
        scalars = self.update.scalars(self.group, step)
        tensors = (*tensors, local_part(self.param.detach()), *(local_part(tensor) for tensor in kept))
        flips = kernels.learn_and_update_(self.update.function, tensors, self.scalars, scalars)
        if flips is not None and "step" in self.state:
            self.state["step"] += 1
        return flips

    def _count(self, flips: Tensor | None) -> None:
        if flips is not None:  # an empty shard has none
            local_part(self.state["flips"])[0] += flips

    def _local_state(self) -> list[Tensor]:
        return [local_part(self.state[key]) for key in MASK_KEYS[:4]]

    def _exchange(self) -> None:
        """Swap the memory of p and W, so that U updates W in place without a copy of either."""
        param, weight = self.param, self.state["weight"]
        if isinstance(param, DTensor):
            # A DTensor has no setter for its data; FSDP2 keeps its own reference to the memory it gathers from.
            param._local_tensor, weight._local_tensor = weight._local_tensor, param._local_tensor
        else:
            param.data, weight.data = weight.data, param.data
        self.exchanged = not self.exchanged
