"""A small Llama from a config, on bytes: it learns the Python reference, which ships with Python (`pydoc_data`).

python launch/examples/causal_lm.py
accelerate launch --config_file configs/accelerate/cpu2.yaml launch/examples/causal_lm.py
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import binmask_dist

BLOCK = 64  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="the first of them is the masks' warm-up")
    parser.add_argument("--steps_per_epoch", type=int, default=200)
    parser.add_argument("--lam", type=float, default=2e-6, help="penalty per weight that is on: larger is sparser")
    parser.add_argument("--output", type=Path, default=Path("runs/causal_lm"))
    args = parser.parse_args()

    accelerator = binmask_dist.make_accelerator()
    set_seed(0)
    train, test = make_blocks()
    loader = DataLoader(train, 16 // accelerator.num_processes, shuffle=True, drop_last=True)
    test_loader = DataLoader(test[:256], 32)

    sizes = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=BLOCK, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    optimizer = binmask = binmask_dist.patch(
        model, optimizer, lam=args.lam, epochs=args.epochs, warmup=1 / args.epochs, mask_lr=2e-2, max_grad_norm=1.0
    )
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    accelerator.print(f"before training: {evaluate(model, test_loader, accelerator):.3f} nats per byte")

    batches = iter(loader)
    for epoch in range(args.epochs):
        binmask.set_epoch(epoch)
        model.train()
        for _ in range(args.steps_per_epoch):
            if (batch := next(batches, None)) is None:
                batches = iter(loader)
                batch = next(batches)
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        loss = evaluate(model, test_loader, accelerator)
        accelerator.print(f"epoch {epoch}: {loss:.3f} nats per byte, sparsity {binmask.sparsity():.2%}")

    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output)
        saved = dict(LlamaForCausalLM.from_pretrained(args.output).named_parameters())
        zeros = sum(int((saved[name] == 0).sum()) for name in binmask.plan.masked)
        total = sum(saved[name].numel() for name in binmask.plan.masked)
        print(f"{args.output}: {loss:.3f} nats per byte, sparsity in the saved file {zeros / total:.2%}")
    accelerator.end_training()


def make_blocks() -> tuple[Tensor, Tensor]:
    """The text as blocks of bytes: nine tenths to train on, and one, of other topics, to test on."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    blocks = blocks[: len(blocks) // BLOCK * BLOCK].view(-1, BLOCK)
    return blocks[: len(blocks) * 9 // 10], blocks[len(blocks) * 9 // 10 :]


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, accelerator: Accelerator) -> float:
    """Mean loss in nats per byte; guessing would give 5.5."""
    model.eval()
    losses = [accelerator.gather_for_metrics(model(input_ids=batch, labels=batch).loss[None]) for batch in loader]
    return float(torch.cat(losses).mean())


if __name__ == "__main__":
    main()
