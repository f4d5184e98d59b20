"""A moving average of the weights (EMA), evaluated and saved in their place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from binmask_dist import CheckpointError, MaskedOptimizer
from binmask_dist.files import replacing
from binmask_dist.method.layout import in_model, reshard

FILE = "average.safetensors"


class Average:
    """average = decay * average + (1 - decay) * parameter after every step, of what lies on this rank.

    In fp32, whatever the parameters are: 1 - decay is lost beside one in bf16.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.where = {name: in_model(name, param) for name, param in model.named_parameters()}
        self.averages = {name: part.to(torch.float32, copy=True) for name, part in self._parts().items()}

    def _parts(self) -> dict[str, Tensor]:
        """This rank's elements of the parameters themselves."""
        return {name: place.local(place.holder.detach()) for name, place in self.where.items()}

    @torch.no_grad()
    def update(self) -> None:
        parts = [part.to(torch.float32) for part in self._parts().values()]
        torch._foreach_lerp_(list(self.averages.values()), parts, 1 - self.decay)

    @contextmanager
    def applied(self, model: nn.Module, binmask: MaskedOptimizer) -> Iterator[None]:
        """The model holds the average inside the block, with today's masks: an average alone is not sparse."""
        kept = {name: part.clone() for name, part in self._parts().items()}
        self._set(self.averages, model)
        binmask.apply_masks_(model)
        try:
            yield
        finally:
            self._set(kept, model)

    def _set(self, values: dict[str, Tensor], model: nn.Module) -> None:
        reshard(model)
        for name, part in self._parts().items():
            part.copy_(values[name])

    def save(self, folder: Path, accelerator: Accelerator) -> None:
        whole = {}
        for name, place in self.where.items():
            full = place.gather(self.averages[name], torch.float32)  # collective
            if accelerator.is_main_process:
                whole[name] = full.cpu().contiguous()
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / FILE) as temporary:
                save_file(whole, temporary)

    def load(self, folder: Path) -> None:
        try:
            stored = load_file(folder / FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / FILE} is missing or damaged: {error}") from error
        ours = {(name, place.shape) for name, place in self.where.items()}
        if different := ours ^ {(name, full.shape) for name, full in stored.items()}:
            raise CheckpointError(f"{folder / FILE} is of another model: they differ in {min(different)[0]!r}")
        for name, place in self.where.items():
            self.averages[name].copy_(place.cut(stored[name].to(place.device)))
