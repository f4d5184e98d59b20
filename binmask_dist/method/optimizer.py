"""`BinMask`: a torch optimizer around the user's own, in whose state the masks live.

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    binmask = binmask_dist.patch(model, optimizer, lam=1e-6, epochs=300)

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

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from binmask_dist.method import algorithm, readout
from binmask_dist.method.gradients import gradient_norm, scale
from binmask_dist.method.layout import runs_under_zero
from binmask_dist.method.state import MASK_KEYS, InputStep, MaskedStep, all_on, make_state
from binmask_dist.method.targets import Plan
from binmask_dist.method.updates import known_update


@dataclass(frozen=True)
class Flips:
    """How many masks have flipped since the start, over all ranks and steps."""

    on_to_off: int
    off_to_on: int

    @property
    def returns(self) -> int:
        """Off to on, of a weight that had been on. Masks start on (alpha0 >= 0), so that is every one of them."""
        return self.off_to_on


class BinMask(Optimizer):
    """Made by `binmask_dist.patch`. An ordinary optimizer for schedulers, Accelerate and DeepSpeed."""

    inner: Optimizer
    plan: Plan
    model: nn.Module | None  # to find parameters by name in ZeRO's partitions

    def __init__(self, inner: Optimizer, plan: Plan, model: nn.Module) -> None:
        # Optimizer.__init__ would make groups and a state of its own; __setstate__ makes the hooks only.
        super().__setstate__({"inner": inner, "plan": plan, "model": model})

    # One state and one list of groups, the inner optimizer's. Engines assign them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    @property
    def masked_groups(self) -> list[dict[str, Any]]:
        """The groups of masked weights, which carry the masks' hyper-parameters."""
        return [group for group in self.param_groups if group.get("masked")]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # DCP calls by keyword: the name is contract
        self.inner.load_state_dict(state_dict)
        # torch has cast every state tensor to the parameter's dtype, and bf16 latents would not move. Under DCP
        # ids are names, so parameters are matched by their place in the groups.
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, key in zip(group["params"], saved_group["params"], strict=True):
                saved = state_dict["state"].get(key, {})
                for name in MASK_KEYS:
                    if name in saved:
                        device = "cpu" if name == "latent_step" else param.device
                        self.state[param][name] = saved[name].detach().clone().to(device)

    def __getstate__(self) -> dict[str, Any]:
        # The model is the caller's to copy or to pickle. Hooks stay behind, and so does the `step` that a scheduler
        # has put on this instance, which belongs to this one.
        return {"inner": self.inner, "plan": self.plan, "model": None}

    def __repr__(self) -> str:
        return f"BinMask({self.inner!r})"

    def set_epoch(self, epoch: int) -> None:
        """Set the masks' learning rate, and whether they learn at all, from the number of the epoch alone."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch must be a whole number from 0, not {epoch!r}")
        for group in self.masked_groups:
            group["epoch"] = epoch
            group["learning"] = epoch >= algorithm.warmup_epochs(group["warmup"], group["epochs"])
            if group["learning"]:
                group["mask_lr"] = self.mask_rate(epoch, group)

    def mask_rate(self, epoch: int, group: dict[str, Any] | None = None) -> float:
        """Learning rate of the masks in an epoch, zero in the warm-up: of one of the masked groups, or of the first."""
        group = group or self.masked_groups[0]
        waiting = algorithm.warmup_epochs(group["warmup"], group["epochs"])
        if epoch < waiting:
            return 0.0
        initial, final = group["mask_lr_initial"], group["mask_lr_final"]
        return algorithm.mask_rate(epoch, epochs=group["epochs"], waiting=waiting, initial=initial, final=final)

    def freeze(self) -> None:
        """Fix the masks, for fine-tuning: zeros stay zero under any optimizer."""
        for group in self.masked_groups:
            group["frozen"] = True

    def unfreeze(self) -> None:
        """Let the masks learn again."""
        for group in self.masked_groups:
            group["frozen"] = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._only_makes_state():
            self._make_inner_state()
        else:
            clip = self._clip_coefficient()
            if clip is None:
                return loss
            self._update(clip)
        # The inner optimizer starts its own state only where it finds none, so ours comes after its first step;
        # during the warm-up too, so that a checkpoint has the same entries whenever it is written.
        for group in self.masked_groups:
            for param in group["params"]:
                if param.grad is not None and "latent" not in self.state[param]:
                    self.state[param].update(make_state(param, group, self.model))
        return loss

    def _update(self, clip: float) -> None:
        steps = [step for group in self.masked_groups for step in self._masked_steps(group, clip)]
        masked = {id(param) for step in steps for param in step.params}
        # the others are scaled where they are masked
        scale([param.grad for param in self._params_with_grad() if id(param) not in masked], clip)
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

    def _masked_steps(self, group: dict[str, Any], clip: float) -> Iterable[MaskedStep | InputStep]:
        if group["epoch"] is None and not group["frozen"]:
            raise RuntimeError("call binmask.set_epoch(epoch) at the start of every epoch, before the first step")
        learns = group["learning"] and not group["frozen"]
        steps: dict[tuple[int, float], MaskedStep | InputStep] = {}  # one in nearly every group
        for param in group["params"]:
            state = self.state.get(param, {})
            if param.grad is not None and param.grad.is_sparse:
                raise TypeError("a masked weight has a sparse gradient; leave it out with exclude=")
            fixed = group.get("fixed", False)
            if param.grad is None or (all_on(group, state) and not learns and not fixed):
                continue
            if "latent" not in state:
                state = make_state(param, group, self.model)
            number, update_number = int(state["latent_step"]) + 1, float(state.get("step", 0)) + 1
            if (number, update_number) not in steps:
                scalars = algorithm.Scalars(
                    step=number,
                    lam=group["lam"],
                    rate=group["mask_lr"],
                    betas=tuple(group["mask_betas"]),
                    eps=group["mask_eps"],
                    alpha1=group["alpha1"],
                    clip=clip,
                )
                update = known_update(self.inner, group)
                steps[number, update_number] = (
                    InputStep(group, scalars, learns)
                    if fixed
                    else MaskedStep(group, scalars, learns, update, update_number)
                )
            steps[number, update_number].add(param, state)
        return steps.values()

    def _params_with_grad(self) -> Iterator[Tensor]:
        return (param for group in self.param_groups for param in group["params"] if param.grad is not None)

    def _only_makes_state(self) -> bool:
        """Whether DCP asks for state to be created: a step with no state, lr 0 and gradients that are zero.

        It cannot know of the latents' own rate, at which they would move.
        """
        return (
            not any(self.state.get(param) for param in self._params_with_grad())
            and all(float(group.get("lr", 1.0)) == 0.0 for group in self.param_groups)
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

    def _clip_coefficient(self) -> float | None:
        """What g_W is multiplied by, or None if a gradient is not finite and the step must change nothing."""
        groups = self.masked_groups
        limit = groups[0]["max_grad_norm"] if groups else None
        under_zero = runs_under_zero(groups, self.model)
        if limit is not None and under_zero:
            raise ValueError(
                "max_grad_norm cannot be had under DeepSpeed ZeRO, which hands over one group at a time; "
                "leave it out of patch and set gradient_clipping in the DeepSpeed config"
            )
        # ZeRO looks for what is not finite itself, before it hands over the first group
        if limit is None and (under_zero or not any(group["check_finite"] for group in groups)):
            return 1.0
        norm = gradient_norm(self.param_groups, self.state, of_masked=limit is not None)
        for group in groups:
            group["grad_norm"] = norm
        if not math.isfinite(norm):
            for group in groups:
                group["skipped_steps"] += 1
            warnings.warn("a gradient is NaN or inf: the step changed nothing (see skipped_steps)", stacklevel=3)
            return None
        return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))  # 1e-6 as in torch's clip_grad_norm_

    @property
    def skipped_steps(self) -> int:
        """How many steps changed nothing because a gradient was not finite."""
        return max((group["skipped_steps"] for group in self.masked_groups), default=0)

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients at the last step: of g_W if max_grad_norm is set, otherwise of g; None under ZeRO."""
        return next((group["grad_norm"] for group in self.masked_groups), None)

    # Collective: every rank calls.

    def sparsity(self) -> float:
        """Fraction of the masked weights that are off."""
        zeros, sizes = zip(*readout.zeros_and_sizes(self).values(), strict=True)
        return sum(zeros) / sum(sizes)

    def layer_sparsity(self) -> dict[str, float]:
        """The same for each masked weight, by name."""
        return {name: zeros / size for name, (zeros, size) in readout.zeros_and_sizes(self).items()}

    def flips(self) -> Flips:
        """Flips since the start, at every step."""
        return Flips(*readout.flip_counts(self))

    def latent_histogram(self, bins: int = 64) -> tuple[list[int], list[float]]:
        """Counts of all latents, and the edges of equal bins from -alpha1 to alpha1. Even bins have an edge at zero."""
        alpha1 = self.masked_groups[0]["alpha1"]
        edges = torch.linspace(-alpha1, alpha1, bins + 1).tolist()
        return readout.latent_histogram(self, edges), edges

    def masks(self) -> dict[str, Tensor]:
        """Name -> bool tensor, whole, on every rank."""
        return readout.masks(self)

    def smoothed_masks(self) -> dict[str, Tensor]:
        """Of the input masks: name -> fp32 tensor, whole, on every rank; zeros before the first step."""
        return readout.smoothed_masks(self)

    def apply_masks_(self, model: nn.Module) -> None:
        """Mask another copy of the model: an average of W * b over steps (EMA) is not sparse where masks flipped."""
        readout.apply_masks_(self, model)

    def check_sync(self) -> None:
        """Raise, naming the parameter and the ranks, if ranks that should agree do not."""
        readout.check_sync(self)
