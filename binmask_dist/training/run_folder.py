"""The run folder: what a run was told, what it measured, and what came out.

config.json         the resolved configuration
metrics.jsonl       one record per epoch
model.safetensors   the sparse weights, under the model's own names
result.json         the figures of the closing table
sparsity.png        sparsity and accuracy over the epochs
"""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors.torch import save_file
from torch import nn

from binmask_dist.files import replacing, write_atomically
from binmask_dist.training.config import TrainConfig


class RunFolder:
    """Only the main process writes; every process may hold one and call it."""

    def __init__(self, path: Path, accelerator: Accelerator) -> None:
        self.path = path
        self.accelerator = accelerator

    @classmethod
    def create(cls, config: TrainConfig, accelerator: Accelerator) -> "RunFolder":
        """Make the folder and write config.json. An existing folder is never written over."""
        answer: list[str | None] = [None, None]  # path, error: all processes must go on or stop together
        if accelerator.is_main_process:
            path = Path(config.run_root) / (config.name or f"{config.model}-{time.strftime('%Y%m%d-%H%M%S')}")
            answer[0] = str(path)
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                answer[1] = f"{path} holds a run already; give another --name, or remove it"
            except OSError as error:
                answer[1] = f"the run folder {path} cannot be made: {error.strerror}"
        broadcast_object_list(answer)
        if answer[1]:
            raise SystemExit(f"error: {answer[1]}")
        folder = cls(Path(answer[0] or ""), accelerator)
        folder.write_json("config.json", asdict(config))
        return folder

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            write_atomically(self.path / name, json.dumps(content, indent=2) + "\n")

    def add_metrics(self, record: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a crash later in the run must not cost the records before it

    def save_model(self, model: nn.Module) -> Path:
        """Write the whole model, gathered from all processes."""
        path = self.path / "model.safetensors"
        state = self.accelerator.get_state_dict(model)  # collective
        if self.accelerator.is_main_process:
            with replacing(path) as temporary:
                save_file({name: tensor.contiguous() for name, tensor in state.items()}, temporary)
        self.accelerator.wait_for_everyone()
        return path
