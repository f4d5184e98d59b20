"""What a run shows: progress, the closing table, plots and where it took place."""

import getpass
import json
import os
import pty
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tracked
from matplotlib.image import imread
from safetensors.torch import save_file

from binmask_dist.training import closing_table, plots
from binmask_dist.training.closing_table import saved_figures, table
from binmask_dist.training.environment import environment, memory_record
from binmask_dist.training.progress import Progress

MAIN, OTHER = SimpleNamespace(is_main_process=True), SimpleNamespace(is_main_process=False)


# The saved files


def save_sparse_model(folder: Path) -> tuple[list[Path], dict[str, float]]:
    """Two files; 75% and 20% of the masked weights in them are zero."""
    first, second = torch.randn(4, 100) + 10, torch.randn(10, 10) + 10
    first[:3] = 0
    second[:2] = 0
    paths = [folder / f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
    save_file({"a.weight": first, "a.bias": torch.zeros(4)}, paths[0])
    save_file({"b.weight": second, "norm.weight": torch.ones(9)}, paths[1])
    return paths, {"a.weight": 0.75, "b.weight": 0.2}


def test_figures_are_counted_in_all_saved_files(tmp_path: Path) -> None:
    paths, layer_sparsity = save_sparse_model(tmp_path)
    figures = saved_figures(paths, layer_sparsity)
    assert figures["layer_sparsity"] == layer_sparsity
    assert list(figures["layer_sparsity"]) == ["a.weight", "b.weight"]
    assert (figures["sparsity"], figures["masked_weights"], figures["weights_left"]) == (320 / 500, 500, 180)
    assert figures["file_bytes"] == sum(path.stat().st_size for path in paths)
    assert figures["gzip_bytes"] < figures["file_bytes"]


def test_a_file_that_the_masks_did_not_reach_is_found_out(tmp_path: Path) -> None:
    paths, layer_sparsity = save_sparse_model(tmp_path)
    assert saved_figures(paths, {**layer_sparsity, "b.weight": 0.19})["layer_sparsity"]["b.weight"] == 0.2
    with pytest.raises(RuntimeError, match=r"20 zeros in b.weight, where the masks have 21: the masks did not reach"):
        saved_figures(paths, {**layer_sparsity, "b.weight": 0.21})
    with pytest.raises(RuntimeError, match=r"b.weight is masked but is in none of model-00001-of-00002.safetensors"):
        saved_figures(paths[:1], layer_sparsity)


# The table


def make_result(paths: list[Path], layer_sparsity: dict[str, float], **changes: Any) -> dict[str, Any]:
    return {
        "task": "image",
        "model": "test_resnet",
        "test_loss": 0.0123,
        "test_accuracy": 0.9972,
        "test_examples": 360,
        "before_finetuning": None,
        **saved_figures(paths, layer_sparsity),
        "seconds": 23.04,
        "engine": "ddp",
        "processes": 2,
        **changes,
    }


def test_the_table_says_what_came_out_and_what_got_no_smaller(tmp_path: Path) -> None:
    lines = table(make_result(*save_sparse_model(tmp_path)), Path("runs/mine")).splitlines()
    assert lines[0].startswith("test_resnet, task image")
    rows = {line[: line.index("  ")]: line[line.index("  ") :].strip() for line in lines if "  " in line}
    assert rows["test accuracy"] == "99.72% (360 examples)"
    assert rows["test loss"] == "0.0123"
    assert rows["masked weights gone"] == "64.00% (180 of 500 left)"
    assert (rows["a.weight"], rows["b.weight"]) == ("75.00% gone", "20.00% gone")
    assert rows["training"] == "23.0 s, ddp, 2 processes"
    assert "no smaller than dense" in rows["2 safetensors files"]
    assert "no faster than dense" in rows["running the model"]
    assert rows["run folder"] == "runs/mine"


def test_the_table_compares_with_before_fine_tuning(tmp_path: Path) -> None:
    before = {"test_loss": 0.02, "test_accuracy": 0.95}
    text = table(make_result(*save_sparse_model(tmp_path), before_finetuning=before), Path("x"))
    assert "99.72% after fine-tuning, 95.00% before" in text
    assert "0.0123 after fine-tuning, 0.0200 before" in text


def test_the_table_of_a_language_model_shows_perplexity(tmp_path: Path) -> None:
    result = make_result(*save_sparse_model(tmp_path), test_perplexity=1234.567)
    del result["test_accuracy"]
    assert "test perplexity       1,234.57 (360 examples)" in table(result, Path("x"))


def test_the_table_of_a_deep_network_stays_short(tmp_path: Path) -> None:
    layers = {f"blocks.{index}.weight": index / 200 for index in range(100)}
    text = table({**make_result(*save_sparse_model(tmp_path)), "layer_sparsity": layers}, Path("x"))
    assert len(text.splitlines()) < 40
    assert "... 80 layers between, in result.json" in text
    assert "blocks.0.weight" in text
    assert "blocks.99.weight" in text
    assert "blocks.50.weight" not in text


def test_a_large_model_is_not_compressed_for_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing_table, "WORTH_COMPRESSING", 100)
    result = make_result(*save_sparse_model(tmp_path))
    assert result["gzip_bytes"] is None
    assert "gzip" not in table(result, Path("x"))


# Plots


@pytest.mark.parametrize(("layers", "metric"), [(3, "accuracy"), (150, "perplexity")])
def test_plots_are_drawn_from_the_records(tmp_path: Path, layers: int, metric: str) -> None:
    records = tracked.make_records()
    for record in records:
        if record["kind"] == "epoch":
            record[f"test_{metric}"] = record.pop("test_accuracy")
            record["layer_sparsity"] = {f"layer{index}.weight": index / layers for index in range(layers)}
    records[3]["loss"] = None  # a NaN
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    paths = plots.draw(str(tmp_path))
    assert [path.name for path in paths] == ["sparsity.png", "loss.png", "layers.png"]
    for path in paths:
        pixels = imread(path)
        assert min(pixels.shape[:2]) > 300
        assert np.ptp(pixels[..., :3]) > 0.9  # something is drawn on it


def test_curves_are_those_of_the_records() -> None:
    epochs = [record for record in tracked.make_records() if record["kind"] == "epoch"]
    upper, lower = plots.plot_sparsity(epochs).axes
    assert upper.lines[0].get_xdata().tolist() == [10, 20, 30, 40]
    assert upper.lines[0].get_ydata() == pytest.approx([100 * record["sparsity"] for record in epochs])
    assert lower.lines[0].get_ydata() == pytest.approx([100 * record["test_accuracy"] for record in epochs])
    assert "fine-tuning" in " ".join(text.get_text() for text in upper.texts)


# Progress


def progress_of(accelerator: Any, records: list[dict[str, Any]]) -> None:
    progress = Progress(4, tracked.STEPS_PER_EPOCH, accelerator, start_step=10)
    for record in records:
        if record["step"] > 10:
            progress.step(record["loss"]) if record["kind"] == "step" else progress.epoch(record)
    progress.close()


def test_one_line_per_epoch_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress_of(MAIN, tracked.make_records())
    output = capsys.readouterr()
    assert output.err == ""
    assert [line.split("  ")[0] for line in output.out.splitlines()] == [
        "epoch 2/4",
        "epoch 3/4",
        "epoch 4/4, fine-tune",
    ]
    assert "loss 0.5000  test accuracy  75.00%  sparsity 10.00%  flips 120 off, 20 on" in output.out


def test_other_processes_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    progress_of(OTHER, tracked.make_records())
    output = capsys.readouterr()
    assert output.out == output.err == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 160))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress_of(MAIN, tracked.make_records())
    shown = os.read(master, 2**16).decode()
    os.close(master)
    assert "epoch 4/4, fine-tune" in shown
    assert "accuracy=87.50%" in shown
    assert "sparsity=30.00%" in shown
    assert "25/40" in shown  # from step 10, one of two steps has a record
    assert capsys.readouterr().out == ""


# The environment


def test_the_environment_names_versions_but_no_person(monkeypatch: pytest.MonkeyPatch) -> None:
    home, user = str(Path.home()), getpass.getuser()
    monkeypatch.setattr(sys, "argv", ["launch/train.py", f"--dataset={home}/data", f"/scratch/{user}/x", "--lam=1e-6"])
    found = environment()
    assert {"binmask_dist", "torch", "accelerate", "wandb"} <= found["versions"].keys()
    assert found["command"] == ["launch/train.py", "--dataset=~/data", "/scratch/USER/x", "--lam=1e-6"]
    assert found["cpus"] >= 1
    assert home not in json.dumps(found)


def test_the_commit_is_that_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment()["git_commit"] is None


def test_memory_grows_with_what_is_used() -> None:
    before = memory_record()["peak_rss_bytes"]
    held = np.ones(40_000_000)  # 320 MB
    assert memory_record()["peak_rss_bytes"] >= min(before, held.nbytes)
    assert 1e8 < before < 1e12
