"""What a selection leaves behind: the names in CSV and JSON, and pictures of the mask.

features.csv    every feature of the last selection: its smoothed mask, and whether it is chosen
result.json     for each count that was asked for: what was chosen, with which lam and cut, in how many steps
mask.png        smoothed masks, sorted: what has converged is at the top or at the bottom
pixels.png      smoothed masks and chosen pixels as images, for inputs that are images
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from binmask_dist.files import replacing, write_atomically
from binmask_dist.selection.problem import Problem
from binmask_dist.selection.search import HIGHEST_CUT, LOWEST_CUT, Selection, undecided


def describe(selection: Selection, problem: Problem, names: Sequence[str]) -> dict[str, Any]:
    """As JSON has it. Chosen features come with the largest mask first."""
    smoothed = problem.per_feature(selection.smoothed)
    chosen = np.flatnonzero(problem.per_feature(selection.support))
    order = chosen[np.argsort(-smoothed[chosen], kind="stable")]
    groups = {}
    if problem.group_names is not None:
        groups["groups"] = [problem.group_names[number] for number in np.flatnonzero(selection.support)]
    return {
        "asked": selection.asked,
        "chosen": selection.count,
        "exact": selection.exact,
        "lam": selection.lam,
        "cut": selection.cut,
        "steps": selection.steps,
        "fits": selection.fits,
        "seconds": selection.seconds,
        "undecided": undecided(selection.smoothed),
        "converged": selection.converged,
        **groups,
        "features": [{"name": names[i], "column": int(i), "mask": float(smoothed[i])} for i in order],
    }


def write_csv(path: Path, selection: Selection, problem: Problem, names: Sequence[str]) -> None:
    smoothed, support = problem.per_feature(selection.smoothed), problem.per_feature(selection.support)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["feature", "column", "mask", "chosen"])
    for column, name in enumerate(names):
        writer.writerow([name, column, f"{smoothed[column]:.6g}", int(support[column])])
    write_atomically(path, text.getvalue())


def draw(folder: Path, selections: Sequence[Selection], problem: Problem) -> None:
    with replacing(folder / "mask.png") as path:
        _mask_figure(selections).savefig(path, dpi=150)
    if len(problem.example_shape) >= 2:
        with replacing(folder / "pixels.png") as path:
            _pixel_figure(selections[-1], problem).savefig(path, dpi=150)


def _mask_figure(selections: Sequence[Selection]) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhspan(0.15, 0.85, color="0.93", linewidth=0)
    axes.text(1.0, 0.83, "undecided", transform=axes.get_yaxis_transform(), ha="right", va="top", color="0.5")
    for selection in selections:
        values = np.sort(selection.smoothed)[::-1]
        label = f"{selection.count} chosen, lam {selection.lam:.3g}, {undecided(selection.smoothed):.0%} undecided"
        (line,) = axes.plot(np.arange(1, len(values) + 1), values, label=label)
        axes.plot([selection.count], [selection.cut], "o", color=line.get_color())
    axes.set(
        xlabel="features, largest mask first (dot: how many are chosen, and the cut)",
        ylabel="smoothed mask",
        ylim=(-0.03, 1.03),
        yticks=(0, LOWEST_CUT, 0.5, HIGHEST_CUT, 1),
    )
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _pixel_figure(selection: Selection, problem: Problem) -> Figure:
    height, width = problem.example_shape[-2:]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    pictures = {
        "smoothed mask": problem.per_feature(selection.smoothed),
        f"{selection.count} chosen": problem.per_feature(selection.support).astype(float),
    }
    for axes, (title, values) in zip(figure.subplots(1, 2), pictures.items(), strict=True):
        # several channels: the share of them that is on
        image = values.reshape(-1, height, width).mean(axis=0)
        shown = axes.imshow(image, vmin=0, vmax=1, cmap="viridis")
        axes.set(title=title, xticks=(), yticks=())
    figure.colorbar(shown, ax=figure.axes, shrink=0.8)
    return figure


def summary(results: Sequence[dict[str, Any]]) -> str:
    """The closing table."""
    rows = [("asked", "chosen", "lam", "cut", "steps", "undecided", "seconds", "first names")]
    for result in results:
        first = [feature["name"] for feature in result["features"][:3]]
        names = ", ".join(first) + (", ..." if len(result["features"]) > 3 else "")
        asked = "-" if result["asked"] is None else str(result["asked"])
        figures = (f"{result['lam']:.3g}", f"{result['cut']:.2f}", str(result["steps"]), f"{result['undecided']:.1%}")
        rows.append((asked, str(result["chosen"]), *figures, f"{result['seconds']:.1f}", names))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    for result in results:
        if not result["exact"]:
            lines.append(
                f"no lam and cut gave {result['asked']} features within {result['steps']} steps: "
                f"{result['chosen']} is the nearest count that was found"
            )
    return "\n".join(lines)
