"""What is asked: a table, its target, and how many features. Checked here for the estimator and the command alike."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
from accelerate import Accelerator
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from torch import nn

from binmask_dist.engines.accelerator import SHARDING
from binmask_dist.method.input_mask import InputMask
from binmask_dist.selection.fitting import CannotFit, Fitter, Record, Training
from binmask_dist.selection.network import mlp
from binmask_dist.selection.rows import Matrix, Rows, Scaling
from binmask_dist.selection.search import Search, Selection

Task = Literal["auto", "classification", "regression"]
Network = nn.Module | Callable[[int, int], nn.Module] | None


class Problem:
    """A table without missing cells, prepared for fitting. Rows of weight zero are left out from the start."""

    def __init__(
        self,
        x: Matrix,
        y: np.ndarray,
        *,
        task: Task = "auto",
        sample_weight: np.ndarray | None = None,
        class_weight: Any = None,
        groups: Any = None,
        input_shape: Sequence[int] | None = None,
        scale: bool = True,
    ) -> None:
        if sample_weight is not None:
            if not (sample_weight >= 0).all() or not (sample_weight > 0).any():
                raise ValueError("sample_weight must not be negative, and not all zero")
            keep = sample_weight > 0
            if not keep.all():
                x, y, sample_weight = x[keep], y[keep], sample_weight[keep]
        self.features = x.shape[1]
        self.regression = _is_regression(y, task)
        self.classes: np.ndarray | None = None
        if self.regression:
            if class_weight is not None:
                raise ValueError("class_weight is for classification, and y holds numbers; leave it out")
            target = y.astype(np.float64)
            spread = target.std()
            self.target = ((target - target.mean()) / (spread if spread > 0 else 1.0)).astype(np.float32)
        else:
            check_classification_targets(y)
            self.classes, self.target = np.unique(y, return_inverse=True)
            if len(self.classes) < 2:
                raise ValueError(f"there must be at least two classes in y, but all rows have the class {y[0]!r}")
            if class_weight is not None:
                by_class = compute_sample_weight(class_weight, y)
                sample_weight = by_class if sample_weight is None else sample_weight * by_class
        self.weight = None if sample_weight is None else sample_weight / sample_weight.mean()
        self.group_names, self.groups = _numbered(groups, self.features)
        self.example_shape = _example_shape(input_shape, self.features)
        scaling = Scaling.of(x)
        self.varies = self.per_mask(scaling.varies)
        if scale:
            self.x = scaling.apply(x)
        else:
            self.x = x.astype(np.float32, copy=False) if sp.issparse(x) else np.ascontiguousarray(x, dtype=np.float32)

    def per_mask(self, of_features: np.ndarray) -> np.ndarray:
        """Whether any feature of each mask has the property."""
        if self.groups is None:
            return of_features
        return np.bincount(self.groups, weights=of_features) > 0

    def per_feature(self, of_masks: np.ndarray) -> np.ndarray:
        """The value of every feature's mask."""
        return of_masks if self.groups is None else of_masks[self.groups]

    def check_count(self, count: Any) -> None:
        """Raise unless so many masks can stay on."""
        masks, varying = len(self.varies), int(self.varies.sum())
        what = "features" if self.groups is None else "groups of features"
        if isinstance(count, bool) or not isinstance(count, int | np.integer):
            raise ValueError(f"n_features must be a whole number or None, not {count!r}")
        if not 1 <= count <= masks:
            raise ValueError(f"n_features must be from 1 to the number of {what}, {masks}, not {count}")
        if count > varying:
            raise ValueError(f"n_features is {count}, but only {varying} of the {masks} {what} are not constant")

    def search(
        self,
        accelerator: Accelerator,
        training: Training,
        *,
        network: Network = None,
        start: float,
        max_steps: int = 16,
        seed: int = 0,
        verbose: bool = False,
        log: Callable[[Record], None] | None = None,
    ) -> Search:
        """Ready to be asked for features, on all processes of the accelerator together."""
        if accelerator.distributed_type in SHARDING:
            raise CannotFit(
                "feature selection runs on one process or under DDP: its networks are small, and "
                f"{accelerator.distributed_type.value} would cut them up; leave that out of Accelerate's configuration"
            )
        rank, world = accelerator.process_index, accelerator.num_processes
        rows = Rows(self.x, self.target, self.weight, self.example_shape, rank, world)
        outputs = 1 if self.classes is None else len(self.classes)
        fitter = Fitter(
            rows,
            lambda: _make_network(network, self.example_shape, outputs),
            self._make_mask,
            training,
            varies=self.varies,
            regression=self.regression,
            outputs=outputs,
            seed=seed,
            verbose=verbose,
            log=log,
        )
        return Search(fitter, start, max_steps)

    def select(self, search: Search, count: int | None) -> Selection:
        """A threshold if there is no count. All that vary need no search: constant features are never chosen."""
        if count is None:
            return search.above_threshold()
        self.check_count(count)
        if count == self.varies.sum():
            return Selection(int(count), 0.0, 0.5, self.varies.astype(np.float32), steps=0, fits=0)
        return search.exactly(int(count))

    def _make_mask(self) -> InputMask:
        if self.groups is None:
            return InputMask(self.example_shape)
        return InputMask(groups=self.groups.reshape(self.example_shape))


def _is_regression(y: np.ndarray, task: Task) -> bool:
    if task not in ("auto", "classification", "regression"):
        raise ValueError(f"task must be auto, classification or regression, not {task!r}")
    kind = type_of_target(y, input_name="y", raise_unknown=True)
    if task == "regression" and y.dtype.kind not in "biuf":
        raise ValueError("y must be numbers for regression; for classes give task='classification'")
    return task == "regression" or (task == "auto" and kind.startswith("continuous"))


def _numbered(groups: Any, features: int) -> tuple[list[str] | None, np.ndarray | None]:
    """Names of the groups in the order in which they appear, and the number of each feature's."""
    if groups is None:
        return None, None
    labels = np.asarray(groups)
    if labels.shape != (features,):
        raise ValueError(f"groups must have one entry for each of the {features} features, not {labels.shape}")
    names, first, numbers = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.argsort(order)
    return [str(name) for name in names[order]], place[numbers]


def _example_shape(input_shape: Sequence[int] | None, features: int) -> tuple[int, ...]:
    shape = (features,) if input_shape is None else tuple(int(length) for length in input_shape)
    if np.prod(shape) != features:
        raise ValueError(f"input_shape {shape} has {np.prod(shape)} places, but there are {features} features")
    return shape


def _make_network(network: Network, example_shape: Sequence[int], outputs: int) -> nn.Module:
    inputs = math.prod(example_shape)
    if network is None:
        return mlp(inputs, outputs) if len(example_shape) == 1 else nn.Sequential(nn.Flatten(), *mlp(inputs, outputs))
    if isinstance(network, nn.Module):
        return copy.deepcopy(network)
    made = network(inputs, outputs)
    if not isinstance(made, nn.Module):
        raise ValueError(f"network must be a torch module, or return one, not {type(made).__name__}")
    return made
