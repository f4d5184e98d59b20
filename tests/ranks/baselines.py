"""Run by torchrun on two ranks: every method under DDP, and those without masks where an engine cuts weights up."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from binmask_dist.baselines import METHODS, Settings, make_method
from ranks import work

STEPS, EPOCHS, SAMPLES = 12, 3, 2


def settings(name: str) -> Settings:
    target = 0.7 if name in ("probmask", "magnitude", "rigl") else None
    numbers = dict(mask_interval=3, mask_lr=0.1, mask_lr_final=0.1, seed=5)
    return Settings(EPOCHS, STEPS, lam=0.2 if name == "dropout" else 1e-3, target_sparsity=target, **numbers)


def train(name: str, prepare, backward, ranks: tuple[int, ...], samples: int = SAMPLES):
    """Each pass on the shares of `ranks`, with its mean gradient; returns the method and what it drew."""
    model = work.Network()
    method = make_method(name, model, work.make_optimizer(model), settings(name))
    model, optimizer = prepare(model, method)
    x, y = work.make_data(STEPS, 1)
    for step in range(STEPS):
        method.set_epoch(step * EPOCHS // STEPS)
        for sample in range(samples):
            if sample:
                method.next_sample()
            for rank in ranks:
                backward(F.mse_loss(model(x[step, 0, rank]), y[step, 0, rank]) / len(ranks) / samples)
        optimizer.step()
        optimizer.zero_grad()
    shown = {name: param.detach().clone() for name, param in method.plan.masked.items()}
    with method.for_evaluation():
        masks = method.masks()
    method.freeze()
    method.check_sync()
    return method, shown, masks


def main(folder: Path) -> None:
    results = {}
    for name in METHODS:
        accelerator = work.make_accelerator(work.Case("ddp"))
        method, shown, masks = train(name, accelerator.prepare, accelerator.backward, (accelerator.process_index,))
        everyone: list = [None, None]
        dist.all_gather_object(everyone, (shown, masks))
        _, shown_alone, masks_alone = train(
            name, lambda *pair: pair, lambda loss: loss.backward(), tuple(range(work.WORLD))
        )
        results[name] = dict(
            same_products=all(torch.equal(everyone[0][0][key], everyone[1][0][key]) for key in shown),
            same_masks=all(torch.equal(everyone[0][1][key], everyone[1][1][key]) for key in masks),
            masks_differ_from_one_process=sum(int((masks[key] != masks_alone[key]).sum()) for key in masks),
            error_from_one_process=max(float((shown[key] - shown_alone[key]).abs().max()) for key in shown),
            sparsity=method.sparsity(),
        )
    for name in ("dense", "l1", "l2"):
        for engine in ("fsdp2", "zero3"):
            accelerator = work.make_accelerator(work.Case(engine))
            method, *_ = train(name, accelerator.prepare, accelerator.backward, (accelerator.process_index,), 1)
            alone, *_ = train(name, lambda *pair: pair, lambda loss: loss.backward(), tuple(range(work.WORLD)), 1)
            whole, expected = work.whole_parameters(method), work.whole_parameters(alone)
            error = max(float((whole[key] - expected[key]).abs().max()) for key in expected)
            results[f"{name}-{engine}"] = dict(error_from_one_process=error, sparsity=method.sparsity())
    if work.is_first_rank():
        (folder / "baselines.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    work.leave()
