"""What the classification of table rows by a multi-layer perceptron shares, whatever the table is made of."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from binmask_dist.networks import MLPS
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.models import check_sizes, make_timm, save_timm
from binmask_dist.training.tasks.base import Batch, RunError
from binmask_dist.training.tasks.classification import Classification, in_precision_of


class RowClassification(Classification):
    model_args: dict[str, Any]
    scaling: Any  # of the inputs, for whoever loads the model

    def size_model(self, in_features: int) -> None:
        sizes = {"num_classes": len(self.classes.names), "in_features": in_features}
        check_sizes(self.config, **sizes)
        self.model_args = {**sizes, **self.config.model_args}

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        return model(in_precision_of(model, inputs)), labels

    def make_model(self) -> nn.Module:
        return make_timm(self.config, self.model_args)

    def save_model(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> list[Path]:
        description = {
            "architecture": self.config.model,
            "arguments": self.model_args,
            "classes": self.classes.names,
            "input": self.scaling,
        }
        return save_timm(state, folder, description)


def check_model(config: TrainConfig) -> None:
    if config.model not in MLPS:
        raise RunError(f"the tabular task takes the models {' and '.join(MLPS)}, not {config.model}")
