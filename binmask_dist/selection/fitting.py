"""Training a network behind an input mask with one lam, on one process or many: what `search.py` calls."""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, is_initialized
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from binmask_dist.engines.accelerator import make_accelerator
from binmask_dist.method.input_mask import InputMask
from binmask_dist.method.optimizer import BinMask
from binmask_dist.method.patch import patch
from binmask_dist.selection.network import behind_mask, is_row_by_row
from binmask_dist.selection.rows import Rows
from binmask_dist.selection.search import Fit, undecided

Record = dict[str, Any]

CLASSIFICATION_LR = 0.1  # the paper's
REGRESSION_LR = 0.02  # gradients of squared errors have no bound, and at 0.1 their noise keeps every mask on


@contextmanager
def accelerator_beside() -> Iterator[Accelerator]:
    """One for a moment. Accelerate shares its state between all of them: the caller's own stays as it was."""
    precision = AcceleratorState().mixed_precision if is_initialized() else None
    gradients = GradientState()
    before = gradients.plugin_kwargs
    try:
        yield make_accelerator(mixed_precision=precision)
    finally:
        gradients.plugin_kwargs = before


class CannotFit(ValueError):
    """Training cannot start or go on; the text says what to do."""


@dataclass(frozen=True)
class Training:
    """Section 3.1 of the paper; the mask's part of it is Algorithm 1's defaults but for alpha0."""

    epochs: int = 100
    batch_size: int = 256
    min_batches: int = 30
    lr: float = CLASSIFICATION_LR
    lr_final: float = 1e-5
    momentum: float = 0.9
    weight_decay: float = 5e-4
    alpha0: float = 0.02
    warmup: float = 0.1
    mask_lr: float = 1e-3
    mask_lr_final: float = 1e-5

    def __post_init__(self) -> None:
        for key in ("epochs", "batch_size", "min_batches"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{key} must be a whole number, 1 or more, not {value!r}")
        for key in ("lr", "lr_final", "momentum", "weight_decay"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} must not be below zero, but it is {getattr(self, key)!r}")

    def rate(self, epoch: int) -> float:
        """Of the weights: a cosine in whole epochs, like the masks'."""
        progress = epoch / (self.epochs - 1) if self.epochs > 1 else 0.0
        return self.lr_final + (self.lr - self.lr_final) / 2 * (math.cos(progress * math.pi) + 1)


class Fitter:
    """Call it with a lam: trains a new network from the same seed, and returns the smoothed mask. Collective."""

    def __init__(
        self,
        rows: Rows,
        make_network: Callable[[], nn.Module],
        make_mask: Callable[[], InputMask],
        training: Training,
        *,
        varies: np.ndarray,  # of each mask: those of constant features learn nothing, and count as off
        regression: bool,
        outputs: int,  # of the network
        seed: int,
        verbose: bool = False,
        log: Callable[[Record], None] | None = None,
    ) -> None:
        self.rows = rows
        self.make_network = make_network
        self.make_mask = make_mask
        self.training = training
        self.varies = varies
        self.regression = regression
        self.outputs = outputs
        self.seed = seed
        self.verbose = verbose
        self.log = log
        self.steps = 0  # over all fits: the axis of what is logged

    def __call__(self, lam: float) -> Fit:
        start = time.perf_counter()
        with accelerator_beside() as accelerator:  # of each fit: it keeps what it has prepared
            device = accelerator.device
            with torch.random.fork_rng(devices=[device] if device.type != "cpu" else []), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
                torch.manual_seed(self.seed)
                smoothed = self._train(lam, accelerator)
        return Fit(lam, smoothed, time.perf_counter() - start)

    def _train(self, lam: float, accelerator: Accelerator) -> np.ndarray:
        training = self.training
        model, sparse = behind_mask(self.make_network(), self.make_mask(), self.rows.example_shape)
        merge = is_row_by_row(model)
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=training.lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            fused=True,
        )
        binmask = patch(
            model,
            optimizer,
            lam=lam,
            epochs=int(training.epochs),
            targets="inputs",
            input_alpha0=training.alpha0,
            mask_lr=training.mask_lr,
            mask_lr_final=training.mask_lr_final,
            warmup=training.warmup,
            check_finite=False,  # a loss that is not finite is found at the end of the epoch
        )
        model, prepared = accelerator.prepare(model, binmask)
        model.train()
        shown = self.verbose and accelerator.is_main_process
        for epoch in tqdm(range(training.epochs), desc=f"lam {lam:.3g}", unit="epoch", disable=not shown):
            binmask.set_epoch(epoch)
            for group in binmask.param_groups:
                group["lr"] = training.rate(epoch)
            loss = self._epoch(model, prepared, epoch, accelerator, sparse=sparse, merge=merge)
            if not math.isfinite(loss):
                raise CannotFit(f"the loss is not finite in epoch {epoch + 1} with lr {training.lr:g}; lower lr")
            if self.log is not None:
                self.log(self._record(lam, epoch, loss, self._smoothed(binmask)))
        return self._smoothed(binmask)

    def _epoch(
        self, model: nn.Module, optimizer: Any, epoch: int, accelerator: Accelerator, *, sparse: bool, merge: bool
    ) -> float:
        training = self.training
        total = torch.zeros((), device=accelerator.device)
        batches = self.rows.batches(self.seed, epoch, training.batch_size, training.min_batches, sparse, merge)
        count = 0
        least_rows = 2 if any(isinstance(module, nn.BatchNorm1d) for module in model.modules()) else 0
        for inputs, target, weight in batches:
            if len(target) < least_rows:
                raise CannotFit(
                    f"a process has {len(target)} rows of a batch of {training.batch_size}, too few for batch "
                    "normalisation; raise batch_size"
                )
            inputs, target = inputs.to(accelerator.device), target.to(accelerator.device)
            losses = self._losses(model(inputs), target)
            if weight is not None:
                losses = losses * weight.to(accelerator.device)
            # engines take the mean over processes, which may have unequal parts of the batch
            loss = losses.sum() * (self.rows.world / training.batch_size)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            count += 1
        self.steps += count
        return float(accelerator.reduce(total, "mean")) / count

    def _losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        rows = len(target)
        if self.regression and outputs.shape in ((rows, 1), (rows,)):
            return F.mse_loss(outputs.reshape(-1), target, reduction="none")
        if self.regression or outputs.shape != (rows, self.outputs):
            raise CannotFit(
                f"the network answers with shape {tuple(outputs.shape)} for {rows} rows; it must be "
                f"{(rows, self.outputs)}"
            )
        return F.cross_entropy(outputs, target, reduction="none")

    def _record(self, lam: float, epoch: int, loss: float, smoothed: np.ndarray) -> Record:
        return {
            "kind": "fit",
            "step": self.steps,
            "epoch": epoch,
            "lam": lam,
            "loss": loss,
            "selected": int((smoothed >= 0.5).sum()),
            "undecided": undecided(smoothed),
        }

    def _smoothed(self, binmask: BinMask) -> np.ndarray:
        (mask,) = binmask.smoothed_masks().values()
        return np.where(self.varies, mask.cpu().numpy().reshape(-1), np.float32(0))
