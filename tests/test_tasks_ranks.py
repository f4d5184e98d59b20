"""Texts, language models and tables on two real ranks whose engine cuts weights up: what one process trains."""

import json
from pathlib import Path

import pytest
import tiny_texts
import torch
from jobs import result, train_here
from ranks import run_two_ranks
from ranks.tasks import ENGINES, ENGINES_IN_BF16
from safetensors.torch import load_file
from sklearn.datasets import load_breast_cancer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from binmask_dist.packed_masks import load_masks

COMMON = dict(
    epochs=4, warmup=0.25, lam=3e-4, mask_lr=0.06, mask_lr_final=0.02, optimizer="AdamW", lr=1e-2, trackers=[]
)
NO_DROPOUT = {
    "bert": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every task trained by each engine, and as "alone" by one process."""
    folder = tmp_path_factory.mktemp("tasks")
    table = folder / "table.csv"
    load_breast_cancer(as_frame=True).frame.to_csv(table, index=False)
    bert = tiny_texts.save_bert(folder / "bert", **NO_DROPOUT["bert"])
    gpt2 = tiny_texts.save_gpt2(folder / "gpt2", **NO_DROPOUT["gpt2"])
    for path, kind in ((bert, AutoModelForSequenceClassification), (gpt2, AutoModelForCausalLM)):
        torch.manual_seed(0)  # transformers draws other weights where ZeRO-3 cuts them up
        kind.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
    reviews, book = tiny_texts.write_reviews(folder / "reviews.jsonl"), tiny_texts.write_book(folder / "book.txt")
    tasks = [
        dict(
            task="text",
            model=str(bert),
            pretrained=True,
            dataset=str(reviews),
            input_columns=["text"],
            batch_size=8,
            ema_decay=0.8,
        ),
        dict(task="lm", model=str(gpt2), pretrained=True, dataset=str(book), max_length=8, batch_size=4),
        dict(task="tabular", model="mlp_tanh", dataset=str(table), batch_size=64),
    ]
    tasks = [{**COMMON, "max_length": 16, "run_root": str(folder), **values} for values in tasks]
    in_bf16 = [
        {**COMMON, **values, "run_root": str(folder), "mixed_precision": "bf16"}
        for values in (
            dict(task="tabular", model="mlp_tanh", dataset=str(table), batch_size=64),
            dict(task="image", model="test_resnet", batch_size=64, epochs=2, warmup=0.0),
        )
    ]
    (folder / "tasks.json").write_text(json.dumps(tasks + in_bf16))
    run_two_ranks("tasks.py", folder)
    for values in tasks:
        rest = {key: value for key, value in values.items() if key != "run_root"}
        train_here(folder, f"{values['task']}-alone", **rest)
    return folder


@pytest.mark.parametrize(("task", "engine"), ENGINES.items())
def test_tasks_are_trained_as_by_one_process(folder: Path, task: str, engine: str) -> None:
    ours, alone = folder / f"{task}-{engine}", folder / f"{task}-alone"
    assert result(ours)["processes"] == 2
    assert 0.1 < result(ours)["sparsity"] < 1
    assert result(ours)["sparsity"] == pytest.approx(result(alone)["sparsity"], abs=2e-3)  # sums in another order
    assert result(ours)["test_loss"] == pytest.approx(result(alone)["test_loss"], rel=1e-2)
    assert result(ours)["test_examples"] == result(alone)["test_examples"]
    saved, expected = (load_file(path / "model" / "model.safetensors") for path in (ours, alone))
    assert {name: tensor.shape for name, tensor in saved.items()} == {n: t.shape for n, t in expected.items()}
    assert all(not saved[name][~mask].any() for name, mask in load_masks(ours / "masks.safetensors").items())


@pytest.mark.parametrize(("task", "engine"), ENGINES_IN_BF16.items())
def test_inputs_are_in_the_precision_of_a_model_that_deepspeed_has_cast(folder: Path, task: str, engine: str) -> None:
    ours = folder / f"{task}-{engine}bf16"
    assert result(ours)["mixed_precision"] == "bf16"
    assert 0.1 < result(ours)["sparsity"] < 1
    assert result(ours)["test_accuracy"] > 0.6
