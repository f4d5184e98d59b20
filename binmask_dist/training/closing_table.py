"""What a run says at its end: figures read back from the saved files, and one table."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from binmask_dist.training.progress import main_metric, metric_text

WORTH_COMPRESSING = 2**28  # bytes; more would keep the user waiting, only to learn a size
NEAR_TARGET = 0.005  # half a point
SMALLEST = 1e-4  # a weight that counts in L0
LISTED_LAYERS = 40  # of more, the table names the densest and the sparsest only


def saved_figures(saved: Sequence[Path], layer_sparsity: dict[str, float]) -> dict[str, Any]:
    """Sparsity and sizes of the saved files; raises if they are less sparse than the masks of the run."""
    counts = zeros_in_files(saved, layer_sparsity)
    for name, (zeros, elements) in counts.items():
        if zeros < round(layer_sparsity[name] * elements):
            raise RuntimeError(
                f"{saved[0].parent} has {zeros} zeros in {name}, where the masks have "
                f"{layer_sparsity[name] * elements:.0f}: the masks did not reach the saved file"
            )
    all_zeros, all_elements = (sum(column) for column in zip(*counts.values(), strict=True))
    return {
        "sparsity": all_zeros / all_elements,
        "layer_sparsity": {name: zeros / elements for name, (zeros, elements) in counts.items()},
        "masked_weights": all_elements,
        "weights_left": all_elements - all_zeros,
        **sizes(saved),
    }


def zeros_in_files(saved: Sequence[Path], names: Sequence[str] | dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Name -> (zeros, elements), counted in the files: what a run believes of its masks proves nothing."""
    found = {}
    for path in saved:
        with safe_open(path, framework="pt") as file:
            for name in set(file.keys()) & set(names):
                tensor = file.get_tensor(name)
                found[name] = (tensor.numel() - int(torch.count_nonzero(tensor)), tensor.numel())
    missing = [name for name in names if name not in found]
    if missing:
        raise RuntimeError(f"{missing[0]} is masked but is in none of {', '.join(path.name for path in saved)}")
    return {name: found[name] for name in names}


def weight_norms(saved: Sequence[Path], names: Sequence[str] | dict[str, Any]) -> dict[str, float]:
    """Means over all these weights: part with |w| >= 1e-4, mean of |w|, and root of the mean of w^2."""
    count, sums = 0, torch.zeros(3, dtype=torch.float64)
    for path in saved:
        with safe_open(path, framework="pt") as file:
            for name in set(file.keys()) & set(names):
                size = file.get_tensor(name).double().abs()
                count += size.numel()
                sums += torch.stack([(size >= SMALLEST).sum().double(), size.sum(), size.square().sum()])
    on, absolute, square = (sums / count).tolist()
    return {"weight_l0": on, "weight_l1": absolute, "weight_l2": square**0.5}


def sizes(saved: Sequence[Path]) -> dict[str, Any]:
    file_bytes = sum(path.stat().st_size for path in saved)
    small = file_bytes <= WORTH_COMPRESSING
    return {
        "files": [path.name for path in saved],
        "file_bytes": file_bytes,
        "gzip_bytes": sum(map(_gzip_bytes, saved)) if small else None,
    }


def _gzip_bytes(path: Path) -> int:
    gzip = zlib.compressobj(level=1, wbits=31)  # 31: in gzip's format
    with path.open("rb") as file:
        compressed = sum(len(gzip.compress(part)) for part in iter(lambda: file.read(2**20), b""))
    return compressed + len(gzip.flush())


def table(result: dict[str, Any], folder: Path) -> str:
    """The closing table."""
    sections = [_outcome_rows(result), _layer_rows(result["layer_sparsity"]), _size_rows(result)]
    width = max(len(label) for rows in sections for label, _ in rows)
    line = "-" * max(60, width + 40)
    parts = ["\n".join(f"{label:<{width}}  {text}".rstrip() for label, text in rows) for rows in sections]
    head = f"{result['model']}, task {result['task']}; sparsity is counted in the saved file"
    return f"\n{line}\n".join([head, *parts, f"{'run folder':<{width}}  {folder}"])


def _outcome_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    counts = ("test_examples", "test_correct", "test_tokens")
    metrics = [key for key in result if key.startswith("test_") and key not in counts]
    first = main_metric(result)
    metrics.sort(key=lambda key: key != first)
    before = result["before_finetuning"] or {}
    rows = []
    for key in metrics:
        text = metric_text(key, result[key])
        if key in before:
            text += f" after fine-tuning, {metric_text(key, before[key])} before"
        elif key == first and "test_examples" in result:
            text += f" ({result['test_examples']:,} examples)"
        rows.append((key.replace("_", " "), text))
    left, masked = result["weights_left"], result["masked_weights"]
    rows.append(("masked weights gone", f"{result['sparsity']:.2%} ({left:,} of {masked:,} left)"))
    target = result.get("target_sparsity")
    if target is not None:
        is_near = abs(result["sparsity"] - target) <= NEAR_TARGET
        rows.append(("target", f"{target:.2%}, {'met' if is_near else 'MISSED: see docs/training.md'}"))
    rows.append(("training", f"{result['seconds']:.1f} s, {result['engine']}, {processes_text(result['processes'])}"))
    return rows


def processes_text(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _layer_rows(layers: dict[str, float]) -> list[tuple[str, str]]:
    rows = [(name, f"{sparsity:.2%} gone") for name, sparsity in layers.items()]
    if len(rows) <= LISTED_LAYERS:
        return rows
    rows.sort(key=lambda row: layers[row[0]])
    ends = LISTED_LAYERS // 4
    return [*rows[:ends], (f"... {len(rows) - 2 * ends} layers between, in result.json", ""), *rows[-ends:]]


def _size_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    files = result["files"]
    label = files[0] if len(files) == 1 else f"{len(files)} safetensors files"
    rows = [(label, f"{result['file_bytes']:,} bytes: no smaller than dense, it stores the zeros")]
    if result["gzip_bytes"] is not None:
        smaller = (
            "smaller, the zeros compress" if result["gzip_bytes"] < 0.9 * result["file_bytes"] else "hardly smaller"
        )
        rows.append(("gzipped, by any tool", f"{result['gzip_bytes']:,} bytes: {smaller}"))
    return [*rows, ("running the model", "no faster than dense: ordinary kernels multiply the zeros too")]
