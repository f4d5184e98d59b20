"""A moving average of the weights (EMA), evaluated and saved in their place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from binmask_dist import CheckpointError, MaskedOptimizer
from binmask_dist.files import replacing
from binmask_dist.method.layout import reshard
from binmask_dist.training.tasks.base import RunError

FILE = "average.safetensors"


class Average:
    """average = decay * average + (1 - decay) * parameter after every step, in the parameters' own layout.

    In fp32, whatever the parameters are: 1 - decay is lost beside one in bf16.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.params = dict(model.named_parameters())
        if any(hasattr(param, "ds_tensor") for param in self.params.values()):
            raise RunError("ema_decay cannot be had under ZeRO-3, which keeps no parameter; use zero2, fsdp2 or ddp")
        self.averages = {name: param.detach().to(torch.float32, copy=True) for name, param in self.params.items()}

    @torch.no_grad()
    def update(self) -> None:
        params = [param.to(torch.float32) for param in self.params.values()]
        torch._foreach_lerp_(list(self.averages.values()), params, 1 - self.decay)

    @contextmanager
    def applied(self, model: nn.Module, binmask: MaskedOptimizer) -> Iterator[None]:
        """The model holds the average inside the block, with today's masks: an average alone is not sparse."""
        kept = {name: param.detach().clone() for name, param in self.params.items()}
        self._set(self.averages)
        binmask.apply_masks_(model)
        try:
            yield
        finally:
            self._set(kept)
            reshard(model)

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, param in self.params.items():
            param.copy_(values[name])

    def save(self, folder: Path, accelerator: Accelerator) -> None:
        whole = {name: _whole(value) for name, value in self.averages.items()}
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / FILE) as temporary:
                save_file(whole, temporary)

    def load(self, folder: Path) -> None:
        try:
            stored = load_file(folder / FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / FILE} is missing or damaged: {error}") from error
        if different := self.averages.keys() ^ stored.keys():
            raise CheckpointError(f"{folder / FILE} is of another model: {min(different)} is in one of them alone")
        for name, value in self.averages.items():
            full = stored[name].to(value.device)
            if isinstance(value, DTensor):
                full = distribute_tensor(full, value.device_mesh, value.placements, src_data_rank=None)
            value.copy_(full)


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.cpu().contiguous()
