"""What the optimizer keeps for a masked weight, and one step of it around the user's own optimizer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from binmask_dist.method import kernels
from binmask_dist.method.algorithm import Scalars
from binmask_dist.method.layout import local_part, placements, runs_under_zero, sharded_like

MASK_KEYS = ("weight", "latent", "latent_exp_avg", "latent_exp_avg_sq", "latent_step", "flips")


def make_state(param: Tensor, group: dict[str, Any], model: nn.Module | None) -> dict[str, Tensor]:
    """The entries of MASK_KEYS for a weight whose mask has not learnt yet."""
    if param.grad is not None and param.grad.is_sparse:
        raise TypeError("a masked weight has a sparse gradient; leave it out with exclude=")
    latent = torch.full_like(param, group["alpha0"], dtype=torch.float32, requires_grad=False)
    local = local_part(latent)
    if group["from_zeros"]:
        # -alpha1 and not -alpha0, which may be 0.0 and so be on
        local[local_part(param) == 0] = -group["alpha1"]
    if runs_under_zero(model):
        local[~_real_elements(param, local, group, model)] = -group["alpha1"]
    return {
        "weight": param.detach().clone(),
        "latent": latent,
        "latent_exp_avg": torch.zeros_like(latent),
        "latent_exp_avg_sq": torch.zeros_like(latent),
        "latent_step": torch.zeros(()),
        "flips": sharded_like(param, torch.zeros(2, dtype=torch.int64, device=local.device)),
    }


def _real_elements(param: Tensor, latent: Tensor, group: dict[str, Any], model: nn.Module) -> Tensor:
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


class Update:
    """One masked weight in one step. Between the two halves, p holds W and its gradient is g_W."""

    def __init__(self, param: Tensor, state: dict[str, Tensor], group: dict[str, Any], scalars: Scalars, learns: bool):
        self.param = param
        self.state = state
        self.scalars = scalars
        self.learns = learns
        self.compile = group["compile"]
        self.weight_is_stale = all_on(group, state)
        self.holds_weight = False

    def before_inner(self) -> None:
        weight, latent, exp_avg, exp_avg_sq = self._local_state()
        grad = local_part(self.param.grad)
        if self.weight_is_stale:
            weight.copy_(local_part(self.param))
        if self.learns:
            self._count(kernels.learn_((grad, weight, latent, exp_avg, exp_avg_sq), self.scalars, self.compile))
            self.state["latent_step"] += 1
        else:
            kernels.mask_gradient_((grad, latent), self.scalars, self.compile)
        self._exchange()

    def after_inner(self) -> None:
        if not self.holds_weight:  # the first half failed before it came to this weight
            return
        self._exchange()
        param = local_part(self.param.detach())
        weight, latent, _, exp_avg_sq = self._local_state()
        if self.learns:
            self._count(kernels.product_((param, weight, latent, exp_avg_sq), self.compile))
        else:
            kernels.mask_product_((param, weight, latent), self.compile)

    def _count(self, flips: Tensor | None) -> None:
        if flips is not None:
            local_part(self.state["flips"]).add_(flips)

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
        self.holds_weight = not self.holds_weight
