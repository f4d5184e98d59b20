"""What all classifiers share: labels, loss and metrics."""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from datasets import Dataset
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from binmask_dist.training.config import TrainConfig
from binmask_dist.training.data import load_data
from binmask_dist.training.tasks.base import Batch, RunError, Task


def in_precision_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """DeepSpeed casts the model and not what it is given. Elsewhere weights are in fp32, and autocast does the rest."""
    return inputs.to(next(model.parameters()).dtype)


class Classification(Task):
    """Loads the data and numbers the classes; what the model is given and answers is up to the kind of input."""

    training_metrics = ("accuracy",)

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.data = load_data(config)
        assert self.data.classes is not None
        self.data.check_columns(config.input_columns)
        self.classes = self.data.classes
        self.binary = len(self.classes.names) == 2
        self.metrics = ("accuracy", "loss", "auc") if self.binary else ("accuracy", "loss")
        if self.binary and len(set(self.labels(self.data.test))) < 2:
            raise RunError("the test split has examples of one class only; give another test_split")

    def labels(self, part: Dataset) -> list[int]:
        """Class numbers of all rows."""
        return [self.classes.number(value) for value in part[self.data.label][:]]

    @abstractmethod
    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits and class numbers."""

    def learn(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, labels = self.predict(model, batch)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=self.config.label_smoothing)
        return {"loss": loss, "accuracy": (logits.detach().argmax(dim=-1) == labels).float().mean()}

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, labels = self.predict(model, batch)
        logits = logits.float()
        rows = {"loss": F.cross_entropy(logits, labels, reduction="none"), "hit": logits.argmax(dim=-1) == labels}
        if self.binary:
            rows |= {"score": logits[:, 1] - logits[:, 0], "label": labels}
        return rows

    def summarise(self, rows: dict[str, Tensor]) -> dict[str, float | int]:
        metrics: dict[str, float | int] = {
            "loss": float(rows["loss"].double().mean()),
            "accuracy": float(rows["hit"].double().mean()),
            "correct": int(rows["hit"].sum()),
            "examples": len(rows["hit"]),
        }
        if self.binary:
            # a loss that is not finite is the loop's to report, and roc_auc_score refuses scores that are not
            scores = torch.nan_to_num(rows["score"])
            metrics["auc"] = float(roc_auc_score(rows["label"].numpy(), scores.numpy()))
        return metrics
