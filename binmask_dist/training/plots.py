"""PNGs of a run, from the records of its metrics.jsonl."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from binmask_dist.files import replacing
from binmask_dist.training.metrics_file import FILE_NAME, read_records
from binmask_dist.training.progress import main_metric

# of Okabe and Ito: told apart with any kind of colour vision
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
NAMED_LAYERS = 60  # of more, names would overlap

Record = dict[str, Any]


def draw(folder: str | Path) -> list[Path]:
    """Write sparsity.png, loss.png and layers.png into a run folder; returns their paths."""
    folder = Path(folder)
    records = read_records(folder / FILE_NAME)
    epochs = [record for record in records if record["kind"] == "epoch"]
    steps = [record for record in records if record["kind"] == "step"]
    figures = {"sparsity": plot_sparsity(epochs), "loss": plot_loss(steps, epochs), "layers": plot_layers(epochs)}
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        save(figure, paths[-1])
    return paths


def save(figure: Figure, path: Path, **options: Any) -> None:
    """In the format of the suffix."""
    FigureCanvasAgg(figure)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, **options)


def plot_sparsity(epochs: list[Record]) -> Figure:
    """Sparsity and the test metric over the steps."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    metric = main_metric(epochs[-1])
    percent = 100 if metric.endswith("accuracy") else 1
    for axes, key, scale, colour in ((upper, "sparsity", 100, BLUE), (lower, metric, percent, ORANGE)):
        x, y = _curve(epochs, key)
        axes.plot(x, scale * y, color=colour, marker="o", markersize=3)
        axes.annotate(
            f"{scale * y[-1]:.2f}{'%' if scale == 100 else ''}",
            (x[-1], scale * y[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
        dress(axes, epochs)
    upper.set(ylim=(-3, 103), xlim=(0, None), ylabel="masked weights gone (%)")
    upper.set_title("Sparsity and test metric over training", loc="left")
    lower.set(xlabel="optimizer step", ylabel=metric.replace("_", " ") + (" (%)" if percent == 100 else ""))
    return figure


def plot_loss(steps: list[Record], epochs: list[Record]) -> Figure:
    """The loss of single steps, its mean over epochs, and that on the test data."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    curves: list[tuple[list[Record], str, str, dict[str, Any]]] = [
        (steps, "loss", "training, single steps", {"color": GREY, "linewidth": 0.7, "alpha": 0.8}),
        (epochs, "train_loss", "training, mean of the epoch", {"color": BLUE, "marker": "o", "markersize": 3}),
        (epochs, "test_loss", "test", {"color": ORANGE, "marker": "s", "markersize": 3}),
        (epochs, "validation_loss", "validation", {"color": GREEN, "marker": "s", "markersize": 3}),
    ]
    drawn = []
    for records, key, label, style in curves:
        x, y = _curve(records, key)
        if len(x):
            axes.plot(x, y, label=label, **style)
            drawn.append(y)
    scale_losses(axes, drawn)
    dress(axes, epochs)
    axes.set(xlabel="optimizer step", ylabel="loss", xlim=(0, None))
    axes.set_title("Loss over training", loc="left")
    axes.legend(loc="upper right")
    return figure


def plot_layers(epochs: list[Record]) -> Figure:
    """Sparsity of each layer: over the epochs as colours, and at the end as bars."""
    layers = list(epochs[-1]["layer_sparsity"])
    sparsity = np.array([[100 * record["layer_sparsity"][name] for record in epochs] for name in layers])
    named = len(layers) <= NAMED_LAYERS
    height = 1.6 + 0.22 * len(layers) if named else 7
    figure = Figure(figsize=(9, height), layout="constrained")
    heat, bars = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    image = heat_map(heat, layers, sparsity)
    figure.colorbar(image, ax=heat, label="masked weights gone (%)", pad=0.02, aspect=4 * height)
    heat.set_title("Sparsity by layer")
    bars.barh(range(len(layers)), sparsity[:, -1], color=BLUE, height=0.75)
    if named:
        for row, value in enumerate(sparsity[:, -1]):
            bars.text(103, row, f"{value:.1f}", va="center", fontsize=8)
    bars.set(xlim=(0, 125 if named else 102), xticks=(0, 50, 100), xlabel="%", title="at the end")
    bars.tick_params(left=False)
    bars.spines[["top", "right"]].set_visible(False)
    return figure


def heat_map(axes: Axes, layers: Sequence[str], sparsity: np.ndarray) -> AxesImage:
    """Percentages over epochs, one row for each layer."""
    image = axes.imshow(
        sparsity,
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        vmin=0,
        vmax=100,
        extent=(0.5, sparsity.shape[1] + 0.5, len(layers) - 0.5, -0.5),
    )
    named = len(layers) <= NAMED_LAYERS
    if named:
        axes.set_yticks(range(len(layers)), layers, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set(xlabel="epoch", ylabel="" if named else "layer, from input to output")
    return image


def scale_losses(axes: Axes, curves: Sequence[np.ndarray]) -> None:
    """In log scale if they span much."""
    values = np.concatenate([curve[np.isfinite(curve)] for curve in curves]) if curves else np.ones(0)
    if len(values) and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")


def _curve(records: list[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values; None, which stands for NaN in records, is a gap."""
    points = [(record["step"], record[key]) for record in records if key in record]
    x = np.array([step for step, _ in points])
    return x, np.array([np.nan if value is None else value for _, value in points], dtype=float)


def dress(axes: Axes, epochs: list[Record]) -> None:
    """Light grid, and a shaded part for fine-tuning."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    trained = [record["step"] for record in epochs if record["phase"] == "train"]
    if len(trained) < len(epochs):
        start = trained[-1] if trained else 0
        axes.axvspan(start, epochs[-1]["step"], color=GREEN, alpha=0.12, linewidth=0)
        above = axes.get_xaxis_transform()
        axes.text(epochs[-1]["step"], 1.01, "fine-tuning", transform=above, ha="right", fontsize=8, color=GREEN)
