"""`BinMaskSelector`: feature selection as a scikit-learn transformer."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import SelectorMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data

from binmask_dist.selection.fitting import CLASSIFICATION_LR, REGRESSION_LR, Training, accelerator_beside
from binmask_dist.selection.problem import Network, Problem, Task
from binmask_dist.selection.search import START, Search, Selection


class BinMaskSelector(SelectorMixin, BaseEstimator):
    """Chooses features by a mask on the inputs of a network that is trained for the task at hand.

    n_features    exactly so many, by a search on lam; None: those whose smoothed mask is 0.5 or more
    lam           penalty per feature; where the search starts if n_features is given; None: 1e-3
    network       a module, or a function of the numbers of inputs and outputs that makes one; None: the paper's MLP
    task          "classification", "regression", or "auto": by the values of y
    groups        one label per feature; features with the same label are chosen together, and n_features counts groups
    input_shape   what the network takes a row as, (1, 28, 28), say; None: flat
    class_weight  as elsewhere in scikit-learn: "balanced", or a dict
    lr            learning rate of the network; None: 0.1, or 0.02 for regression
    scale         map features to [0, 1] for the network
    max_steps     most lams that a search tries
    verbose       show a progress bar

    The others are `fitting.Training`'s, with the values of the paper. Under `accelerate launch` all processes must call
    `fit` with the same data; they share the work, and choose the same features.

    After `fit`: smoothed_mask_ (a value for each feature), lam_, cut_, search_steps_, converged_ (at most 20% of the
    mask's values in [0.15, 0.85]), exact_ (False: no lam and cut gave n_features, and the nearest count was taken).
    """

    def __init__(
        self,
        n_features: int | None = None,
        *,
        lam: float | None = None,
        network: Network = None,
        task: Task = "auto",
        groups: Any = None,
        input_shape: Sequence[int] | None = None,
        class_weight: Any = None,
        scale: bool = True,
        epochs: int = 100,
        batch_size: int = 256,
        min_batches: int = 30,
        lr: float | None = None,
        lr_final: float = 1e-5,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        alpha0: float = 0.02,
        warmup: float = 0.1,
        mask_lr: float = 1e-3,
        mask_lr_final: float = 1e-5,
        max_steps: int = 16,
        random_state: Any = None,
        verbose: bool | int = False,
    ) -> None:
        self.n_features = n_features
        self.lam = lam
        self.network = network
        self.task = task
        self.groups = groups
        self.input_shape = input_shape
        self.class_weight = class_weight
        self.scale = scale
        self.epochs = epochs
        self.batch_size = batch_size
        self.min_batches = min_batches
        self.lr = lr
        self.lr_final = lr_final
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.alpha0 = alpha0
        self.warmup = warmup
        self.mask_lr = mask_lr
        self.mask_lr_final = mask_lr_final
        self.max_steps = max_steps
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "BinMaskSelector":
        problem, search = self._prepare(X, y, sample_weight, [] if self.n_features is None else [self.n_features])
        self._take(problem, self._select(problem, search, self.n_features))
        return self

    def path(self, X: Any, y: Any, counts: Sequence[int], sample_weight: Any = None) -> list[Selection]:
        """A selection for each of the counts, from one set of fits: those of one count serve the next.

        `Selection.support` has an entry for each feature, or for each group; `seconds` is what a count added to those
        before it. The estimator is fitted to the last count.
        """
        if not len(counts):
            raise ValueError("give at least one count")
        problem, search = self._prepare(X, y, sample_weight, counts)
        selections = [self._select(problem, search, count) for count in counts]
        self._take(problem, selections[-1])
        return selections

    def _prepare(self, X: Any, y: Any, sample_weight: Any, counts: Sequence[int]) -> tuple[Problem, Search]:
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=(np.float64, np.float32), ensure_min_samples=2, y_numeric=False
        )
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
        problem = Problem(
            X,
            column_or_1d(y),
            task=self.task,
            sample_weight=sample_weight,
            class_weight=self.class_weight,
            groups=self.groups,
            input_shape=self.input_shape,
            scale=self.scale,
        )
        for count in counts:
            problem.check_count(count)
        settings = {name: getattr(self, name) for name in Training.__dataclass_fields__}
        if self.lr is None:
            settings["lr"] = REGRESSION_LR if problem.regression else CLASSIFICATION_LR
        with accelerator_beside() as accelerator:
            seed = [int(check_random_state(self.random_state).randint(2**31 - 1))]
            broadcast_object_list(seed)
            search = problem.search(
                accelerator,
                Training(**settings),
                network=self.network,
                start=START if self.lam is None else self.lam,
                max_steps=self.max_steps,
                seed=seed[0],
                verbose=bool(self.verbose),
            )
        return problem, search

    def _select(self, problem: Problem, search: Search, count: int | None) -> Selection:
        selection = problem.select(search, count)
        if not selection.exact:
            warnings.warn(
                f"no lam and cut gave {selection.asked} features within {selection.steps} steps; {selection.count} are "
                "chosen, the nearest count that was found. Raise max_steps or epochs, or take another random_state",
                ConvergenceWarning,
                stacklevel=3,
            )
        return selection

    def _take(self, problem: Problem, selection: Selection) -> None:
        self.smoothed_mask_ = problem.per_feature(selection.smoothed)
        self.support_ = problem.per_feature(selection.support)
        self.lam_ = selection.lam
        self.cut_ = selection.cut
        self.search_steps_ = selection.steps
        self.converged_ = selection.converged
        self.exact_ = selection.exact
        if problem.classes is not None:
            self.classes_ = problem.classes

    def _get_support_mask(self) -> np.ndarray:
        check_is_fitted(self, "support_")
        return self.support_

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        return tags
