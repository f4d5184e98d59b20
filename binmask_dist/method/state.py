"""What the optimizer keeps for a masked weight, and one step of it around the user's own optimizer."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from binmask_dist.method import algorithm, kernels
from binmask_dist.method.algorithm import Scalars
from binmask_dist.method.gradients import scale
from binmask_dist.method.joining import end_to_end
from binmask_dist.method.layout import local_part, placements, runs_under_zero, sharded_like
from binmask_dist.method.updates import KnownUpdate

MASK_KEYS = ("weight", "latent", "latent_exp_avg", "latent_exp_avg_sq", "latent_step", "flips", "smoothed")


def make_state(param: Tensor, group: dict[str, Any], model: nn.Module | None) -> dict[str, Tensor]:
    """The entries of MASK_KEYS for a weight whose mask has not learnt yet; "smoothed" is for input masks alone."""
    latent = torch.full_like(param, group["alpha0"], dtype=torch.float32, requires_grad=False)
    local = local_part(latent)
    if group["from_zeros"]:
        # -alpha1 and not -alpha0, which may be 0.0 and so be on
        local[local_part(param) == 0] = -group["alpha1"]
    starts_off = int(torch.count_nonzero(local < 0))
    if runs_under_zero([group], model):
        padding = ~_real_elements(param, local, group, model)
        starts_off -= int(torch.count_nonzero(local[padding] < 0))
        local[padding] = -group["alpha1"]
    smoothed = {"smoothed": torch.zeros_like(latent)} if group.get("fixed") else {}
    return {
        "weight": torch.ones_like(param, requires_grad=False) if group.get("fixed") else param.detach().clone(),
        "latent": latent,
        "latent_exp_avg": torch.zeros_like(latent),
        "latent_exp_avg_sq": torch.zeros_like(latent),
        "latent_step": torch.zeros(()),
        "flips": sharded_like(param, torch.tensor([0, starts_off], device=local.device)),
        **smoothed,
    }


def _real_elements(param: Tensor, latent: Tensor, group: dict[str, Any], model: nn.Module | None) -> Tensor:
    """Where a ZeRO partition is not padding. A mask that is off and gets no gradient is never counted as a flip."""
    real = torch.zeros_like(latent, dtype=torch.bool)
    for place in placements([group], model).values():
        if place.holder is param:
            place.local(real).fill_(True)
    return real


def all_on(group: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether the mask is all ones because it never learnt: p is W then, and a step is the user's own."""
    if group["from_zeros"]:
        return False
    return "latent_step" not in state or state["latent_step"].item() == 0


class Step(ABC):
    """One step of those parameters of a masked group that were updated as often, around the user's optimizer."""

    def __init__(
        self,
        group: dict[str, Any],
        scalars: Scalars,
        learns: bool,
        update: KnownUpdate | None = None,  # if the step is compiled
        update_step: float = 0.0,  # which step of U this is, where it counts
    ) -> None:
        self.group = group
        self.scalars = scalars
        self.learns = learns
        self.update = update
        self.update_step = update_step
        self.params: list[Tensor] = []
        self.states: list[dict[str, Any]] = []
        self.grads: list[Any] = []

    def add(self, param: Tensor, state: dict[str, Any]) -> None:
        """`state` is the parameter's, or a new one that is not in the optimizer's yet."""
        self.params.append(param)
        self.states.append(state)
        self.grads.append(param.grad)

    @abstractmethod
    def before_inner(self) -> None:
        """What comes before the optimizer's own step."""

    @abstractmethod
    def after_inner(self) -> None:
        """What comes after it, also if it has failed."""

    def _rows(self) -> list[tuple[Tensor, ...]]:
        """(g, W, latent, its two moments) of each parameter."""
        return [(local_part(grad), *_local_state(state)) for grad, state in zip(self.grads, self.states, strict=True)]

    def _compiled_update(self) -> KnownUpdate | None:
        """U, if it is known, compiled, and has made its state in a first step of its own."""
        update = self.update
        if update is None or not all(key in state for state in self.states for key in update.keys):
            return None
        return update

    def _rows_of_update(self, update: KnownUpdate) -> list[list[Tensor]]:
        """(p, what U keeps...) of each parameter."""
        return [
            [local_part(param.detach()), *(local_part(state[key]) for key in update.keys)]
            for param, state in zip(self.params, self.states, strict=True)
        ]

    def _pass_by(self, indices: Iterable[int]) -> None:
        """U was done on these: the optimizer finds no gradient, and its own count of steps goes on."""
        for index in indices:
            self.params[index].grad = None
            if "step" in self.states[index]:
                self.states[index]["step"] += 1

    def _give_gradients_back(self) -> None:
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def _multiply(self, indices: Sequence[int]) -> None:
        """p = W * b."""
        rows = []
        for index in indices:
            weight, latent, *_ = _local_state(self.states[index])
            rows.append((local_part(self.params[index].detach()), weight, latent))
        kernels.product_(rows, self.group["compile"])

    def _count(self, flips: list[Tensor | None]) -> None:
        """Note that the latents were updated, and how many masks flipped in each parameter."""
        steps = [state["latent_step"] for state in self.states]
        together = end_to_end(steps, movable=True)
        torch._foreach_add_(steps if together is None else [together], 1)
        # an empty shard has no count
        counted = [(state, count) for state, count in zip(self.states, flips, strict=True) if count is not None]
        if not counted:
            return
        totals, counts = [local_part(state["flips"]) for state, _ in counted], [count for _, count in counted]
        together = end_to_end(totals, self._owns_memory())
        if together is None:
            torch._foreach_add_([total[0] for total in totals], counts)
        else:
            together.view(-1, 2)[:, 0] += torch.stack(counts)

    def _owns_memory(self) -> bool:
        """Not where DTensors are: their state gives out views of its memory, and not the tensors that it keeps."""
        return not any(isinstance(param, DTensor) for param in self.params)


class MaskedStep(Step):
    """Of masked weights. Between its two halves p holds W, and its gradient is g_W.

    Where U is known, the first half can do everything; p has no gradient then, and the optimizer passes it by.
    """

    exchanged: Sequence[int] = ()  # the weights of which p holds W

    def before_inner(self) -> None:
        rows = self._rows()
        for param, state, (_, weight, *_) in zip(self.params, self.states, rows, strict=True):
            if all_on(self.group, state):  # W has been p so far
                weight.copy_(local_part(param))
        flips = self._one_pass(rows)
        left = [index for index, count in enumerate(flips) if count is None]
        self._pass_by(index for index, count in enumerate(flips) if count is not None)
        if not self.learns:
            kernels.mask_gradient_([(row[0], row[2]) for row in rows], self.scalars, self.group["compile"])
        elif left:
            left_rows = [rows[index] for index in left]
            counts = kernels.learn_(left_rows, self.scalars, self.group["compile"], self._owns_memory())
            for index, count in zip(left, counts, strict=True):
                flips[index] = count
        self._exchange(left)
        self.exchanged = left
        if self.learns:
            self._count(flips)

    def after_inner(self) -> None:
        exchanged, self.exchanged = self.exchanged, ()
        self._exchange(exchanged)
        self._multiply(exchanged)
        self._give_gradients_back()

    def _one_pass(self, rows: list[tuple[Tensor, ...]]) -> list[Tensor | None]:
        """Do U and the product as well, if that can be compiled.

        Returns how many masks flipped in each weight; None for each of which nothing was done.
        """
        update = self._compiled_update()
        if update is None or not self.learns:
            return [None] * len(rows)
        wider = [(*row, *more) for row, more in zip(rows, self._rows_of_update(update), strict=True)]
        return kernels.learn_and_update_(
            update.function, wider, self.scalars, update.scalars(self.group, self.update_step)
        )

    def _exchange(self, indices: Sequence[int]) -> None:
        """Swap the memory of p and W, so that U updates W in place without a copy of either."""
        for index in indices:
            param, weight = self.params[index], self.states[index]["weight"]
            if isinstance(param, DTensor):
                # A DTensor has no setter for its data; FSDP2 keeps its own reference to the memory it gathers from.
                param._local_tensor, weight._local_tensor = weight._local_tensor, param._local_tensor
            else:
                param.data, weight.data = weight.data, param.data


class WarmupStep(Step):
    """Of weights whose masks are all on and do not learn: U alone."""

    def before_inner(self) -> None:
        done = self._one_pass()
        self._pass_by(itertools.compress(range(len(done)), done))
        scale([grad for grad, is_done in zip(self.grads, done, strict=True) if not is_done], self.scalars.clip)

    def after_inner(self) -> None:
        self._give_gradients_back()

    def _one_pass(self) -> list[bool]:
        """Do U on all weights, if it can be compiled. Returns on which it was done."""
        update = self._compiled_update()
        if update is None:
            return [False] * len(self.params)
        rows = [(local_part(grad), *more) for grad, more in zip(self.grads, self._rows_of_update(update), strict=True)]
        return kernels.update_(update.function, rows, self.scalars, update.scalars(self.group, self.update_step))


class InputStep(Step):
    """Of input masks. W stays one: without a gradient U passes p by, and p is b."""

    def before_inner(self) -> None:
        rows = self._rows()
        for param, state, (_, _, latent, *_) in zip(self.params, self.states, rows, strict=True):
            algorithm.smooth_(local_part(state["smoothed"]), latent, self.group["gamma"])
            param.grad = None
        if self.learns:
            self._count(kernels.learn_(rows, self.scalars, self.group["compile"]))

    def after_inner(self) -> None:
        self._give_gradients_back()
        if self.learns or self.group["from_zeros"]:
            self._multiply(range(len(self.params)))


def _local_state(state: dict[str, Any]) -> list[Tensor]:
    return [local_part(state[key]) for key in MASK_KEYS[:4]]
