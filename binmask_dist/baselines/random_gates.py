"""Random masks: a gate m in [0, 1] for every weight, drawn anew for every pass from a score that is learnt.

    p      = W * m(score, u), u ~ U(0, 1)      # what the next forward pass sees
    grad_W = g * m                             # g = dL/dp, as any engine delivers it
    grad_s = g * W * dm/dscore + the gradient of the penalty
    W      = U(W, grad_W)
    score  = project(Adam(score, grad_s, mask_lr))

u follows from the seed and the number of the step alone: all ranks draw the same gates, and a run that goes on draws
those that it would have drawn. For evaluation, and once masks are fixed, gates are what the method makes of the scores
without chance; masks are off where such a gate is zero, and flips are counted from one evaluation to the next.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from binmask_dist.baselines.base import Method, set_mask
from binmask_dist.method.algorithm import mask
from binmask_dist.method.gradients import scale

Row = tuple[Tensor, dict[str, Any]]  # a masked weight and its state
MOST_SAMPLES = 64  # for a batch: seeds of later ones would be those of the next step
BETAS, EPS = (0.9, 0.999), 1e-8  # Adam's, for the scores


class RandomGates(Method):
    state_keys = ("weight", "score", "score_exp_avg", "score_exp_avg_sq", "gate", "latent", "flips")
    first_score: float

    # -- what a method says, element by element

    def gate(self, score: Tensor, uniform: Tensor) -> Tensor:
        raise NotImplementedError

    def gate_slope(self, score: Tensor, gate: Tensor) -> Tensor:
        """dm/dscore, for the gate that was drawn."""
        raise NotImplementedError

    def penalty_slope(self, score: Tensor) -> Tensor | float:
        return 0.0

    def project(self, scores: Sequence[Tensor]) -> None:
        """Put the scores back to where they may be."""

    def final_gates(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Without chance."""
        raise NotImplementedError

    # -- the face

    def new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        score = torch.full_like(param, self.first_score, dtype=torch.float32, requires_grad=False)
        return {
            "weight": param.detach().clone(),
            "score": score,
            "score_exp_avg": torch.zeros_like(score),
            "score_exp_avg_sq": torch.zeros_like(score),
            "gate": torch.ones_like(score),
            "latent": torch.ones_like(score),
            "flips": torch.tensor([0, 0], device=param.device),
        }

    @contextmanager
    def for_evaluation(self) -> Iterator[None]:
        rows = [] if self.numbers["frozen"] else self._rows()
        self._decide(rows)
        try:
            yield
        finally:
            for param, state in rows:
                _show(param, state["weight"], state["gate"])

    def freeze(self) -> None:
        if not self.numbers["frozen"]:
            self._decide(self._rows())
        super().freeze()

    @torch.no_grad()
    def next_sample(self) -> None:
        if self.numbers["frozen"]:
            return
        for param, state in self._rows():
            if param.grad is None:
                continue
            self._add_score_gradient(param, state)
            so_far = state.setdefault("weight_gradient", torch.zeros_like(param, requires_grad=False))
            so_far.addcmul_(param.grad, state["gate"].to(so_far.dtype))
            param.grad.zero_()
        self.numbers["mask_sample"] += 1
        self.draw(self._rows())

    # -- a step

    def take_step(self) -> None:
        frozen, rows = self.numbers["frozen"], [row for row in self._rows() if row[0].grad is not None]
        for param, state in rows:
            assert param.grad is not None
            if frozen:
                param.grad.mul_(mask(state["latent"]))
                continue
            self._add_score_gradient(param, state)
            param.grad.mul_(state["gate"])
            if "weight_gradient" in state:
                param.grad.add_(state.pop("weight_gradient"))
        gradients = [state.pop("score_gradient", None) for _, state in rows]
        clip = self.clip_coefficient(by_mask=False)
        if clip is None:
            return
        scale([param.grad for param in self.params_with_grad()], clip)
        if frozen:
            self.inner.step()
            for param, state in rows:
                param.mul_(mask(state["latent"]))
            return
        step = self.count_step()
        self._learn(rows, gradients, step)
        self._update_weights(rows)
        for group in self.masked_groups:
            group["mask_sample"] = 0
        self.draw(self._rows())

    def _add_score_gradient(self, param: Tensor, state: dict[str, Any]) -> None:
        assert param.grad is not None
        slope = self.gate_slope(state["score"], state["gate"])
        gradient = slope.mul_(param.grad).mul_(state["weight"])
        if "score_gradient" in state:
            gradient.add_(state["score_gradient"])
        state["score_gradient"] = gradient

    def _learn(self, rows: list[Row], gradients: list[Any], step: int) -> None:
        scores = [state["score"] for _, state in rows]
        if not scores:
            return
        for score, gradient in zip(scores, gradients, strict=True):
            gradient.add_(self.penalty_slope(score))
        adam(
            scores,
            gradients,
            [state["score_exp_avg"] for _, state in rows],
            [state["score_exp_avg_sq"] for _, state in rows],
            [],
            [torch.tensor(step - 2.0) for _ in rows],  # the scores learn from the second step on
            foreach=True,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=self.numbers["mask_lr"],
            weight_decay=0.0,
            eps=EPS,
            maximize=False,
        )
        self.project(scores)

    def _update_weights(self, rows: list[Row]) -> None:
        """p holds W while U updates it. What has no state yet is W itself, all gates being one."""
        for param, state in rows:
            param.data, state["weight"].data = state["weight"].data, param.data
        try:
            self.inner.step()
        finally:
            for param, state in rows:
                param.data, state["weight"].data = state["weight"].data, param.data
        for param, group in self.weights():
            if "score" not in self.state[param]:
                self.state[param].update(self.new_state(param, group))

    def draw(self, rows: list[Row]) -> None:
        """New gates, for the next pass."""
        numbers = self.numbers
        place = (numbers["mask_seed"] * 1_000_003 + numbers["mask_step"]) * MOST_SAMPLES + numbers["mask_sample"]
        generator = None
        for param, state in rows:
            generator = generator or torch.Generator(param.device).manual_seed(place)
            uniform = torch.rand(param.shape, generator=generator, device=param.device)
            state["gate"] = self.gate(state["score"], uniform)
            _show(param, state["weight"], state["gate"])

    @torch.no_grad()
    def _decide(self, rows: list[Row]) -> None:
        if not rows:
            return
        for (param, state), gate in zip(rows, self.final_gates([state["score"] for _, state in rows]), strict=True):
            set_mask(state, gate > 0)
            _show(param, state["weight"], gate)

    def _rows(self) -> list[Row]:
        params = (param for group in self.masked_groups for param in group["params"])
        return [(param, self.state[param]) for param in params if "score" in self.state.get(param, {})]


@torch.no_grad()
def _show(param: Tensor, weight: Tensor, gate: Tensor) -> None:
    torch.mul(weight, gate.to(weight.dtype), out=param)
