"""The transformers Trainer, with one more line: a small vision transformer on scikit-learn's digits.

python launch/examples/trainer.py
accelerate launch --config_file configs/accelerate/cpu2.yaml launch/examples/trainer.py
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from binmask_dist.integrations.hf_trainer import BinMaskCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="in the last fifth of them the masks are fixed")
    parser.add_argument("--lam", type=float, default=3e-6, help="penalty per weight that is on: larger is sparser")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    parser.add_argument("--output", type=Path, default=Path("runs/trainer"))
    args = parser.parse_args()

    training = TrainingArguments(
        str(args.output),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=180,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        use_cpu=not torch.accelerator.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    set_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes)
    train, test = make_examples()
    trainer = Trainer(
        ViTForImageClassification(config), training, train_dataset=train, eval_dataset=test, compute_metrics=accuracy
    )
    callback = BinMaskCallback(
        lam=args.lam, freeze_epochs=args.epochs // 5, mask_lr=2e-2, mask_lr_final=1e-3, log_layers=False
    ).attach(trainer)  # new
    trainer.train(resume_from_checkpoint=args.resume)

    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        saved = dict(ViTForImageClassification.from_pretrained(args.output).named_parameters())
        zeros = sum(int((saved[name] == 0).sum()) for name in callback.binmask.plan.masked)
        total = sum(saved[name].numel() for name in callback.binmask.plan.masked)
        print(f"{args.output}: accuracy {metrics['eval_accuracy']:.2%}, sparsity in the saved file {zeros / total:.2%}")


def make_examples() -> tuple[list[dict], list[dict]]:
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    examples = [{"pixel_values": image, "labels": int(label)} for image, label in zip(pixels, labels, strict=True)]
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
    return [examples[i] for i in order[360:]], [examples[i] for i in order[:360]]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


if __name__ == "__main__":
    main()
