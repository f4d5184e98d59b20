"""From trials to everything that a report says, as numbers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from binmask_dist.report.configurations import Configuration, Curve, Problem, group, settings, varied_settings
from binmask_dist.report.statistics import Comparison, Estimate, at_sparsity, best_index, compare, holm, is_bold
from binmask_dist.report.trials import BATCH_STATISTICS, BEFORE_FINETUNING, Trials
from binmask_dist.training.metrics_file import jsonable
from binmask_dist.training.tasks.base import RunError

MAIN_METRICS = ("test_accuracy", "test_auc", "test_perplexity", "test_loss")  # the first that a problem has
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_LOWER_IS_BETTER = ("loss", "perplexity", "seconds", "bytes")
_COUNTS = ("examples", "correct", "tokens")
_FACTS = ("sparsity", "weights_left", "weight_l0", "weight_l1", "weight_l2", "seconds")  # rows in which nothing is best


@dataclass
class Cell:
    """A configuration, or a curve at a sparsity, in a row; `against` compares the best of the row with it."""

    value: Estimate | None
    against: Comparison | None = None
    corrected: float | None = None
    bold: bool = False


@dataclass
class Row:
    """A metric of all columns, or all curves at a sparsity."""

    name: str
    cells: list[Cell]
    best: int | None = None


@dataclass
class ProblemAnalysis:
    problem: Problem
    metric: str
    columns: list[Configuration]  # best first, by the metric
    results: list[Row]
    against_dense: Row | None  # cells like `columns`; `best` is the dense one
    curves: list[Curve]
    matched: list[Row]  # named by the sparsity, cells like `curves`


@dataclass
class Analysis:
    trials: Trials
    problems: list[ProblemAnalysis]


def analyse(trials: Trials, metric: str = "", sparsities: Sequence[float] = ()) -> Analysis:
    """`metric` and `sparsities`: those of the user, or empty."""
    for sparsity in sparsities:
        if not 0 <= sparsity <= 1:
            raise RunError(f"a sparsity is a fraction from 0 to 1, and {sparsity:g} is not")
    return Analysis(trials, [_analyse(problem, metric, sparsities) for problem in group(trials.used)])


def higher_is_better(metric: str) -> bool:
    return not metric.endswith(_LOWER_IS_BETTER)


def _analyse(problem: Problem, wanted: str, sparsities: Sequence[float]) -> ProblemAnalysis:
    metric = _main_metric(problem, wanted)
    sign = -1 if higher_is_better(metric) else 1
    columns = sorted(
        problem.configurations, key=lambda each: (each.mean(metric) is None, sign * (each.mean(metric) or 0))
    )
    results = [_result_row(name, columns) for name in _row_names(columns, metric)]
    _correct(results)
    curves = problem.curves
    levels = sorted(set(sparsities)) or SPARSITIES
    matched = [_matched_row(level, curves, metric) for level in levels]
    if not sparsities:
        matched = [row for row in matched if any(cell.value for cell in row.cells)]
    _correct(matched)
    return ProblemAnalysis(problem, metric, columns, results, _against_dense(columns, metric), curves, matched)


def _main_metric(problem: Problem, wanted: str) -> str:
    there = dict.fromkeys(chain.from_iterable(each.summaries for each in problem.configurations))
    for name in (wanted, f"test_{wanted}") if wanted else MAIN_METRICS:
        if name in there:
            return name
    if wanted:
        raise RunError(f"{problem.name} has no metric '{wanted}'; there is {', '.join(there)}")
    raise RunError(f"no trial of {problem.name} has a finite test metric; give one with --metric: {', '.join(there)}")


def _row_names(columns: Sequence[Configuration], metric: str) -> list[str]:
    """A metric that is finite in no trial has a row too, of nothing: it should not go unnoticed."""
    there = dict.fromkeys(name for each in columns for trial in each.trials for name in trial.metrics)
    tests, trains = (
        [name for name in there if name.startswith(part) and not name.endswith(_COUNTS)] for part in ("test_", "train_")
    )
    before = [f"{BEFORE_FINETUNING}{part}{name}" for part in ("", BATCH_STATISTICS) for name in [metric, *tests]]
    names = dict.fromkeys([metric, *tests, *before, *trains, *_FACTS])
    return [name for name in names if name in there]


def _result_row(name: str, columns: Sequence[Configuration]) -> Row:
    cells = []
    for each in columns:
        summary = each.summaries.get(name)
        cells.append(Cell(None if summary is None else Estimate(summary, each.sample(name))))
    return Row(name, cells) if name in _FACTS else _against_best(Row(name, cells), higher_is_better(name))


def _matched_row(sparsity: float, curves: Sequence[Curve], metric: str) -> Row:
    cells = [Cell(at_sparsity(curve.points(metric), sparsity)) for curve in curves]
    return _against_best(Row(f"{100 * sparsity:g}%", cells), higher_is_better(metric))


def _against_best(row: Row, higher: bool) -> Row:
    values = [cell.value.summary if cell.value else None for cell in row.cells]
    means = [value.mean if value else None for value in values]
    # one lucky trial is no match for means of several
    several = [value.mean if value and value.trials > 1 else None for value in values]
    row.best = best_index(several if any(mean is not None for mean in several) else means, higher)
    if row.best is None:
        return row
    best = row.cells[row.best].value
    for index, cell in enumerate(row.cells):
        if index != row.best and best and cell.value and best.sample is not None and cell.value.sample is not None:
            cell.against = compare(best.sample, cell.value.sample)
        p = cell.against.p if cell.against else None
        cell.bold = len(row.cells) > 1 and is_bold(means[index], means[row.best], p)
    return row


def _against_dense(columns: Sequence[Configuration], metric: str) -> Row | None:
    """Each configuration against the best of the dense ones."""
    dense = next((index for index, each in enumerate(columns) if each.method == "dense"), None)
    if dense is None:
        return None
    row = _result_row(metric, columns)
    reference = columns[dense].sample(metric)
    for cell in row.cells:
        cell.against = compare(reference, cell.value.sample) if cell.value and cell.value.sample else None
    row.cells[dense].against, row.best = None, dense
    _correct([row])
    return row


def _correct(rows: Sequence[Row]) -> None:
    """Holm's correction over all tests of a table."""
    cells = [cell for row in rows for cell in row.cells]
    for cell, p in zip(cells, holm([cell.against.p if cell.against else None for cell in cells]), strict=True):
        cell.corrected = p


def as_json(analysis: Analysis) -> dict[str, Any]:
    """All the numbers."""
    left_out = [{"source": source, "reason": reason} for source, reason in analysis.trials.left_out]
    return jsonable({"problems": [_problem_json(each) for each in analysis.problems], "left_out": left_out})


def _problem_json(analysis: ProblemAnalysis) -> dict[str, Any]:
    labels, dense = [each.label for each in analysis.columns], analysis.against_dense
    return {
        "name": analysis.problem.name,
        "metric": analysis.metric,
        "higher_is_better": higher_is_better(analysis.metric),
        "varied": varied_settings(analysis.problem),
        "configurations": [_configuration_json(each) for each in analysis.columns],
        "against_best": {row.name: _row_json(row, labels) for row in analysis.results if row.best is not None},
        "against_dense": _row_json(dense, labels) if dense else None,
        "matched_sparsity": {row.name: _row_json(row, [c.label for c in analysis.curves]) for row in analysis.matched},
    }


def _configuration_json(configuration: Configuration) -> dict[str, Any]:
    return {
        "label": configuration.label,
        "name": configuration.name,
        "method": configuration.method,
        "settings": settings(configuration.config),
        "trials": [{"seed": trial.seed, "source": trial.source} for trial in configuration.trials],
        "metrics": {name: asdict(summary) for name, summary in configuration.summaries.items()},
    }


def _row_json(row: Row, labels: Sequence[str]) -> dict[str, Any]:
    """`against`: the comparison of the best, or of the dense one, with this one."""
    cells = [
        {
            "label": label,
            "value": asdict(cell.value.summary) if cell.value else None,
            "against": asdict(cell.against) if cell.against else None,
            "p_holm": cell.corrected,
            "bold": cell.bold,
        }
        for label, cell in zip(labels, row.cells, strict=True)
    ]
    return {"reference": None if row.best is None else labels[row.best], "cells": cells}
