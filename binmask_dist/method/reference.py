"""Algorithm 1 written as the paper prints it, with autograd: slow, plain, and what `BinMask` is compared with.

Weights and latents are separate leaves, the mask is a straight-through function, the penalty is in the loss.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer


class Quantise(torch.autograd.Function):
    """q(x) = 1 if x >= 0 else 0, whose gradient is taken to be the identity's."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor) -> Tensor:
        return (latent >= 0).to(latent.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Adam:
    """Adam for one tensor, arranged like torch.optim.Adam, with a square root that is rounded correctly."""

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.betas, self.eps = betas, eps
        self.step = 0
        self.m: Any = 0.0
        self.v: Any = 0.0

    def __call__(self, latent: Tensor, grad: Tensor, rate: float) -> Tensor:
        beta1, beta2 = self.betas
        self.step += 1
        self.m = self.m * beta1 + grad * (1 - beta1)
        self.v = self.v * beta2 + grad * grad * (1 - beta2)
        root = self.v.double().sqrt().float()
        denominator = root / math.sqrt(1 - beta2**self.step) + self.eps
        return latent - self.m * (rate / (1 - beta1**self.step)) / denominator


class Reference:
    """Trains a model of its own (a copy of the given one) by Algorithm 1."""

    def __init__(
        self,
        model: nn.Module,
        masked: list[str],
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        *,
        lam: float,
        epochs: int,
        alpha0: float = 0.3,
        alpha1: float = 1.0,
        mask_lr: float = 1e-3,
        mask_lr_final: float = 1e-5,
        warmup: float = 0.1,
        adam: Callable[[], Callable[[Tensor, Tensor, float], Tensor]] = Adam,
        inputs: Sequence[str] = (),  # those of `masked` that are input masks: W is one, and no weight of U
        input_lam: float | None = None,
        input_alpha0: float = 0.02,
        gamma: float = 0.9,
    ) -> None:
        self.model = model
        self.weights = dict(model.named_parameters())
        self.optimizer = make_optimizer([w for name, w in self.weights.items() if name not in inputs])  # U
        starts = {name: input_alpha0 if name in inputs else alpha0 for name in masked}
        self.latents = {name: torch.full_like(self.weights[name], starts[name]).requires_grad_() for name in masked}
        self.adam = {name: adam() for name in masked}
        self.lam = {name: input_lam if name in inputs and input_lam is not None else lam for name in masked}
        self.epochs, self.alpha1 = epochs, alpha1
        self.smoothed = {name: torch.zeros_like(self.weights[name]) for name in inputs}
        self.gamma = gamma
        self.eta0, self.eta1 = mask_lr, mask_lr_final
        self.waiting = round(warmup * epochs)
        self.flips = [0, 0]

    def products(self) -> dict[str, Tensor]:
        """W * b for masked weights, W for the others."""
        masks = {name: Quantise.apply(latent) for name, latent in self.latents.items()}
        return {name: w * masks[name] if name in masks else w for name, w in self.weights.items()}

    def masks(self) -> dict[str, Tensor]:
        return {name: latent.detach() >= 0 for name, latent in self.latents.items()}

    def step(self, epoch: int, loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> Tensor:
        """One inner iteration. `loss_of` evaluates the model with the given parameters."""
        self.optimizer.zero_grad()
        b = {name: Quantise.apply(latent) for name, latent in self.latents.items()}
        for name, smoothed in self.smoothed.items():
            self.smoothed[name] = self.gamma * smoothed + (1 - self.gamma) * b[name].detach()
        products = {name: w * b[name] if name in b else w for name, w in self.weights.items()}
        loss = loss_of(self.model, products)
        penalty = sum(self.lam[name] / 2 * (mask * mask).sum() for name, mask in b.items())
        gradients = torch.autograd.grad(loss + penalty, list(self.latents.values()), retain_graph=True)
        loss.backward()
        for latent in self.latents.values():
            latent.grad = None
        self.optimizer.step()
        if epoch >= self.waiting:
            self._learn(epoch, dict(zip(self.latents, gradients, strict=True)))
        return loss.detach()

    @torch.no_grad()
    def _learn(self, epoch: int, gradients: dict[str, Tensor]) -> None:
        # the schedule line of Algorithm 1 with eta_0 and eta_1 in the places that the text gives them
        last = self.epochs - self.waiting - 1
        fraction = (epoch - self.waiting) / last if last > 0 else 0.0
        rate = self.eta1 + (self.eta0 - self.eta1) / 2 * (math.cos(fraction * math.pi) + 1)
        for name, latent in self.latents.items():
            before = latent >= 0
            moved = self.adam[name](latent, gradients[name], rate)
            latent.copy_(moved.clamp(-self.alpha1, self.alpha1))
            after = latent >= 0
            self.flips[0] += int((before & ~after).sum())
            self.flips[1] += int((~before & after).sum())


def evaluate(model: nn.Module, parameters: dict[str, Tensor], *inputs: Tensor) -> Tensor:
    """The model's output with the given parameters."""
    return functional_call(model, parameters, inputs)
