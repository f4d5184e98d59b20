"""BinMaskCallback in the real transformers Trainer: in this process, and on two ranks that are started once."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, GradientState
from ranks import run_two_ranks
from ranks.engines import differences, snapshot
from ranks.trainer import (
    ENGINES,
    EPOCHS,
    MASK,
    MIDDLE,
    STEPS,
    InterruptAt,
    Interrupted,
    make_model,
    make_trainer,
    zeros_in_file,
)
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import BertForSequenceClassification, Trainer, TrainerCallback

from binmask_dist.integrations.hf_trainer import BinMaskCallback, _check_engine


@pytest.fixture(scope="module", autouse=True)
def leave_no_accelerator():
    """The Trainer's is one for the whole process, and other tests make their own."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Reporter(TrainerCallback):
    """Gets what W&B and TensorBoard get, whose callbacks come first too."""

    def __init__(self):
        self.reported = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.reported.append({**logs, "step": state.global_step})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that is never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trainer, callback = make_trainer(folder, callbacks=(Reporter(),))
    output = trainer.train()
    trainer.save_model(str(folder / "model"))
    return folder, trainer, callback, output


def test_the_saved_model_has_the_zeros(whole):
    folder, _, callback, _ = whole
    assert 0.3 < callback.binmask.sparsity() < 0.999
    for path in (folder / "model", folder / f"checkpoint-{STEPS}"):
        assert zeros_in_file(path / "model.safetensors", callback.binmask.plan.masked) == callback.binmask.sparsity()
    stock = BertForSequenceClassification.from_pretrained(folder / "model")
    for name, mask in callback.binmask.masks().items():
        assert torch.equal(stock.get_parameter(name) != 0, mask)


def test_records_are_in_the_trainers_own_history(whole):
    _, trainer, callback, output = whole
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == list(range(3, STEPS + 1, 3))
    assert (
        rows[0]["sparsity"] == rows[0]["mask_lr"] == rows[0]["flips_on_to_off"] == 0
    )  # the warm-up: one epoch of four
    assert rows[1]["mask_lr"] == 0
    assert rows[2]["mask_lr"] == MASK["mask_lr"]
    assert rows[-1]["mask_lr"] == pytest.approx(MASK["mask_lr_final"])
    last, binmask = rows[-1], callback.binmask
    assert last["sparsity"] == binmask.sparsity() == output.metrics["sparsity"]
    layers = {key.removeprefix("layer_sparsity/"): row for key, row in last.items() if key.startswith("layer_")}
    assert layers == binmask.layer_sparsity()
    masked = sum(mask.numel() for mask in binmask.masks().values())
    assert last["flips_on_to_off"] - last["flips_off_to_on"] == round(last["sparsity"] * masked) > 1000
    (reporter,) = (other for other in trainer.callback_handler.callbacks if isinstance(other, Reporter))
    assert reporter.reported == trainer.state.log_history


def test_an_interrupted_run_resumes_bit_for_bit(whole, tmp_path):
    """In the middle of an epoch, with dropout: from the checkpoint before, in new objects."""
    _, _, expected, _ = whole
    trainer, _ = make_trainer(tmp_path, callbacks=(InterruptAt(MIDDLE + 3),))
    with pytest.raises(Interrupted):
        trainer.train()
    trainer, callback = make_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert differences(snapshot(callback.binmask), snapshot(expected.binmask)) == []
    assert callback.binmask.flips() == expected.binmask.flips()


def test_what_the_callback_is_told_counts_after_a_resume(whole):
    folder, *_ = whole
    trainer, callback = make_trainer(folder, mask=MASK | dict(lam=5e-3, freeze_epochs=1), num_train_epochs=EPOCHS + 2)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{MIDDLE}"))
    (group,) = callback.binmask.masked_groups
    assert (group["lam"], group["epochs"], group["frozen"]) == (5e-3, EPOCHS + 1, True)


def test_masks_learn_again_when_a_run_that_ended_frozen_is_resumed_with_more_epochs(tmp_path):
    mask = MASK | dict(freeze_epochs=1)
    make_trainer(tmp_path, mask=mask)[0].train()
    trainer, _ = make_trainer(tmp_path, mask=mask, num_train_epochs=EPOCHS + 2)
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS}"))
    rows = [row for row in trainer.state.log_history if "loss" in row and row["step"] > STEPS]
    assert [row["mask_lr"] > 0 for row in rows] == [True, True, False, False]


def test_gradient_accumulation_is_the_same_training(tmp_path):
    one, four = (make_trainer(tmp_path, accumulation=parts, dropout=0.0, save_strategy="no") for parts in (1, 4))
    for trainer, _ in (one, four):
        trainer.train()
        assert trainer.state.global_step == STEPS
    ours, theirs = one[1].binmask.masks(), four[1].binmask.masks()
    assert mask_difference(ours, theirs) < 1e-3


def mask_difference(ours: dict, theirs: dict) -> float:
    """The part of all masks that differs."""
    assert ours.keys() == theirs.keys()
    differ = sum(int((ours[name] != theirs[name]).sum()) for name in ours)
    return differ / sum(mask.numel() for mask in ours.values())


def test_masks_are_fixed_in_the_last_epochs(tmp_path):
    trainer, callback = make_trainer(tmp_path, mask=MASK | dict(freeze_epochs=2), save_steps=STEPS // 2)
    trainer.train()
    binmask = callback.binmask
    rows = {row["step"]: row for row in trainer.state.log_history if "loss" in row}
    assert rows[STEPS // 2]["mask_lr"] > 0
    assert rows[STEPS]["mask_lr"] == 0
    assert rows[STEPS]["flips_on_to_off"] == rows[STEPS // 2]["flips_on_to_off"] > 0
    half_way = load_file(tmp_path / f"checkpoint-{STEPS // 2}" / "model.safetensors")
    weights = dict(trainer.model.named_parameters())
    assert all(torch.equal(weights[name] != 0, half_way[name] != 0) for name in binmask.masks())
    assert not all(torch.equal(weights[name], half_way[name]) for name in binmask.masks())


def test_the_best_model_comes_back_with_its_masks(tmp_path):
    """The first epoch's is the best by that measure, and the masks go on learning after it."""
    best = dict(load_best_model_at_end=True, metric_for_best_model="eval_kept", greater_is_better=True)
    trainer, callback = make_trainer(
        tmp_path, mask=MASK | dict(warmup=0.0), eval_strategy="epoch", save_strategy="epoch", **best
    )
    trainer.compute_metrics = lambda _: {"kept": 1 - callback.binmask.sparsity()}
    trainer.train()
    assert trainer.state.best_global_step == STEPS // EPOCHS
    binmask = callback.binmask
    last = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert 0 < binmask.sparsity() < last["sparsity"]
    trainer.save_model(str(tmp_path / "best"))
    assert zeros_in_file(tmp_path / "best" / "model.safetensors", binmask.plan.masked) == binmask.sparsity()


def test_parts_of_the_steps_stand_in_for_epochs(tmp_path):
    """For data that has no length."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(make_trainer(tmp_path, mask=None)[0].train_dataset * 10)

    def streaming(**settings):
        trainer, _ = make_trainer(tmp_path, mask=None, max_steps=12, logging_steps=1, save_strategy="no")
        trainer.train_dataset = Stream()
        BinMaskCallback(**MASK | settings).attach(trainer)
        trainer.train()
        return [row["mask_lr"] for row in trainer.state.log_history if "loss" in row]

    with pytest.raises(ValueError, match=r"no epochs: give BinMaskCallback\(epochs=...\)"):
        streaming()
    rates = streaming(epochs=4)
    assert rates[:3] == [0, 0, 0]
    assert rates[3:6] == [MASK["mask_lr"]] * 3
    assert rates[9:] == pytest.approx([MASK["mask_lr_final"]] * 3)


def test_decay_groups_and_the_schedule_reach_the_masked_weights(whole):
    _, _, callback, _ = whole
    groups = callback.binmask.param_groups
    decays = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
    assert decays["bert.encoder.layer.0.intermediate.dense.weight"] == 0.01
    assert decays["bert.encoder.layer.0.intermediate.dense.bias"] == 0
    assert {group["lr"] for group in groups} == {0.0}  # the linear schedule has ended
    assert {group["initial_lr"] for group in groups} == {1e-2}


def test_clipping_by_the_norm_of_what_the_optimizer_is_given(tmp_path):
    trainer, callback = make_trainer(tmp_path, mask=MASK | dict(max_grad_norm=0.5), max_grad_norm=0, save_strategy="no")
    trainer.train()
    assert callback.binmask.grad_norm > 0
    with pytest.raises(ValueError, match="both would clip"):
        make_trainer(tmp_path, mask=MASK | dict(max_grad_norm=0.5))


def test_a_second_call_goes_on_and_model_init_starts_anew(tmp_path):
    trainer, callback = make_trainer(tmp_path, save_strategy="no")
    trainer.train()
    flips, binmask = callback.binmask.flips(), callback.binmask
    trainer.train()
    assert callback.binmask is binmask
    assert binmask.flips().on_to_off > flips.on_to_off
    trainer.optimizer = None
    with pytest.raises(RuntimeError, match="the masks would be lost"):
        trainer.train()

    trainer = Trainer(args=trainer.args, model_init=lambda: make_model(), train_dataset=trainer.train_dataset)
    callback = BinMaskCallback(**MASK).attach(trainer)
    runs = []
    for _ in range(2):
        trainer.train()
        runs.append((callback.binmask, callback.binmask.sparsity()))
    assert runs[0][0] is not runs[1][0]
    assert runs[0][1] == runs[1][1] > 0


def test_a_trainer_that_was_not_attached_to_is_refused(tmp_path):
    trainer, _ = make_trainer(tmp_path, mask=None, callbacks=(BinMaskCallback(lam=1e-6),))
    with pytest.raises(RuntimeError, match=r"call callback.attach\(trainer\) before trainer.train\(\)"):
        trainer.train()


def test_attaching_too_late_or_twice_is_refused(tmp_path):
    trainer, callback = make_trainer(tmp_path, mask=None, save_strategy="no", max_steps=1)
    trainer.train()
    with pytest.raises(RuntimeError, match="has trained without masks already"):
        BinMaskCallback(lam=1e-6).attach(trainer)
    trainer, callback = make_trainer(tmp_path)
    with pytest.raises(RuntimeError, match="once"):
        callback.attach(trainer)
    with pytest.raises(RuntimeError, match="once"):
        BinMaskCallback(lam=1e-6).attach(trainer)

    class Late(InterruptAt):
        def on_step_end(self, args, state, control, **kwargs):
            BinMaskCallback(lam=1e-6).attach(trainer)

    trainer, _ = make_trainer(tmp_path, mask=None, callbacks=(Late(1),))
    with pytest.raises(RuntimeError, match=r"between Trainer\(...\) and trainer.train\(\)"):
        trainer.train()


def test_a_scheduler_made_before_is_refused_and_an_optimizer_is_taken(tmp_path):
    trainer, _ = make_trainer(tmp_path, mask=None, save_strategy="no")
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
    trainer.optimizer, trainer.lr_scheduler = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ValueError, match=r"optimizers=\(optimizer, None\)"):
        BinMaskCallback(**MASK).attach(trainer)

    own = make_model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(own, trainer.args, train_dataset=trainer.train_dataset, optimizers=(optimizer, None))
    callback = BinMaskCallback(**MASK).attach(trainer)
    trainer.train()
    assert callback.binmask.inner is optimizer
    assert callback.binmask.sparsity() > 0


def test_a_group_of_the_optimizer_keeps_its_own_penalty(tmp_path):
    trainer, _ = make_trainer(tmp_path, mask=None, save_strategy="no", max_steps=1)
    own = make_model()
    encoder = list(own.bert.encoder.parameters())
    others = [param for name, param in own.named_parameters() if "encoder" not in name]
    optimizer = torch.optim.SGD([{"params": encoder}, {"params": others, "lam": 3.0}], lr=0.1)
    trainer = Trainer(own, trainer.args, train_dataset=trainer.train_dataset, optimizers=(optimizer, None))
    callback = BinMaskCallback(**MASK).attach(trainer)
    trainer.train()
    assert [group["lam"] for group in callback.binmask.masked_groups] == [MASK["lam"], 3.0]


def test_a_checkpoint_without_masks_is_refused(tmp_path):
    trainer, _ = make_trainer(tmp_path / "bare", save_only_model=True, max_steps=2, save_steps=2)
    trainer.train()
    trainer, _ = make_trainer(tmp_path / "bare")
    with pytest.raises(RuntimeError, match="the checkpoint has no masks"):
        trainer.train(resume_from_checkpoint=True)
    trainer, _ = make_trainer(tmp_path / "dense", mask=None, max_steps=2, save_steps=2)
    trainer.train()
    trainer, _ = make_trainer(tmp_path / "dense")
    with pytest.raises(ValueError, match="this state was not saved with these masks"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="use one of the two"):
        best = dict(load_best_model_at_end=True, eval_strategy="steps", eval_steps=MIDDLE)
        make_trainer(tmp_path, save_only_model=True, metric_for_best_model="eval_loss", **best)


def test_bad_arguments_are_found_at_once():
    with pytest.raises(TypeError, match="mask_rate"):
        BinMaskCallback(lam=1e-6, mask_rate=1e-3)
    with pytest.raises(ValueError, match="fewer than the epochs"):
        BinMaskCallback(lam=1e-6, epochs=3, freeze_epochs=3)
    with pytest.raises(RuntimeError, match="made when training starts"):
        _ = BinMaskCallback(lam=1e-6).binmask


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Where the two ranks have left their results."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks("trainer.py", folder)
    return folder


def results(folder: Path, job: str) -> dict:
    return json.loads((folder / f"{job}.json").read_text())


@pytest.mark.parametrize("accumulation", [1, 4])
def test_two_ranks_learn_the_masks_of_one_process(ranks, accumulation, tmp_path):
    result = results(ranks, "learn")[str(accumulation)]
    assert result["runs"] == "MULTI_CPU"
    trainer, callback = make_trainer(tmp_path, dropout=0.0, save_strategy="no")
    trainer.train()
    ours = load_file(ranks / f"learn-{accumulation}" / "masks.safetensors")
    assert mask_difference(ours, callback.binmask.masks()) < 1e-3
    assert result["sparsity"] == pytest.approx(callback.binmask.sparsity(), abs=1e-3)
    saved = ranks / f"learn-{accumulation}" / "model" / "model.safetensors"
    assert zeros_in_file(saved, callback.binmask.plan.masked) == result["sparsity"] > 0.3
    assert [row["step"] for row in result["history"] if "sparsity" in row and "loss" in row] == list(range(3, 25, 3))


def test_two_ranks_train_together_what_was_evaluated_before(ranks):
    assert results(ranks, "evaluate_first")["sparsity"] > 0.3


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_resume_bit_for_bit(ranks, engine):
    result = results(ranks, "resume")[engine]
    runs = {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(engine, "DEEPSPEED")
    assert result["runs"] == runs
    assert result["differs"] == []
    assert result["flips_equal"]
    assert result["in_model"] == result["sparsity"] > 0.3
    logged = {row["step"]: row["sparsity"] for row in result["history"] if "loss" in row}
    assert logged[STEPS] == result["sparsity"]
    assert 0 < result["in_checkpoint"] < 1


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("not_what_runs", "asked for FSDP, but MULTI_CPU runs on this host"),
        ("own_optimizer", "take 'optimizer' out of its config"),
        ("universal", "would lose the masks"),
    ],
)
def test_engines_that_would_lose_the_masks_are_refused(ranks, case, text):
    assert text in results(ranks, "refusals")[case]


def test_fsdp1_is_refused(monkeypatch):
    """Accelerate makes it on GPUs only, so this is all there can be of it here."""
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, state=state)
    trainer = SimpleNamespace(args=SimpleNamespace(deepspeed=None, fsdp=True), accelerator=accelerator)
    with pytest.raises(ValueError, match="ask for FSDP2"):
        _check_engine(trainer)
