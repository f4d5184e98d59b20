"""Step time of BinMask against dense training, in one run: `make bench`.

    python benchmarks/step.py [--networks mlp resnet18] [--seconds 60] [--ranks 1 2]

A step is forward and backward pass, and update. Machines may be shared and noisy, so every round takes a step or two of
every variant in turn, with as many of dense between them: a ratio is of the variant's steps over the mean of the dense
ones before and after. Printed are the median over all rounds, and its 95% interval.

With --keep_memory the process keeps the memory that a step frees, as the training command does. Of itself it gives
large blocks back to the system, and faults them in again: that is part of an ordinary loop's time, dense or not, and
with large activations most of its noise. Variants:

    dense         the network and torch's optimizer, as one would write it
    dense fused   the same with the optimizer's fused=True
    by hand       latents as parametrized second parameters, with autograd and torch.optim.Adam: passes of its own
    eager         binmask_dist with compile=False
    compiled      binmask_dist as it comes
    warm-up       the same, before the masks learn
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import timm
import torch
import torch.distributed as dist
from intervals import FEWEST, Interval, ratios
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import binmask_dist
from binmask_dist.method import kernels
from binmask_dist.method.algorithm import Scalars
from binmask_dist.method.reference import Quantise
from binmask_dist.method.updates import known_update
from binmask_dist.networks import vgg19_bn, wide_resnet32
from binmask_dist.training.heap import keep_freed_memory


def sgd(params, **changes):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=5e-4, **changes)


def adamw(params, **changes):
    return torch.optim.AdamW(params, lr=1e-4, **changes)


def mlp():
    layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


# name: (network, shape of one input, classes, batch, optimizer, bar for compiled / dense)
NETWORKS = {
    "resnet32": (wide_resnet32, (3, 32, 32), 10, 256, sgd, 1.02),
    "vgg19": (vgg19_bn, (3, 32, 32), 10, 256, sgd, 1.04),
    "resnet18": (lambda: timm.create_model("resnet18", num_classes=10), (3, 32, 32), 10, 32, sgd, 1.08),
    "vit_tiny": (lambda: timm.create_model("vit_tiny_patch16_224"), (3, 224, 224), 1000, 16, adamw, 1.04),
    "mlp": (mlp, (2048,), 2048, 32, sgd, 1.25),
    "mlp adamw": (mlp, (2048,), 2048, 32, adamw, 1.25),
}
VARIANTS = ("dense", "dense fused", "by hand", "eager", "compiled", "warm-up")
LAM, RATE = 1e-6, 1e-3


class StraightThroughMask(nn.Module):
    def __init__(self, weight) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.full_like(weight, 0.3))

    def forward(self, weight):
        return weight * Quantise.apply(self.latent)


class ByHand:
    """What one would write without the library: a second parameter for each weight, and its own Adam."""

    def __init__(self, model, make_optimizer) -> None:
        modules = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        for module in modules:
            parametrize.register_parametrization(module, "weight", StraightThroughMask(module.weight))
        self.latents = [module.parametrizations.weight[0].latent for module in modules]
        latents = {id(latent) for latent in self.latents}
        self.inner = make_optimizer([p for p in model.parameters() if id(p) not in latents])
        self.adam = torch.optim.Adam(self.latents, lr=RATE)

    @torch.no_grad()
    def step(self) -> None:
        for latent in self.latents:
            latent.grad.add_(latent >= 0, alpha=LAM)
        self.inner.step()
        self.adam.step()
        for latent in self.latents:
            latent.clamp_(-1, 1)

    def zero_grad(self) -> None:
        self.inner.zero_grad()
        self.adam.zero_grad()


def build(variant: str, make_network, make_optimizer):
    torch.manual_seed(0)
    model = make_network()
    if variant == "dense":
        optimizer = make_optimizer(model.parameters())
    elif variant == "dense fused":
        optimizer = make_optimizer(model.parameters(), fused=True)
    elif variant == "by hand":
        optimizer = ByHand(model, make_optimizer)
    else:
        compile = None if variant in ("compiled", "warm-up") else False
        optimizer = binmask_dist.patch(
            model, make_optimizer(model.parameters()), lam=LAM, epochs=10, mask_lr=RATE, compile=compile
        )
        optimizer.set_epoch(0 if variant == "warm-up" else 1)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    return model, optimizer


def measure(name: str, seconds: float) -> dict:
    """Ratios of whole steps to dense ones, of every round and variant, and the seconds that updates alone take."""
    make_network, shape, classes, batch, make_optimizer, bar = NETWORKS[name]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    x, y = torch.randn(batch // ranks, *shape), torch.randint(classes, (batch // ranks,))
    built = {variant: build(variant, make_network, make_optimizer) for variant in VARIANTS}
    updates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}

    def step(variant: str) -> tuple[float, float]:
        """Seconds of the whole step, and of its update."""
        model, optimizer = built[variant]
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        F.cross_entropy(model(x), y).backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        return end - start, end - middle

    for variant in VARIANTS:  # states, buckets and compilation
        step(variant)
        step(variant)
    together = _of_first_rank(2 if step("dense")[0] < 0.5 else 1)

    def take(variant: str) -> float:
        if together > 1:
            step(variant)  # brings the variant's own memory back into the caches
        whole, update = zip(*(step(variant) for _ in range(together)), strict=True)
        updates[variant] += update
        return statistics.mean(whole)

    over_dense: dict[str, list[float]] = {variant: [] for variant in VARIANTS[1:]}
    dense_times = [take("dense")]
    deadline = time.perf_counter() + seconds
    while not _of_first_rank(int(len(over_dense["warm-up"]) >= FEWEST and time.perf_counter() > deadline)):
        for variant, over in over_dense.items():
            ours = take(variant)
            dense_times.append(take("dense"))
            over.append(2 * ours / (dense_times[-2] + dense_times[-1]))
    return dict(
        network=name,
        ranks=ranks,
        batch=batch,
        bar=bar,
        dense_ms=1000 * statistics.median(dense_times),
        over_dense=over_dense,
        update_ms={variant: 1000 * statistics.median(times) for variant, times in updates.items()},
    )


def _of_first_rank(value: int) -> int:
    """Clocks differ, and every rank must take the same number of steps."""
    if not dist.is_initialized():
        return value
    shared = torch.tensor(value)
    dist.broadcast(shared, 0)
    return int(shared)


def bandwidth() -> dict:
    """The compiled step over 16 million weights with SGD, against a copy of the same memory, in the same rounds."""
    n = 2**24
    tensors = [torch.randn(n) for _ in range(7)]
    tensors[4].abs_()
    scalars = Scalars(10, lam=LAM, rate=RATE, betas=(0.9, 0.999), eps=1e-8, alpha1=1.0)
    parameter = nn.Parameter(tensors[1])
    optimizer = sgd([parameter])
    update = known_update(optimizer, optimizer.param_groups[0])
    update_scalars = update.scalars(optimizer.param_groups[0], 1.0)

    def step():
        kernels.learn_and_update_(update.function, [tensors], scalars, update_scalars)

    def timed(call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    step()
    copies, steps = [], []
    for _ in range(15):
        copies.append(8 * n / timed(lambda: tensors[5].copy_(tensors[1])))
        # reads g, W, latent, its two moments and the momentum; writes the last five and the product
        steps.append(12 * 4 * n / timed(step))
    return dict(copy=statistics.median(copies) / 1e9, step=statistics.median(steps) / 1e9)


def run_ranks(network: str, arguments: argparse.Namespace) -> list[dict]:
    """The same on two ranks of DDP, each with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        options = ["--networks", network, "--seconds", str(arguments.seconds), "--json", str(out)]
        options += ["--keep_memory"] if arguments.keep_memory else []
        subprocess.run([*command, *options], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(out.read_text())


def print_tables(rows: list[dict]) -> None:
    start = f"{'':<11}{'ranks':>6}{'batch':>6}"
    names = "".join(f"{variant:>15}" for variant in VARIANTS[1:])
    print(f"\nwhole steps over dense ones\n{start}{'rounds':>7}{'dense ms':>10}{names}{'bar':>7}")
    for row in rows:
        intervals = [Interval.of(values) for values in row["over_dense"].values()]
        shown = "".join(f"{over.median:>8.3f} ±{over.reach:.3f}" for over in intervals)
        counts = f"{len(row['over_dense']['compiled']):>7}{row['dense_ms']:>10.1f}"
        print(f"{_start(row)}{counts}{shown}{row['bar']:>7.2f}  {verdict(row['over_dense'], row['bar'])}")
    names = "".join(f"{variant:>13}" for variant in VARIANTS)
    print(f"\nupdates alone, ms\n{start}{names}")
    for row in rows:
        print(_start(row) + "".join(f"{row['update_ms'][variant]:>13.2f}" for variant in VARIANTS))


def _start(row: dict) -> str:
    return f"{row['network']:<11}{row['ranks']:>6}{row['batch']:>6}"


def verdict(over_dense: dict[str, list[float]], bar: float) -> str:
    """By medians; what the intervals leave open is said."""
    by_hand = over_dense["by hand"]
    bars = {
        "compiled": (Interval.of(over_dense["compiled"]), bar),
        "compiled <= by hand": (ratios(over_dense["compiled"], by_hand), 1.0),
        "eager <= by hand": (ratios(over_dense["eager"], by_hand), 1.0),
        "warm-up": (Interval.of(over_dense["warm-up"]), 1.005),  # 1.00
    }
    missed = [name for name, (over, limit) in bars.items() if over.median > limit]
    unsure = [name for name, (over, limit) in bars.items() if over.low <= limit < over.high]
    said = f"missed: {', '.join(missed)}" if missed else "all met"
    return f"{said}; within the noise: {', '.join(unsure)}" if unsure else said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--seconds", type=float, default=45, help="measuring time per network (default 45)")
    parser.add_argument("--keep_memory", action="store_true", help="keep what a step frees for the next one")
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--json", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.keep_memory:
        keep_freed_memory()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rows = [measure(name, arguments.seconds) for name in arguments.networks]
        if dist.get_rank() == 0:
            Path(arguments.json).write_text(json.dumps(rows))
        dist.destroy_process_group()
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; step time / dense step time")
    rows = []
    for ranks in arguments.ranks:
        for name in arguments.networks:
            print(f"measuring {name} on {ranks} rank(s) ...", flush=True)
            rows += [measure(name, arguments.seconds)] if ranks == 1 else run_ranks(name, arguments)
    print_tables(rows)
    if 1 in arguments.ranks:
        speed = bandwidth()
        print(
            f"\ncompiled step: {speed['step']:.1f} GB/s on the bytes it must move, "
            f"{100 * speed['step'] / speed['copy']:.0f}% of a copy's {speed['copy']:.1f} GB/s"
        )


if __name__ == "__main__":
    main()
