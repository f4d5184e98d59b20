"""`--method logistic`: scikit-learn's logistic regression on a table, for reference. No network and no training loop.

minimise sum log(1 + exp(-y (w x + b))) + |w|^2 / 2        # scikit-learn's defaults
"""

import time
from typing import Any

import torch
from sklearn.linear_model import LogisticRegression

from binmask_dist.training.tasks.base import RunError, Task

MOST_ITERATIONS = 1000


def fit(task: Task) -> dict[str, Any]:
    """The figures of result.json, under the names that those of a network have."""
    arrays = getattr(task, "arrays", None)
    if arrays is None or "auc" not in task.metrics:
        raise RunError("method logistic takes the tabular task with two classes")
    start = time.perf_counter()
    model = LogisticRegression(max_iter=MOST_ITERATIONS).fit(*arrays(task.train))
    seconds = time.perf_counter() - start
    figures: dict[str, Any] = {}
    for part, data in (("test", task.test), ("validation", task.validation), ("train", task.train)):
        if data is None:
            continue
        inputs, labels = arrays(data)
        score, label = torch.from_numpy(model.decision_function(inputs)).float(), torch.as_tensor(labels)
        loss = torch.nn.functional.softplus(torch.where(label == 1, -score, score))
        rows = {"loss": loss, "hit": (score > 0).long() == label, "score": score, "label": label}
        figures |= {f"{part}_{key}": value for key, value in task.summarise(rows).items()}
    size = torch.from_numpy(model.coef_).abs()
    return {
        "task": task.config.task,
        "model": "logistic regression",
        "method": "logistic",
        **figures,
        "before_finetuning": None,
        "sparsity": float((size == 0).double().mean()),
        "weight_l0": float((size >= 1e-4).double().mean()),
        "weight_l1": float(size.mean()),
        "weight_l2": float(size.square().mean().sqrt()),
        "seconds": seconds,
        "iterations": int(model.n_iter_[0]),
    }
