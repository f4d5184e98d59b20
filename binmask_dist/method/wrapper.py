"""What every method with masks is to the world: a torch optimizer around the user's own, and the masks it can tell of.

Engines, checkpoints and the training loop speak to this face. `BinMask` is behind it, and so are the methods that it is
compared with (`binmask_dist.baselines`). A subclass says what a step does, and keeps `latent` in the state of each
masked weight: the weight is on where latent >= 0. Before there is a state, all masks are on.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from binmask_dist.method import algorithm, readout
from binmask_dist.method.gradients import gradient_norm
from binmask_dist.method.layout import parameter_names, runs_under_zero
from binmask_dist.method.targets import Plan

_in_a_step: ContextVar[bool] = ContextVar("in_a_step", default=False)


@dataclass(frozen=True)
class Flips:
    """How many masks have flipped since the start, over all ranks and steps."""

    on_to_off: int
    off_to_on: int

    @property
    def returns(self) -> int:
        """Off to on, of a weight that had been on. Masks start on (alpha0 >= 0), so that is every one of them.

        With `from_zeros` some start off. They stay off, unless the optimizer moves weights whose gradient is zero
        (Muon): then the first flip of such a weight is counted here as well.
        """
        return self.off_to_on


class MaskedOptimizer(Optimizer):
    """An ordinary optimizer for schedulers, Accelerate and DeepSpeed. Its groups are those that `patch` makes."""

    inner: Optimizer
    plan: Plan
    model: nn.Module | None  # to find parameters by name in ZeRO's partitions
    # what the method keeps in the state of a masked weight, in its own dtype
    state_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(self, inner: Optimizer, plan: Plan, model: nn.Module) -> None:
        # Optimizer.__init__ would make groups and a state of its own; __setstate__ makes the hooks only.
        self.__setstate__({"inner": inner, "plan": plan, "model": model})

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
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        params = [param[1] if isinstance(param, tuple) else param for param in params]  # of named_parameters()
        names = parameter_names(self.model, params, len(self.param_groups))
        param_group = {"param_names": names, **param_group, "params": params}
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # DCP calls by keyword: the name is contract
        saved_groups = state_dict["param_groups"]
        if [bool(group.get("masked")) for group in saved_groups] != [bool(g.get("masked")) for g in self.param_groups]:
            raise ValueError(
                "this state was not saved with these masks: its groups are masked in other places, or not at all; "
                "load it into the optimizer before patch"
            )
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            if different := set(group["param_names"]) ^ set(saved_group.get("param_names", group["param_names"])):
                raise ValueError(
                    "this state was saved with other targets or of another model: they differ in "
                    f"{min(different)!r}; patch with the same targets before loading it"
                )
        self.inner.load_state_dict(state_dict)
        # torch has cast every state tensor to the parameter's dtype, and bf16 latents would not move. Under DCP
        # ids are names, so parameters are matched by their place in the groups.
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            for param, key in zip(group["params"], saved_group["params"], strict=True):
                saved = state_dict["state"].get(key, {})
                for name in self.state_keys:
                    if name in saved:
                        device = "cpu" if name == "latent_step" else param.device
                        dtype = param.dtype if name == "weight" else saved[name].dtype  # W changes places with p
                        self.state[param][name] = saved[name].detach().clone().to(device, dtype)

    def __getstate__(self) -> dict[str, Any]:
        # The model is the caller's to copy or to pickle. Hooks stay behind, and so does the `step` that a scheduler
        # has put on this instance, which belongs to this one.
        return {"inner": self.inner, "plan": self.plan, "model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.inner.register_step_pre_hook(_refuse_to_step_alone)  # a copy comes without the hooks of the original

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def set_epoch(self, epoch: int) -> None:
        """Set the masks' learning rate, and whether they learn at all, from the number of the epoch alone."""
        if isinstance(epoch, bool) or not isinstance(epoch, Integral) or epoch < 0:
            raise ValueError(f"epoch must be a whole number from 0, not {epoch!r}")
        for group in self.masked_groups:
            group["epoch"] = int(epoch)
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

    def is_learning(self, group: dict[str, Any] | None = None) -> bool:
        """Whether masks learn now: those of one of the masked groups, or of the first."""
        group = group or self.masked_groups[0]
        return group["learning"] and not group["frozen"]

    @property
    def mask_lr(self) -> float:
        """Learning rate of the masks now; zero while they do not learn."""
        return self.masked_groups[0]["mask_lr"] if self.is_learning() else 0.0

    def freeze(self) -> None:
        """Fix the masks, for fine-tuning: zeros stay zero under any optimizer."""
        for group in self.masked_groups:
            group["frozen"] = True

    def unfreeze(self) -> None:
        """Let the masks learn again."""
        for group in self.masked_groups:
            group["frozen"] = False

    @torch.compiler.disable  # it has graphs of its own
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        token = _in_a_step.set(True)
        try:
            self.take_step()
        finally:
            _in_a_step.reset(token)
        return loss

    def take_step(self) -> None:
        """Update weights and masks from the gradients that are there."""
        raise NotImplementedError

    def new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The entries of `state_keys` for a weight that has not taken a step yet."""
        raise NotImplementedError

    def for_evaluation(self) -> AbstractContextManager[None]:
        """Inside the block the model is what it would be if training ended now. For random masks that is a change."""
        return nullcontext()

    def next_sample(self) -> None:
        """Between two passes over one batch: put new masks in the place of those that were drawn, if any were."""

    def params_with_grad(self) -> Iterator[Tensor]:
        return (param for group in self.param_groups for param in group["params"] if param.grad is not None)

    def clip_coefficient(self, by_mask: bool = True) -> float | None:
        """What g_W is multiplied by, or None if a gradient is not finite and the step must change nothing.

        `by_mask`: g_W is what the gradients are where masks are on; otherwise the gradients are g_W already.
        """
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
        norm = gradient_norm(self.param_groups, self.state, of_masked=by_mask and limit is not None)
        for group in groups:
            group["grad_norm"] = norm
        if not math.isfinite(norm):
            for group in groups:
                group["skipped_steps"] += 1
            warnings.warn("a gradient is NaN or inf: the step changed nothing (see skipped_steps)", stacklevel=4)
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

    def masks(self) -> dict[str, Tensor]:
        """Name -> bool tensor, whole, on every rank."""
        return readout.masks(self)

    def apply_masks_(self, model: nn.Module) -> None:
        """Mask a copy of the model: an average of W * b over steps (EMA) is not sparse where masks flipped.

        Under ZeRO-3 the average has to be in the model itself: parameters of a copy are empty there.
        """
        readout.apply_masks_(self, model)

    def check_sync(self) -> None:
        """Raise, naming the parameter and the ranks, if ranks that should agree do not."""
        readout.check_sync(self)


def innermost(optimizer: Any) -> Any:
    """The optimizer inside what Accelerate and DeepSpeed have put around it: a MaskedOptimizer, if there is one."""
    while not isinstance(optimizer, MaskedOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _refuse_to_step_alone(optimizer: Optimizer, *arguments: Any) -> None:
    if not _in_a_step.get():
        raise RuntimeError(
            f"this {type(optimizer).__name__} was given to patch, and by itself it would train without masks: "
            "give accelerator.prepare what patch returned, and call its step"
        )
