"""The training job, through its real command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import load_file

from binmask_dist.training import run_folder
from binmask_dist.training.config import TrainConfig, parse_config
from binmask_dist.training.data import digits, load_images
from binmask_dist.training.report import saved_figures

ROOT = Path(__file__).parent.parent
EPOCHS = 3


def start(*command: str) -> subprocess.CompletedProcess[str]:
    """Run it from the project's folder, without what an outer launcher may have set."""
    outer = ("ACCELERATE_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("runs")
    launcher = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml")
    options = (f"--run_root={root}", "--name=short", f"--epochs={EPOCHS}", "--warmup=0.34", "--lam=1e-05")
    done = start(*launcher, "--main_process_port", "0", "launch/train.py", *options)
    assert done.returncode == 0, done.stderr
    return root / "short", done.stdout


def test_the_run_folder_is_complete(run: tuple[Path, str]) -> None:
    folder, _ = run
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "model.safetensors", "result.json", "sparsity.png"}
    config = json.loads((folder / "config.json").read_text())
    assert (config["epochs"], config["lam"], config["seed"]) == (EPOCHS, 1e-5, 0)
    assert (folder / "sparsity.png").read_bytes().startswith(b"\x89PNG")


def test_there_is_one_record_per_epoch(run: tuple[Path, str]) -> None:
    folder, _ = run
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == list(range(EPOCHS))
    waiting, first, last = records
    assert waiting["sparsity"] == waiting["mask_lr"] == waiting["on_to_off"] == 0
    assert first["mask_lr"] == TrainConfig.mask_lr
    assert last["mask_lr"] == pytest.approx(TrainConfig.mask_lr_final)
    assert first["on_to_off"] > 1000
    assert last["sparsity"] > 0.5
    assert last["train_loss"] < waiting["train_loss"]
    net = sum(record["on_to_off"] - record["off_to_on"] for record in records)
    masked = json.loads((folder / "result.json").read_text())["masked_weights"]
    assert net == round(last["sparsity"] * masked)


def test_the_saved_model_is_what_was_reported(run: tuple[Path, str]) -> None:
    """In a stock timm model, on one process, which counts every test image once."""
    folder, _ = run
    result = json.loads((folder / "result.json").read_text())
    model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    images, labels = load_images(TrainConfig.image_size).test.tensors
    with torch.no_grad():
        correct = int((model.eval()(images).argmax(dim=1) == labels).sum())
    assert (correct, len(labels)) == (result["test_correct"], result["test_examples"])
    weights = dict(model.named_parameters())
    zeros = sum(int((weights[name] == 0).sum()) for name in result["layer_sparsity"])
    assert result["weights_left"] == result["masked_weights"] - zeros
    assert (result["processes"], result["engine"]) == (2, "ddp")


def test_the_closing_table_says_what_got_smaller(run: tuple[Path, str]) -> None:
    folder, output = run
    result = json.loads((folder / "result.json").read_text())
    assert output.count("epoch ") == EPOCHS  # one line each, from one process
    assert output.count("test accuracy   ") == 1
    assert f"{result['test_accuracy']:.2%}" in output
    assert f"{result['sparsity']:.2%}" in output
    assert "no smaller than dense" in output
    assert "no faster than dense" in output
    assert all(name in output for name in result["layer_sparsity"])


def test_an_existing_run_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "broadcast_object_list", lambda answer: answer)  # alone: nobody to tell
    alone = SimpleNamespace(is_main_process=True)
    config = TrainConfig(run_root=str(tmp_path), name="first")
    folder = run_folder.RunFolder.create(config, alone)
    assert json.loads((folder.path / "config.json").read_text())["name"] == "first"
    with pytest.raises(SystemExit, match="holds a run already; give another --name"):
        run_folder.RunFolder.create(config, alone)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot be made"):
        run_folder.RunFolder.create(TrainConfig(run_root=str(tmp_path / "file")), alone)


def test_a_misspelt_key_names_the_nearest() -> None:
    done = start("launch/train.py", "--maks_lr=3e-2")
    assert done.returncode == 2
    assert done.stderr == "launch/train.py: error: unknown key 'maks_lr': did you mean 'mask_lr'?\n"


def parse_error(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        parse_config(args)
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--lamb=1e-6"], "unknown key 'lamb': did you mean 'lam'?"),
        (["--epoch", "3"], "unknown key 'epoch': did you mean 'epochs'?"),  # not taken as an abbreviation
        (["--xyz"], "unknown key 'xyz': --help lists the keys."),
        (["--lam=much"], 'Parser key "lam": Expected a'),
        (["--epochs=0"], "epochs must be above zero, not 0"),
        (["--config=nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_arguments_get_one_line(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = parse_error(args, capsys)
    assert text in message
    assert message.count("\n") == 1


def test_yaml_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("lam: 1e-6\nseed: 3\ntargets: [fc, conv1.0]\n")
    config = parse_config(["--config", str(path), "--seed=5", "--mask_lr=1e-02"])
    assert (config.lam, config.seed, config.mask_lr, config.targets) == (1e-6, 5, 1e-2, ("fc", "conv1.0"))
    path.write_text("mask_lr_finale: 1\n")
    assert "unknown key 'mask_lr_finale': did you mean 'mask_lr_final'?" in parse_error(["--config", str(path)], capsys)


def test_help_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_config(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "--lam LAM" in text
    assert "penalty per weight that is on" in text
    assert f"default: {TrainConfig.lam}" in text


def test_the_split_of_the_digits_is_fixed_and_stratified() -> None:
    data = digits()
    assert (data["train"].num_rows, data["test"].num_rows) == (1437, 360)
    assert torch.tensor(data["test"]["label"][:]).bincount().tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    assert data["test"]["label"][:] == digits()["test"]["label"][:]


def test_a_file_less_sparse_than_the_masks_is_refused(run: tuple[Path, str]) -> None:
    folder, _ = run
    name = "layer4.0.conv1.weight"
    with pytest.raises(RuntimeError, match="the masks did not reach the saved file"):
        saved_figures(folder / "model.safetensors", {name: 0.9999})
