"""What all methods share: their settings, and a step that changes nothing if a gradient is not finite."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from binmask_dist.method.patch import patch
from binmask_dist.method.wrapper import MaskedOptimizer


@dataclass(frozen=True)
class Settings:
    """Each method reads what it needs."""

    epochs: int
    steps: int  # of all these epochs
    lam: float = 0.0
    target_sparsity: float | None = None
    seed: int = 0
    warmup: float = 0.0
    mask_lr: float = 1e-3
    mask_lr_final: float = 1e-5
    mask_interval: int = 100
    targets: str | Sequence[str] = "auto"
    exclude: str | Sequence[str] = ()
    max_grad_norm: float | None = None

    @property
    def target(self) -> float:
        if self.target_sparsity is None:
            raise ValueError("this method needs target_sparsity, the fraction of weights that will be off")
        return self.target_sparsity


class Method(MaskedOptimizer):
    """Made by `around`, in place of `patch`. The groups of the weights it acts on carry its numbers."""

    sharded: ClassVar[bool] = False  # whether it runs where an engine cuts weights up (FSDP2, ZeRO)

    @classmethod
    def around(cls, model: nn.Module, optimizer: Optimizer, settings: Settings, **numbers: Any) -> Self:
        patched = patch(
            model,
            optimizer,
            lam=settings.lam,
            epochs=settings.epochs,
            targets=settings.targets,
            exclude=settings.exclude,
            alpha0=1.0,
            mask_lr=settings.mask_lr,
            mask_lr_final=settings.mask_lr_final,
            warmup=0.0,
            max_grad_norm=settings.max_grad_norm,
            compile=False,
        )
        method = cls(patched.inner, patched.plan, model)
        for group in method.masked_groups:
            group.update(mask_step=0, **numbers)
        return method

    @property
    def numbers(self) -> dict[str, Any]:
        """What all groups of masked weights carry alike."""
        return self.masked_groups[0]

    def count_step(self) -> int:
        """The number of the step that is being taken, from 1."""
        for group in self.masked_groups:
            group["mask_step"] += 1
        return self.numbers["mask_step"]

    def weights(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """The masked weights that have a gradient, with their groups."""
        for group in self.masked_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield param, group


def largest(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Where the `count` largest of all elements of all tensors are."""
    flat = torch.cat([score.reshape(-1) for score in scores])
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[torch.topk(flat, count, sorted=False).indices] = True
    parts = chosen.split([score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]


def set_mask(state: dict[str, Any], keep: Tensor) -> None:
    """Turn weights on where `keep` is, the others off, and count those that changed."""
    state["flips"][0] += torch.count_nonzero((state["latent"] >= 0) != keep)
    state["latent"].copy_(signs(keep))


def signs(keep: Tensor) -> Tensor:
    """The latent of a mask that something else than a latent decides: one where it is on, minus one where it is off."""
    return keep.float().mul_(2).sub_(1)
