"""Figures of a report: the paper's Figures 2 and 3, sparsity by layer, and mask churn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from binmask_dist.report.analysis import ProblemAnalysis
from binmask_dist.report.configurations import Configuration, Curve
from binmask_dist.report.statistics import Summary
from binmask_dist.report.tables import sentence, title
from binmask_dist.report.trials import BEFORE_FINETUNING
from binmask_dist.training.plots import GREY, NAMED_LAYERS, dress, heat_map, scale_losses

# Okabe and Ito's colours without yellow, which is hard to see on white; shapes differ for those who print in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
SELECTED = 6  # configurations in a figure of curves over training; the last colour is left for dense
HEAT_MAPS = 4
# densities with a tick, in percent: coarse ones, and finer ones for a short axis
_TICKS = ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7))


@dataclass
class Drawing:
    name: str
    figure: Figure
    caption: str


def draw(analysis: ProblemAnalysis) -> list[Drawing]:
    return [
        Drawing("metric-over-sparsity", *draw_metric(analysis)),
        Drawing("training", *draw_training(analysis)),
        Drawing("layers", *draw_layers(analysis)),
        Drawing("churn", *draw_churn(analysis)),
    ]


# the metric against the sparsity


def draw_metric(analysis: ProblemAnalysis) -> tuple[Figure, str]:
    figure = Figure(figsize=(5.8, 4.4), layout="constrained")
    axes = figure.subplots()
    metric, before = analysis.metric, BEFORE_FINETUNING + analysis.metric
    curves = sorted(analysis.curves, key=lambda curve: -len(curve.configurations))[: len(COLOURS)]
    on_log_scale = _sparsity_axis(axes, [each.sparsity for curve in curves for each in curve.configurations])
    tuned = False
    for index, curve in enumerate(curves):
        after_label = curve.label
        if any(before in each.summaries for each in curve.configurations):
            tuned = True
            _draw_curve(axes, curve, before, index, on_log_scale, f"{curve.label}, before fine-tuning", hollow=True)
            after_label += ", after"
        _draw_curve(axes, curve, metric, index, on_log_scale, after_label)
    _draw_dense(axes, analysis, metric)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="masked weights gone (%)", ylabel=title(metric))
    heading = f"{sentence(title(metric, unit=False))} against sparsity"
    axes.set_title(heading, loc="left", fontsize=10)
    axes.legend(fontsize=8)
    caption = f"{heading}: {analysis.problem.name}."
    if tuned:
        caption += " Hollow markers: before fine-tuning; filled ones: after it."
    caption += (
        f" Error bars{' and the grey band, dense,' if analysis.problem.dense else ''} are 95% t-intervals over seeds."
    )
    if any(len(each.trials) == 1 for each in analysis.columns):
        caption += " A point without error bars has one trial."
    if len(curves) < len(analysis.curves):
        caption += f" Drawn are {len(curves)} of {len(analysis.curves)} curves, those with most configurations."
    return figure, caption


def draw_before_and_after(analysis: ProblemAnalysis) -> Figure:
    """The same side by side, where one of them would hide the others: each side has its own scale."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    curves = analysis.curves[: len(COLOURS)]
    for axes, metric in zip(panels, (BEFORE_FINETUNING + analysis.metric, analysis.metric), strict=True):
        on_log_scale = _sparsity_axis(axes, [each.sparsity for curve in curves for each in curve.configurations])
        for index, curve in enumerate(curves):
            _draw_curve(axes, curve, metric, index, on_log_scale, curve.label)
        _draw_dense(axes, analysis, metric)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlabel="masked weights gone (%)", ylabel=title(analysis.metric))
        axes.set_title(f"{'After' if metric == analysis.metric else 'Before'} fine-tuning", loc="left", fontsize=10)
    _legend(figure, panels[0], 5)
    return figure


def _sparsity_axis(axes: Axes, sparsities: Sequence[float]) -> bool:
    """Log scale of the density if that spans much, from dense to sparse; the ticks say the sparsity either way."""
    densities = [100 * (1 - sparsity) for sparsity in sparsities]
    if not densities or min(densities) <= 0 or max(densities) < 3 * min(densities):
        space = 0.1 * (max(densities) - min(densities)) + 0.5 if densities else 50.0
        low, high = 100 - max(densities, default=50.0) - space, 100 - min(densities, default=50.0) + space
        axes.set_xlim(max(-1.0, low), min(101.0, high))
        return False
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.xaxis.set_major_locator(FixedLocator(_density_ticks(min(densities) / 1.2, 1.2 * max(densities))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda density, _: f"{100 - density:.6g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    return True


def _density_ticks(low: float, high: float) -> list[float]:
    ladders = ([digit * 10.0**power for power in range(-4, 3) for digit in digits] for digits in _TICKS)
    coarse, fine = ([tick for tick in ladder if low <= tick <= min(high, 100)] for ladder in ladders)
    return coarse if len(coarse) >= 4 else fine


def _draw_curve(
    axes: Axes, curve: Curve, metric: str, index: int, on_log_scale: bool, label: str, hollow: bool = False
) -> None:
    there = [each for each in curve.configurations if metric in each.summaries]
    scale = _scale(metric)
    x = np.array([100 * each.sparsity for each in there])
    axes.errorbar(
        100 - x if on_log_scale else x,
        [scale * each.summaries[metric].mean for each in there],
        xerr=[100 * _bar(each.summaries["sparsity"]) for each in there],
        yerr=[scale * _bar(each.summaries[metric]) for each in there],
        color=COLOURS[index],
        marker=MARKERS[index],
        markerfacecolor="white" if hollow else COLOURS[index],
        linestyle="--" if hollow else "-",
        linewidth=1.2,
        markersize=5.5,
        capsize=3,
        elinewidth=1,
        label=label,
    )


def _draw_dense(axes: Axes, analysis: ProblemAnalysis, metric: str) -> None:
    """A band as high as the interval, and a line at the mean."""
    scale = _scale(metric)
    for number, each in enumerate(each for each in analysis.problem.dense if metric in each.summaries):
        summary = each.summaries[metric]
        if summary.low is not None and summary.high is not None:
            axes.axhspan(scale * summary.low, scale * summary.high, color=GREY, alpha=0.25, linewidth=0)
        label = each.label if number == 0 else None
        axes.axhline(
            scale * summary.mean, color="#555555", linestyle=LINES[(3 + number) % 7], linewidth=1.2, label=label
        )


def _bar(summary: Summary) -> float:
    """NaN, which is not drawn, for one trial."""
    return math.nan if summary.half_width is None else summary.half_width


def _scale(metric: str) -> float:
    return 100 if metric.endswith("accuracy") else 1


# over training


def draw_training(analysis: ProblemAnalysis) -> tuple[Figure, str]:
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    panels = figure.subplots(1, 3)
    chosen = [*analysis.problem.selection(SELECTED), *analysis.problem.dense[:1]]
    for axes, key, heading in zip(
        panels,
        ("sparsity", "test_loss", "train_loss"),
        ("Weights left (%)", "Held-out loss", "Training loss"),
        strict=True,
    ):
        drawn = []
        for index, each in enumerate(chosen):
            steps, values = over_training(each, key)
            values = _positive(100 * (1 - values)) if key == "sparsity" else values
            _draw_band(axes, steps, values, len(COLOURS) - 1 if each.method == "dense" else index, each.label)
            drawn.append(values)
        if key == "sparsity":
            axes.set_yscale("log" if any(np.isfinite(values).any() for values in drawn) else "linear")
        else:
            scale_losses(axes, drawn)
        _plain_ticks(axes)
        _dress(axes, chosen)
        axes.set_title(heading, loc="left", fontsize=10)
        axes.set(xlabel="optimizer step", xlim=(0, None))
    _legend(figure, panels[0], len(chosen))
    caption = (
        "Weights left in log scale, and losses, over training. Lines: means; filled regions: min and max over trials."
    )
    return figure, caption + _selection_note(chosen, analysis)


def draw_churn(analysis: ProblemAnalysis) -> tuple[Figure, str]:
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    chosen = analysis.problem.selection(SELECTED)
    anything = False
    for axes, key, heading in zip(panels, ("on_to_off", "off_to_on"), ("On to off", "Off to on"), strict=True):
        for index, each in enumerate(chosen):
            steps, values = over_training(each, key)
            masked = each.trials[0].result.get("masked_weights") or np.nan
            values = _positive(100 * values / masked)
            anything |= bool(np.isfinite(values).any())
            _draw_band(axes, steps, values, index, each.label)
        _dress(axes, chosen)
        axes.set_title(heading, loc="left", fontsize=10)
        axes.set(xlabel="optimizer step", xlim=(0, None))
    panels[0].set_ylabel("flips in an epoch (% of masked weights)")
    if anything:
        panels[0].set_yscale("log")
        _plain_ticks(panels[0])
    _legend(figure, panels[0], len(chosen))
    caption = "Mask churn: masks that flipped in each epoch, in log scale; epochs without a flip are gaps."
    return figure, caption + " Filled regions: min and max over trials." + _selection_note(chosen, analysis)


def draw_layers(analysis: ProblemAnalysis) -> tuple[Figure, str]:
    chosen = [each for each in analysis.problem.selection(HEAT_MAPS) if each.trials[0].epochs[-1]["layer_sparsity"]]
    rows = max((len(each.trials[0].epochs[-1]["layer_sparsity"]) for each in chosen), default=1)
    height = 1.7 + 0.2 * rows if rows <= NAMED_LAYERS else 7
    figure = Figure(figsize=(9, max(2.6, height)), layout="constrained")
    panels = figure.subplots(1, max(1, len(chosen)), squeeze=False)[0]
    for number, (axes, each) in enumerate(zip(panels, chosen, strict=False)):
        layers, sparsity = layers_over_training(each)
        image = heat_map(axes, layers, 100 * sparsity)
        axes.set_title(each.label, fontsize=9)
        if number:
            axes.set_yticks([])
            axes.set_ylabel("")
        if axes is panels[-1]:
            figure.colorbar(image, ax=list(panels), label="masked weights gone (%)", pad=0.01)
    caption = "Sparsity of each layer after each epoch, mean over trials; layers from input to output."
    return figure, caption + _selection_note(chosen, analysis)


def over_training(configuration: Configuration, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Optimizer steps at the ends of epochs, and a row of values for each trial; NaN where it has none."""
    steps = {record["epoch"]: record["step"] for trial in configuration.trials for record in trial.epochs}
    places = {epoch: place for place, epoch in enumerate(sorted(steps))}
    values = np.full((len(configuration.trials), len(places)), np.nan)
    for row, trial in enumerate(configuration.trials):
        for record in trial.epochs:
            value = record[key]
            values[row, places[record["epoch"]]] = np.nan if value is None else value
    return np.array([steps[epoch] for epoch in places]), values


def layers_over_training(configuration: Configuration) -> tuple[list[str], np.ndarray]:
    """Names, and layers x epochs: the mean over the trials that have the epoch."""
    layers = list(configuration.trials[0].epochs[-1]["layer_sparsity"])
    epochs: dict[int, list[list[float]]] = {}
    for trial in configuration.trials:
        for record in trial.epochs:
            epochs.setdefault(record["epoch"], []).append(
                [record["layer_sparsity"].get(name, np.nan) for name in layers]
            )
    return layers, np.array([np.mean(epochs[epoch], axis=0) for epoch in sorted(epochs)]).T


def _draw_band(axes: Axes, steps: np.ndarray, values: np.ndarray, index: int, label: str) -> None:
    there = np.isfinite(values).any(axis=0)
    steps, values = steps[there], values[:, there]
    if not len(steps):
        axes.plot([], [], color=COLOURS[index], linestyle=LINES[index], label=label)
        return
    axes.plot(
        steps, np.nanmean(values, axis=0), color=COLOURS[index], linestyle=LINES[index], linewidth=1.4, label=label
    )
    low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    axes.fill_between(steps, low, high, color=COLOURS[index], alpha=0.2, linewidth=0)


def _plain_ticks(axes: Axes) -> None:
    """0.1, 0.2, 0.5 and so on, for those who do not read powers of ten."""
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _positive(values: np.ndarray) -> np.ndarray:
    """What has no place on a log scale is a gap."""
    return np.where(values > 0, values, np.nan)


def _dress(axes: Axes, configurations: Sequence[Configuration]) -> None:
    """With the part of fine-tuning, if all of them have the same."""
    schedules = [[(r["step"], r["phase"]) for r in each.trials[0].epochs] for each in configurations]
    same = bool(schedules) and all(schedule == schedules[0] for schedule in schedules)
    dress(axes, configurations[0].trials[0].epochs if same else [])


def _legend(figure: Figure, axes: Axes, count: int) -> None:
    if count:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(5, count), fontsize=8)


def _selection_note(chosen: Sequence[Configuration], analysis: ProblemAnalysis) -> str:
    every = len(analysis.columns)
    return f" Selected: {len(chosen)} of {every} configurations, by sparsity." if len(chosen) < every else ""
