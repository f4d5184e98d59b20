"""The transformers Trainer with masks: made by tests in their own process, and run here by torchrun on two ranks."""

import contextlib
import os
import sys
from pathlib import Path

import torch
from accelerate import DistributedType, PartialState
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))

from binmask_dist.integrations.hf_trainer import BinMaskCallback
from ranks.engines import differences, snapshot
from ranks.work import is_first_rank, run_jobs

EXAMPLES, BATCH, EPOCHS = 96, 16, 4  # 6 steps an epoch
STEPS = EPOCHS * EXAMPLES // BATCH
MIDDLE = 10  # in the middle of an epoch
MASK = dict(lam=1e-5, alpha0=0.1, mask_lr=0.03, mask_lr_final=0.01, warmup=0.25)
ENGINES = ("ddp", "fsdp2", "zero2", "zero3")


class Interrupted(Exception):
    pass


class InterruptAt(TrainerCallback):
    """Some steps after the last checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Interrupted


def make_model(dropout: float = 0.1) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, hidden_size=30, num_hidden_layers=2, num_attention_heads=2, intermediate_size=49)
    rates = dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return BertForSequenceClassification(BertConfig(**sizes, **rates, max_position_embeddings=16, num_labels=3))


def make_examples(count: int = EXAMPLES) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(40, (count, 12), generator=generator)
    labels = (tokens < 20).sum(1).clamp(5, 7) - 5
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def make_trainer(
    folder: Path,
    *,
    engine: str = "ddp",
    accumulation: int = 1,
    dropout: float = 0.1,
    start: Path | None = None,
    mask: dict | None = MASK,
    callbacks: tuple = (),
    **args,
) -> tuple[Trainer, BinMaskCallback | None]:
    """A Trainer that shares a batch of 16 among its ranks, with its callback attached unless `mask` is None."""
    share = BATCH // int(os.environ.get("WORLD_SIZE", "1")) // accumulation
    defaults = dict(
        per_device_train_batch_size=share,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=EPOCHS,
        learning_rate=1e-2,
        weight_decay=0.01,
        warmup_steps=2,
        logging_steps=3,
        save_steps=MIDDLE,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    for flag in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(flag, None)  # Accelerate has set it for the Trainer before
    args = TrainingArguments(str(folder), **{**defaults, **engine_arguments(engine), **args})
    if engine == "fsdp2":
        PartialState().distributed_type = DistributedType.MULTI_GPU  # the only kind that Accelerate shards for
    examples = make_examples()
    # loaded after the arguments were made, ZeRO-3 shards it at once
    model = make_model(dropout) if start is None else BertForSequenceClassification.from_pretrained(start)
    trainer = Trainer(model, args, train_dataset=examples, eval_dataset=examples[:48], callbacks=[*callbacks])
    trainer.model_accepts_loss_kwargs = (
        False  # BERT's loss is a mean, and the Trainer would multiply it (docs/trainer.md)
    )
    return trainer, None if mask is None else BinMaskCallback(**mask).attach(trainer)


def engine_arguments(engine: str) -> dict:
    if engine == "fsdp2":
        return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}}
    if engine.startswith("zero"):
        stage = {"stage": int(engine[-1]), "stage3_gather_16bit_weights_on_model_save": True}
        auto = dict.fromkeys(
            ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
        )
        return {"deepspeed": {**auto, "zero_optimization": stage}}
    return {}


def zeros_in_file(path: Path, names) -> float:
    tensors = load_file(path)
    zeros = sum(int((tensors[name] == 0).sum()) for name in names)
    return zeros / sum(tensors[name].numel() for name in names)


def learn(folder: Path) -> dict:
    """DDP, without and with gradient accumulation: the caller compares the masks with those of one process."""
    results = {}
    for accumulation in (1, 4):
        path = folder / f"learn-{accumulation}"
        trainer, callback = make_trainer(path, accumulation=accumulation, dropout=0.0)
        trainer.train()
        callback.binmask.check_sync()
        trainer.save_model(str(path / "model"))
        if is_first_rank():
            save_file(callback.binmask.masks(), path / "masks.safetensors")
        results[accumulation] = dict(
            runs=str(trainer.accelerator.distributed_type.value),
            sparsity=callback.binmask.sparsity(),
            history=trainer.state.log_history,
        )
    return results


def resume(folder: Path) -> dict:
    """Under every engine: interrupted, made anew and resumed against never interrupted, with dropout."""
    results = {}
    start = folder / "start"
    if is_first_rank():
        make_model().save_pretrained(start)
    torch.distributed.barrier()
    for engine in ENGINES:
        trainer, callback = make_trainer(folder / f"{engine}-whole", engine=engine, start=start)
        trainer.train()
        runs = trainer.accelerator.distributed_type.value
        expected, flips = snapshot(callback.binmask), callback.binmask.flips()

        path = folder / f"{engine}-parts"
        trainer, _ = make_trainer(path, engine=engine, start=start, callbacks=(InterruptAt(MIDDLE + 3),))
        with contextlib.suppress(Interrupted):
            trainer.train()
        trainer, callback = make_trainer(path, engine=engine, start=start)
        trainer.train(resume_from_checkpoint=True)
        binmask = callback.binmask
        binmask.check_sync()
        trainer.save_model(str(path / "model"))
        torch.distributed.barrier()
        checkpoint = path / f"checkpoint-{MIDDLE * 2}" / "model.safetensors"
        results[engine] = dict(
            runs=runs,
            differs=differences(snapshot(binmask), expected),
            flips_equal=binmask.flips() == flips,
            sparsity=binmask.sparsity(),
            layers=binmask.layer_sparsity(),
            in_model=zeros_in_file(path / "model" / "model.safetensors", binmask.plan.masked),
            in_checkpoint=zeros_in_file(checkpoint, binmask.plan.masked),
            history=trainer.state.log_history,
        )
    return results


def evaluate_first(folder: Path) -> dict:
    """As before fine-tuning."""
    trainer, callback = make_trainer(folder / "evaluated", save_strategy="no")
    trainer.evaluate()
    trainer.train()
    callback.binmask.check_sync()
    return dict(sparsity=callback.binmask.sparsity())


def refusals(folder: Path) -> dict:
    """Engines that would lose the masks, or are not what was asked for."""
    zero = engine_arguments("zero2")["deepspeed"]
    cases = {
        "not_what_runs": ("ddp", engine_arguments("fsdp2")),
        "own_optimizer": ("zero2", {"deepspeed": zero | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}}),
        "universal": ("zero2", {"deepspeed": zero | {"checkpoint": {"load_universal": True}}}),
    }
    results = {}
    for name, (engine, args) in cases.items():
        try:
            make_trainer(folder / name, engine=engine, **args)
        except (ValueError, RuntimeError) as error:
            results[name] = str(error)
    return results


if __name__ == "__main__":
    run_jobs(learn, resume, evaluate_first, refusals)
