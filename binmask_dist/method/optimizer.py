"""`BinMask`: a torch optimizer around the user's own, in whose state the masks live.

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = binmask = binmask_dist.patch(model, optimizer, lam=1e-6, epochs=300)

The model's parameter p holds the product W * b. The state of p holds, beside what the user's optimizer keeps there:

    weight              W, in p's dtype; out of date until the masks first learn, because W is p until then
    latent              fp32, b = latent >= 0
    latent_exp_avg      fp32, Adam's first moment of the latent
    latent_exp_avg_sq   fp32, Adam's second moment
    latent_step         how many times the latent was updated
    flips               how many masks flipped since the start, and how many started off
    smoothed            fp32, input masks only: the average of b over the last steps

What a loop reads in p.grad before `step()` is g = dL/d(W * b); afterwards it may be g_W = g * b.

Nothing is kept on `self` that a step changes, and nothing about a parameter is kept before the first step:
FSDP2 and ZeRO replace the parameters, and ZeRO calls `step()` once for every group.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from binmask_dist.method import algorithm, readout, settling
from binmask_dist.method.gradients import gradient_norm, scale
from binmask_dist.method.layout import runs_under_zero
from binmask_dist.method.state import MASK_KEYS, InputStep, MaskedStep, Step, WarmupStep, all_on, make_state
from binmask_dist.method.updates import known_update
from binmask_dist.method.wrapper import MaskedOptimizer


class BinMask(MaskedOptimizer):
    """Made by `binmask_dist.patch`. An ordinary optimizer for schedulers, Accelerate and DeepSpeed."""

    state_keys = MASK_KEYS

    def set_epoch(self, epoch: int) -> None:
        before = self.masked_groups[0]["epoch"]
        super().set_epoch(epoch)
        for group in self.masked_groups:
            # after the first epoch of learning, when it is known how many steps one has
            if epoch != before and epoch == algorithm.warmup_epochs(group["warmup"], group["epochs"]) + 1:
                self._warn_of_slow_masks(group)

    def _warn_of_slow_masks(self, group: dict[str, Any]) -> None:
        states = (self.state.get(param, {}) for param in group["params"])
        steps = max((float(state.get("latent_step", 0)) for state in states), default=0.0)
        # Adam moves a latent by about its rate in a step
        reach = steps * sum(self.mask_rate(epoch, group) for epoch in range(group["epochs"]))
        if 0 < reach < group["alpha0"] and not group.get("fixed"):
            enough = 3 * group["mask_lr_initial"] * group["alpha0"] / reach
            warnings.warn(
                f"{group['epochs']} epochs of {steps:.0f} steps are too few for masks to go off: all steps together "
                f"carry a latent by {reach:.2g}, and it starts at alpha0 = {group['alpha0']:g} above zero; train "
                f"longer, or with mask_lr={enough:.1g} or more",
                stacklevel=3,
            )

    def new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return make_state(param, group, self.model)

    def take_step(self) -> None:
        if self._only_makes_state():
            self._make_inner_state()
        else:
            clip = self.clip_coefficient()
            if clip is None:
                return
            self._update(clip)
        # The inner optimizer starts its own state only where it finds none, so ours comes after its first step;
        # during the warm-up too, so that a checkpoint has the same entries whenever it is written.
        for group in self.masked_groups:
            for param in group["params"]:
                if param.grad is not None and "latent" not in self.state[param]:
                    self.state[param].update(make_state(param, group, self.model))

    def _update(self, clip: float) -> None:
        steps = [step for group in self.masked_groups for step in self._masked_steps(group, clip)]
        masked = {id(param) for step in steps for param in step.params}
        # those of masked weights are scaled in their step
        scale([param.grad for param in self.params_with_grad() if id(param) not in masked], clip)
        try:
            for step in steps:
                step.before_inner()
            self.inner.step()
        finally:
            for step in steps:
                step.after_inner()
        for step in steps:
            for param, state in zip(step.params, step.states, strict=True):
                if "latent" not in self.state[param]:
                    self.state[param].update(state)

    def _masked_steps(self, group: dict[str, Any], clip: float) -> Iterable[Step]:
        if group["epoch"] is None and not group["frozen"]:
            raise RuntimeError("call binmask.set_epoch(epoch) at the start of every epoch, before the first step")
        learns = self.is_learning(group)
        update = known_update(self.inner, group) if group["compile"] else None
        steps: dict[tuple[type[Step], int, float], Step] = {}  # one in nearly every group
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise TypeError("a masked weight has a sparse gradient; leave it out with exclude=")
            state = self.state.get(param, {})
            kind: type[Step] = MaskedStep
            if group.get("fixed"):
                kind = InputStep
            elif all_on(group, state) and not learns:
                kind = WarmupStep
            if "latent" not in state and kind is not WarmupStep:
                state = make_state(param, group, self.model)
            number = int(state.get("latent_step", 0)) + 1
            update_number = float(state.get("step", 0)) + 1 if update else 0.0  # it may lie on another device
            key = (kind, number, update_number)
            if key not in steps:
                scalars = algorithm.Scalars(
                    step=number,
                    lam=group["lam"],
                    rate=group["mask_lr"],
                    betas=tuple(group["mask_betas"]),
                    eps=group["mask_eps"],
                    alpha1=group["alpha1"],
                    clip=clip,
                )
                steps[key] = kind(group, scalars, learns, update, update_number)
            steps[key].add(param, state)
        return steps.values()

    def _only_makes_state(self) -> bool:
        """Whether DCP asks for state to be created: a step with no state, lr 0 and gradients that are zero.

        It cannot know of the latents' own rate, at which they would move. Nor does it know of ZeRO, whose ranks each
        see gradients of their own.
        """
        return (
            not any(self.state.get(param) for param in self.params_with_grad())
            and all(group.get("lr") is not None and float(group["lr"]) == 0.0 for group in self.param_groups)
            and not runs_under_zero(self.param_groups, self.model)
            and gradient_norm(self.param_groups, self.state, of_masked=False) == 0.0  # on all ranks alike
        )

    def _make_inner_state(self) -> None:
        """Let U make its state for what it updates, which input masks are not part of."""
        fixed = [param for group in self.masked_groups if group.get("fixed") for param in group["params"]]
        grads = [param.grad for param in fixed]
        for param in fixed:
            param.grad = None
        self.inner.step()
        for param, grad in zip(fixed, grads, strict=True):
            param.grad = grad

    # Collective: every rank calls.

    def settle(self, sparsity: float) -> None:
        """Put masks on or off, by the rank of their latents, until this fraction is off: for `freeze` to keep.

        Masks that have not begun to go off are left on, and there may be too few others. Under ZeRO the model follows
        with the next step.
        """
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity is a fraction of the masked weights, between 0 and 1, not {sparsity!r}")
        settling.settle(self, sparsity)

    def latent_histogram(self, bins: int = 64) -> tuple[list[int], list[float]]:
        """Counts of all latents, and the edges of equal bins from -alpha1 to alpha1. Even bins have an edge at zero."""
        alpha1 = self.masked_groups[0]["alpha1"]
        edges = torch.linspace(-alpha1, alpha1, bins + 1).tolist()
        return readout.latent_histogram(self, edges), edges

    def smoothed_masks(self) -> dict[str, Tensor]:
        """Of the input masks: name -> fp32 tensor, whole, on every rank; zeros before the first step."""
        return readout.smoothed_masks(self)
