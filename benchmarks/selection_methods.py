"""Methods of feature selection behind one face: `select(data, counts, seed) -> {count: Choice}`.

What was done to run the comparison packages with today's torch and numpy:

STG       `stg.layers.FeatureSelector`, with its default sigma 0.5, is put in front of the same network and trained by
          the same loop as everything else; the loss is the package's, lam * mean of the probabilities that a gate is
          open. The package's own class only builds MLPs. Its survival analysis imports lifelines, which is not needed
          here and holds pandas back: an empty module stands in for it where it is not installed. The search is
          BinMask's, but from 0.1, as in the paper.
          "STG packaged" is the same with the package's defaults for all training: Adam at 1e-5, weight decay 1e-3,
          batches of 100. A gate then moves by about 1e-5 in a step.
LassoNet  has one hidden layer of 100, as by default, but minibatches of 256 of a table that is duplicated to 30 of
          them, as for all others, 100 epochs, then 2 for each lambda, in steps of 1.05 from 0.1; with more than
          10,000 rows or features, and in quick runs, 10 epochs, then 1. With more than 10,000 features the path begins
          at 10: on Dexter and gene_gordon all of them stay below that. With its
          defaults (all rows in one batch, 1,000 epochs, then 100 for each lambda, in steps of 1.02 from an estimate) it
          had not ended after 14 minutes on one core with BASEHOCK; the estimate alone takes minutes. The path ends
          where it has fewer features than the smallest count, and the nearest set on it is taken.
Mutual information and L1 logistic regression look at 5,000 rows at most.
"""

import sys
import time
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import mutual_info_classif
from sklearn.linear_model import LogisticRegression
from sklearn.svm import l1_min_c
from torch import nn
from torch.nn import functional as F

from binmask_dist import make_accelerator
from binmask_dist.selection.fitting import Training
from binmask_dist.selection.network import is_row_by_row
from binmask_dist.selection.problem import Problem
from binmask_dist.selection.rows import Rows
from binmask_dist.selection.search import START, Fit, Search

MANY_ROWS, MANY_FEATURES = 10_000, 10_000


@dataclass(frozen=True)
class Data:
    """The training part of a trial, scaled, and how the protocol trains on it."""

    x: Any
    y: np.ndarray
    classes: int
    make_network: Callable[[int, int], nn.Module]
    training: Training
    input_shape: tuple[int, ...] | None
    max_steps: int

    @property
    def dense(self) -> np.ndarray:
        return self.x.toarray() if sp.issparse(self.x) else self.x

    def some_rows(self, most: int, seed: int) -> np.ndarray:
        """For methods whose time grows too fast with the rows."""
        return np.random.default_rng(seed).permutation(len(self.y))[:most]


@dataclass(frozen=True)
class Choice:
    columns: list[int]
    about: dict[str, Any] = field(default_factory=dict)


def binmask(data: Data, counts: Sequence[int], seed: int) -> dict[int, Choice]:
    return _searched(binmask_search(data, seed), counts)


def _searched(search: Search, counts: Sequence[int]) -> dict[int, Choice]:
    """What was fitted for one count serves the others as well."""
    choices = {}
    for count in counts:
        selection = search.exactly(count)
        about = {key: getattr(selection, key) for key in ("lam", "cut", "steps", "fits", "converged", "exact")}
        choices[count] = Choice(np.flatnonzero(selection.support).tolist(), about)
    for count, choice in choices.items():
        choice.about["alone"] = steps_alone(search, count)
    return choices


def steps_alone(search: Search, count: int) -> dict[str, Any]:
    """Steps of a search for this count alone, replayed; not `known`: it would need a lam that was not fitted."""
    visited = []

    def fitted(lam: float) -> Fit:
        visited.append(lam)
        return search.fits[lam]

    try:
        return {"steps": Search(fitted, search.start, search.max_steps).exactly(count).steps, "known": True}
    except KeyError:
        return {"steps": len(visited), "known": False}


def binmask_search(data: Data, seed: int, start: float = START) -> Search:
    problem = Problem(data.x, data.y, task="classification", input_shape=data.input_shape, scale=False)
    return problem.search(
        make_accelerator(),
        data.training,
        network=data.make_network,
        start=start,
        max_steps=data.max_steps,
        seed=seed,
        verbose=sys.stderr.isatty(),
    )


def stg(data: Data, counts: Sequence[int], seed: int, packaged: bool = False) -> dict[int, Choice]:
    return _searched(Search(partial(_fit_stg, data, seed, packaged), start=0.1, max_steps=data.max_steps), counts)


def _fit_stg(data: Data, seed: int, packaged: bool, lam: float) -> Fit:
    if "lifelines" not in sys.modules:
        try:
            import lifelines  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("lifelines.utils")
            stand_in.concordance_index = None  # type: ignore[attr-defined]
            sys.modules.update({"lifelines": types.ModuleType("lifelines"), "lifelines.utils": stand_in})
    from stg.layers import FeatureSelector

    start = time.perf_counter()
    torch.manual_seed(seed)
    features = data.x.shape[1]
    gates = FeatureSelector(features, sigma=0.5, device="cpu")
    network = data.make_network(features, data.classes)
    shape = data.input_shape or (features,)
    model = nn.Sequential(gates, nn.Unflatten(1, shape), network) if len(shape) > 1 else nn.Sequential(gates, network)

    def penalty() -> torch.Tensor:
        return lam * gates.regularizer((gates.mu + 0.5) / gates.sigma).mean()

    training, optimizer = data.training, None
    if packaged:
        training = replace(training, lr=1e-5, lr_final=1e-5, batch_size=100)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, weight_decay=1e-3)
    # noise is drawn once for a batch, so that the gates, too, treat each row by itself
    merge = is_row_by_row(network)
    train(model, Rows(data.x, data.y, None, (features,)), training, seed, merge, penalty, optimizer)
    opened = np.clip(gates.mu.detach().numpy() + 0.5, 0.0, 1.0)  # the package's get_gates("prob")
    return Fit(lam, opened, time.perf_counter() - start)


def lassonet(data: Data, counts: Sequence[int], seed: int) -> dict[int, Choice]:
    from lassonet import LassoNetClassifier

    is_wide = data.x.shape[1] > MANY_FEATURES
    settings: dict[str, Any] = {"batch_size": 256, "path_multiplier": 1.05, "lambda_start": 10.0 if is_wide else 0.1}
    is_short = is_wide or len(data.y) > MANY_ROWS or data.training.epochs < 10
    epochs = (10, 1) if is_short else (100, 2)
    model = LassoNetClassifier(verbose=0, random_state=seed, torch_seed=seed, n_iters=epochs, **settings)

    class SmallEnough(Exception):
        pass

    history: list[Any] = []

    def watch(_: Any, items: list[Any]) -> None:
        history[:] = items
        if int(items[-1].selected.sum()) < min(counts):
            raise SmallEnough  # what follows on the path is smaller still

    copies = Rows(data.x, data.y, None, ()).copies(data.training.batch_size, data.training.min_batches)
    x, y = np.tile(data.dense, (copies, 1)), np.tile(data.y, copies)
    with suppress(SmallEnough):
        model.path(x, y, callback=watch, disable_lambda_warning=True)
    return _nearest([item.selected.numpy() for item in history], counts)


def _nearest(sets: list[np.ndarray], counts: Sequence[int]) -> dict[int, Choice]:
    """Of the sets on a path, the one whose size is closest to each count."""
    chosen = {}
    for count in counts:
        nearest = min(sets, key=lambda selected, count=count: abs(int(selected.sum()) - count))
        chosen[count] = Choice(np.flatnonzero(nearest).tolist())
    return chosen


def fisher_score(data: Data, counts: Sequence[int], seed: int) -> dict[int, Choice]:
    """Spread between classes over spread within them."""
    overall = np.asarray(data.x.mean(axis=0)).ravel()
    between, within = np.zeros_like(overall), np.zeros_like(overall)
    for label in range(data.classes):
        rows = data.x[data.y == label]
        mean = np.asarray(rows.mean(axis=0)).ravel()
        squares = np.asarray((rows.multiply(rows) if sp.issparse(rows) else rows * rows).mean(axis=0)).ravel()
        between += rows.shape[0] * (mean - overall) ** 2
        within += rows.shape[0] * np.maximum(squares - mean**2, 0)
    # a feature that separates the classes without any spread within them comes first, a constant one last
    score = np.divide(between, within, out=np.where(between > 0, np.inf, 0.0), where=within > 0)
    return _ranked(score, counts)


def mutual_information(data: Data, counts: Sequence[int], seed: int) -> dict[int, Choice]:
    rows = data.some_rows(5_000, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse features are taken as discrete, one sentence for each of them
        score = mutual_info_classif(data.x[rows], data.y[rows], random_state=seed)
    return _ranked(score, counts)


def _ranked(score: np.ndarray, counts: Sequence[int]) -> dict[int, Choice]:
    order = np.argsort(-score, kind="stable")
    return {count: Choice(sorted(order[:count].tolist())) for count in counts}


def l1_logistic(data: Data, counts: Sequence[int], seed: int) -> dict[int, Choice]:
    """A path of falling penalties, each from the solution of the one before."""
    rows = data.some_rows(5_000, seed)
    x, y = data.x[rows], data.y[rows]
    model = LogisticRegression(l1_ratio=1.0, solver="saga", warm_start=True, max_iter=50, tol=1e-2, random_state=seed)
    sets = []
    for c in l1_min_c(x, y, loss="log") * np.geomspace(1.2, 1e3, 24):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the next penalty goes on from there
            model.set_params(C=c).fit(x, y)
        sets.append((model.coef_ != 0).any(axis=0))
        if sets[-1].sum() > 1.2 * max(counts):
            break
    return _nearest(sets, counts)


METHODS: dict[str, Callable[[Data, Sequence[int], int], dict[int, Choice]]] = {
    "BinMask": binmask,
    "F-score": fisher_score,
    "STG": stg,
    "STG packaged": partial(stg, packaged=True),
    "LassoNet": lassonet,
    "mutual information": mutual_information,
    "L1 logistic": l1_logistic,
}


def train(
    model: nn.Module,
    rows: Rows,
    training: Training,
    seed: int,
    merge: bool,
    penalty: Callable[[], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """The protocol's loop without BinMask: SGD, cosine in whole epochs, the same batches, merged in the same way."""
    optimizer = optimizer or torch.optim.SGD(
        model.parameters(),
        lr=training.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        fused=True,  # like BinMask's, so that times can be compared
    )
    model.train()
    for epoch in range(training.epochs):
        for group in optimizer.param_groups:
            group["lr"] = training.rate(epoch)
        batches = rows.batches(seed, epoch, training.batch_size, training.min_batches, sparse=False, merge=merge)
        for inputs, target, times in batches:
            losses = F.cross_entropy(model(inputs), target, reduction="none")
            loss = (losses if times is None else losses * times).sum() / training.batch_size
            if penalty is not None:
                loss = loss + penalty()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
