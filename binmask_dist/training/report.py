"""What a run says at its end: figures read back from the saved file, one table, one plot."""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from binmask_dist.files import replacing


def zeros_in_file(path: Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Name -> (zeros, elements), counted in the file: what a run believes of its masks is no proof of what it saved."""
    counts = {}
    with safe_open(path, framework="pt") as file:
        for name in names:
            tensor = file.get_tensor(name)
            counts[name] = (tensor.numel() - int(torch.count_nonzero(tensor)), tensor.numel())
    return counts


def sizes(path: Path) -> dict[str, int]:
    content = path.read_bytes()
    return {"file_bytes": len(content), "gzip_bytes": len(gzip.compress(content, compresslevel=1))}


def saved_figures(path: Path, layer_sparsity: dict[str, float]) -> dict[str, Any]:
    """Sparsity and sizes of the saved file; raises if it is less sparse than the masks of the run."""
    counts = zeros_in_file(path, layer_sparsity)
    for name, (zeros, elements) in counts.items():
        if zeros < round(layer_sparsity[name] * elements):
            raise RuntimeError(
                f"{path} has {zeros} zeros in {name}, where the masks have {layer_sparsity[name] * elements:.0f}: "
                "the masks did not reach the saved file"
            )
    all_zeros, all_elements = (sum(column) for column in zip(*counts.values(), strict=True))
    return {
        "sparsity": all_zeros / all_elements,
        "layer_sparsity": {name: zeros / elements for name, (zeros, elements) in counts.items()},
        "masked_weights": all_elements,
        "weights_left": all_elements - all_zeros,
        **sizes(path),
    }


def table(result: dict[str, Any], folder: Path) -> str:
    """The closing table."""
    layers = result["layer_sparsity"]
    width = max(len("gzipped, by any tool"), *map(len, layers))
    rows = [
        (
            "test accuracy",
            f"{result['test_accuracy']:.2%}  ({result['test_correct']:,} of {result['test_examples']:,})",
        ),
        (
            "masked weights gone",
            f"{result['sparsity']:.2%}  ({result['weights_left']:,} of {result['masked_weights']:,} left)",
        ),
        ("training", f"{result['seconds']:.1f} s, {result['engine']}, {result['processes']} process(es)"),
        None,
        *((name, f"{sparsity:.2%} gone") for name, sparsity in layers.items()),
        None,
        ("model.safetensors", f"{result['file_bytes']:,} bytes: no smaller than dense, it stores the zeros"),
        ("gzipped, by any tool", f"{result['gzip_bytes']:,} bytes: smaller, the zeros compress"),
        ("running the model", "no faster than dense: ordinary kernels multiply the zeros too"),
    ]
    line = "-" * (width + 50)
    body = [line if row is None else f"{row[0]:<{width}}  {row[1]}" for row in rows]
    head = f"sparsity is counted in the saved file, in {folder}"
    return "\n".join([head, line, *body, line])


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Sparsity and test accuracy over the epochs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    epochs = [record["epoch"] + 1 for record in records]
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="epoch", ylabel="%", ylim=(0, 102))
    axes.plot(epochs, [100 * record["sparsity"] for record in records], label="masked weights gone")
    axes.plot(epochs, [100 * record["test_accuracy"] for record in records], label="test accuracy")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
