"""A plain PyTorch loop with Accelerate and two new lines. Run it again after an interruption, and it goes on.

python launch/examples/own_loop.py
accelerate launch --config_file configs/accelerate/cpu2.yaml launch/examples/own_loop.py
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import binmask_dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lam", type=float, default=5e-5, help="penalty per weight that is on: larger is sparser")
    parser.add_argument("--output", type=Path, default=Path("runs/own_loop"))
    args = parser.parse_args()

    # the order of the data follows from the number of the epoch, so that a resumed run sees the same
    accelerator = binmask_dist.make_accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    examples = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = torch.utils.data.random_split(examples, [1437, 360], torch.Generator().manual_seed(0))
    loader = DataLoader(train, 32 // accelerator.num_processes, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, 90)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = binmask = binmask_dist.patch(model, optimizer, lam=args.lam, epochs=args.epochs, mask_lr=1e-2)  # new
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

    start, checkpoint = 0, args.output / "checkpoint"
    if (checkpoint / "checkpoint.json").exists():
        start = binmask_dist.load_checkpoint(checkpoint, binmask)["epoch"]
        accelerator.print(f"going on after {start} epochs")
    for epoch in range(start, args.epochs):
        binmask.set_epoch(epoch)  # new
        loader.set_epoch(epoch)
        model.train()
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        accuracy = evaluate(model, test_loader, accelerator)
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.2%}, sparsity {binmask.sparsity():.2%}", flush=True)
        binmask_dist.save_checkpoint(checkpoint, binmask, extra={"epoch": epoch + 1})

    accelerator.save_model(model, str(args.output))
    accelerator.wait_for_everyone()
    saved = load_file(args.output / "model.safetensors")
    zeros = sum(int((saved[name] == 0).sum()) for name in binmask.plan.masked)
    total = sum(saved[name].numel() for name in binmask.plan.masked)
    accuracy = evaluate(model, test_loader, accelerator)
    accelerator.print(f"{args.output}/model.safetensors: accuracy {accuracy:.2%}, sparsity {zeros / total:.2%}")
    accelerator.end_training()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, accelerator: Accelerator) -> float:
    """Accuracy, with every example counted once however many processes share them."""
    model.eval()
    hits = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in loader]
    return float(torch.cat(hits).float().mean())


if __name__ == "__main__":
    main()
