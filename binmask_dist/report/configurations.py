"""Trials that differ in the seed alone are one configuration; configurations of one problem can be compared."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from binmask_dist.report.statistics import Summary, summarise
from binmask_dist.report.trials import Trial
from binmask_dist.training.identity import NO_PART_OF_A_TRIAL, configuration_id, configuration_name

SPARSITY_KEYS = ("lam", "target_sparsity")  # what is varied along a curve of a metric over the sparsity
_PROBLEM_KEYS = ("task", "dataset", "dataset_config", "model")
_LONGEST_LABEL = 60


@dataclass
class Configuration:
    """Its trials in the order of their seeds, and a label that tells it from the others of its problem."""

    trials: list[Trial]
    label: str = ""

    @property
    def config(self) -> dict[str, Any]:
        return self.trials[0].config

    @property
    def method(self) -> str:
        return self.trials[0].method

    @property
    def id(self) -> str:
        return configuration_id(self.config)

    @property
    def name(self) -> str:
        return configuration_name(self.config)

    @property
    def seeds(self) -> list[int]:
        return [trial.seed for trial in self.trials]

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        """Of every metric that at least one trial has."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.metrics)
        found = {name: summarise(trial.metrics.get(name, np.nan) for trial in self.trials) for name in names}
        return {name: summary for name, summary in found.items() if summary is not None}

    def sample(self, metric: str) -> dict[int, float]:
        """Finite values by seed."""
        values = {trial.seed: trial.metrics.get(metric, np.nan) for trial in self.trials}
        return {seed: value for seed, value in values.items() if np.isfinite(value)}

    def mean(self, metric: str) -> float | None:
        summary = self.summaries.get(metric)
        return None if summary is None else summary.mean

    @property
    def sparsity(self) -> float:
        return self.summaries["sparsity"].mean


@dataclass
class Curve:
    """Configurations of one method that differ in what sets the sparsity alone, from dense to sparse."""

    label: str
    configurations: list[Configuration]

    def points(self, metric: str) -> list[tuple[dict[int, float], dict[int, float]]]:
        return [(each.sample("sparsity"), each.sample(metric)) for each in self.configurations]


@dataclass
class Problem:
    """A task, a data set and a model: the same question to all configurations."""

    name: str
    configurations: list[Configuration]

    @cached_property
    def curves(self) -> list[Curve]:
        families: dict[str, list[Configuration]] = {}
        for each in self.configurations:
            if each.method != "dense" and each.trials[0].epochs:
                families.setdefault(_hashable(each.config, without=SPARSITY_KEYS), []).append(each)
        lines = [sorted(family, key=lambda each: each.sparsity) for family in families.values()]
        heads = [line[0].config for line in lines]
        keys = ["method", *(key for key in _varied(heads) if key not in ("method", *SPARSITY_KEYS))]
        return [Curve(_describe(line[0].config, keys), line) for line in lines]

    @property
    def dense(self) -> list[Configuration]:
        return [each for each in self.configurations if each.method == "dense"]

    def selection(self, count: int) -> list[Configuration]:
        """At most so many, none of them dense: of each curve some, evenly spread over its length."""
        lengths = [len(curve.configurations) for curve in self.curves]
        shares = [0] * len(lengths)
        for _ in range(min(count, sum(lengths))):
            neediest = max(range(len(shares)), key=lambda i: (lengths[i] > shares[i], -shares[i], lengths[i]))
            shares[neediest] += 1
        chosen: list[Configuration] = []
        for curve, length, share in zip(self.curves, lengths, shares, strict=True):
            places = [(length - 1) / 2] if share == 1 else np.linspace(0, length - 1, share)
            chosen += [curve.configurations[round(place)] for place in places]
        return chosen


def group(trials: Iterable[Trial]) -> list[Problem]:
    """All trials, by problem and configuration."""
    problems: dict[tuple[str, ...], dict[str, list[Trial]]] = {}
    for trial in trials:
        problem = problems.setdefault(tuple(str(trial.config.get(key, "")) for key in _PROBLEM_KEYS), {})
        problem.setdefault(configuration_id(trial.config), []).append(trial)
    names = _problem_names(list(problems))
    found = []
    for key in sorted(problems, key=lambda key: names[key]):
        members = sorted(problems[key].items())
        configurations = [Configuration(sorted(each, key=lambda trial: trial.seed)) for _, each in members]
        for configuration, label in zip(configurations, _labels(configurations), strict=True):
            configuration.label = label
        found.append(Problem(names[key], configurations))
    return found


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """What all trials of a configuration share."""
    return {key: value for key, value in config.items() if key not in NO_PART_OF_A_TRIAL and key != "seed"}


def varied_settings(problem: Problem) -> list[str]:
    """Keys in which configurations of a problem differ."""
    return _varied([each.config for each in problem.configurations])


def _problem_names(keys: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Short ones, unless two problems would then have the same."""
    short = {key: f"{Path(key[3]).name} on {Path(key[1]).name}" for key in keys}
    taken = list(short.values())
    return {key: name if taken.count(name) == 1 else ", ".join(filter(None, key)) for key, name in short.items()}


def _labels(configurations: list[Configuration]) -> list[str]:
    configs = [each.config for each in configurations]
    varied = _varied(configs)
    several = len({each.method for each in configurations}) > 1
    others = [key for key in varied if key not in ("method", *SPARSITY_KEYS)]
    labels = []
    for each in configurations:
        aim = "lam" if each.config["target_sparsity"] is None else "target_sparsity"
        keys = [*(["method"] if several or each.method == "dense" else []), *([aim] if each.method != "dense" else [])]
        labels.append(_describe(each.config, [*keys, *others]))
    if len(set(labels)) < len(labels):
        labels = [_describe(config, varied) for config in configs]
    return [
        label if 0 < len(label) <= _LONGEST_LABEL and labels.count(label) == 1 else f"{label[:50]} {each.id}".strip()
        for label, each in zip(labels, configurations, strict=True)
    ]


def _varied(configs: Sequence[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in settings(config))
    return [key for key in keys if len({_text(_value(config, key)) for config in configs}) > 1]


def _describe(config: dict[str, Any], keys: Iterable[str]) -> str:
    parts = []
    for key in keys:
        value = _text(_value(config, key))
        parts.append(value if key == "method" else f"{key.removesuffix('_sparsity')} {value}")
    return ", ".join(parts)


def _value(config: dict[str, Any], key: str) -> Any:
    return config.get(key, "binmask" if key == "method" else None)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _hashable(config: dict[str, Any], without: Sequence[str]) -> str:
    return json.dumps({key: value for key, value in settings(config).items() if key not in without}, sort_keys=True)
