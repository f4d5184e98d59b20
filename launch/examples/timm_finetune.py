"""A timm model: trained with masks, then fine-tuned with the masks fixed, as in the paper.

python launch/examples/timm_finetune.py
python launch/examples/timm_finetune.py --model resnet18 --pretrained
accelerate launch --config_file configs/accelerate/cpu2.yaml launch/examples/timm_finetune.py
"""

import argparse
import math
from pathlib import Path

import timm
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import binmask_dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_resnet", help="any timm name")
    parser.add_argument("--pretrained", action="store_true", help="start from pretrained weights, which are downloaded")
    parser.add_argument("--epochs", type=int, default=20, help="with masks that learn")
    parser.add_argument("--finetune_epochs", type=int, default=5, help="with masks that are fixed")
    parser.add_argument("--lam", type=float, default=2e-5, help="penalty per weight that is on: larger is sparser")
    parser.add_argument("--output", type=Path, default=Path("runs/timm_finetune"))
    args = parser.parse_args()

    accelerator = binmask_dist.make_accelerator()
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = F.interpolate(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, scale_factor=2)
    examples = TensorDataset(images, torch.tensor(labels))
    train, test = torch.utils.data.random_split(examples, [1437, 360], torch.Generator().manual_seed(0))
    loader = DataLoader(train, 64 // accelerator.num_processes, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, 90)

    model = timm.create_model(args.model, pretrained=args.pretrained, in_chans=1, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    optimizer = binmask = binmask_dist.patch(
        model, optimizer, lam=args.lam, epochs=args.epochs, mask_lr=3e-2, mask_lr_final=1e-4
    )
    accelerator.print(binmask.plan)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

    for epoch in range(args.epochs):
        binmask.set_epoch(epoch)
        train_epoch(model, optimizer, loader, accelerator, rate=cosine(0.05, epoch, args.epochs))
    before = evaluate(model, test_loader, accelerator)
    accelerator.print(f"trained: accuracy {before:.2%}, sparsity {binmask.sparsity():.2%}")

    binmask.freeze()  # zeros stay zero from here on
    for epoch in range(args.finetune_epochs):
        train_epoch(model, optimizer, loader, accelerator, rate=cosine(0.01, epoch, args.finetune_epochs))
    after = evaluate(model, test_loader, accelerator)

    accelerator.save_model(model, str(args.output))
    accelerator.wait_for_everyone()
    saved = load_file(args.output / "model.safetensors")
    zeros = sum(int((saved[name] == 0).sum()) for name in binmask.plan.masked)
    total = sum(saved[name].numel() for name in binmask.plan.masked)
    accelerator.print(f"fine-tuned: accuracy {after:.2%}, sparsity in the saved file {zeros / total:.2%}")
    accelerator.end_training()


def cosine(initial: float, epoch: int, epochs: int) -> float:
    return initial * (1 + math.cos(math.pi * epoch / epochs)) / 2


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, accelerator: Accelerator, rate: float
) -> None:
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = rate
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, accelerator: Accelerator) -> float:
    """Accuracy, with every example counted once however many processes share them."""
    model.eval()
    hits = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in loader]
    return float(torch.cat(hits).float().mean())


if __name__ == "__main__":
    main()
