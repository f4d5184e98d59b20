"""The small job that the distributed tests run, on one process and on two ranks of every engine."""

import argparse
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import binmask_dist
from binmask_dist.method.layout import placements

WORLD = 2
STEPS = 40
MIDDLE = STEPS // 2 + 3  # of an epoch too
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
MICRO_BATCH = 8
MASK = dict(lam=3e-4, epochs=4, mask_lr=6e-2, mask_lr_final=1e-2, warmup=0.25)


@dataclass(frozen=True)
class Case:
    engine: str
    precision: str = "no"
    accumulation: int = 1
    max_norm: float | None = None
    # masks learn from the first step on, the learning rate starts at zero, and so does the head: then some weights have
    # no gradient at first, and under ZeRO-1 and 2 those of a rank may be just these
    from_rest: bool = False

    def __str__(self) -> str:
        parts = [self.engine, "bf16" if self.precision == "bf16" else "fp32", f"accumulate{self.accumulation}"]
        return "-".join(parts + (["clip"] if self.max_norm else []) + (["from-rest"] if self.from_rest else []))


CASES = [
    Case(engine, precision, accumulation, max_norm)
    for engine in ENGINES
    for precision in ("no", "bf16")
    for accumulation in (1, 4)
    for max_norm in (None, 0.2)
] + [Case(engine, from_rest=True) for engine in ENGINES]


class Network(nn.Module):
    """Shapes that do not divide by two: shards are uneven, and one of (1, 7) is empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 61)
        self.second = nn.Linear(61, 37, bias=False)
        self.third = nn.Linear(37, 7)
        self.fourth = nn.Linear(7, 5)
        self.last = nn.Linear(7, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x))
        x = torch.tanh(self.third(x))
        return torch.cat([self.fourth(x), self.last(x)], dim=1)


class Frozen(Network):
    """With a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(12, 12).requires_grad_(False)

    def forward(self, x):
        return super().forward(self.fixed(x))


def make_data(steps: int, accumulation: int):
    """x, y of shape (steps, accumulation, ranks, micro-batch, features)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, accumulation, WORLD, MICRO_BATCH, 12, generator=generator)
    teacher = torch.randn(12, 6, generator=generator)
    return x, torch.tanh(x @ teacher)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def build(case: Case, compile: bool = False):
    model = Network()
    settings = MASK | (dict(warmup=0.0, mask_lr=2e-2) if case.from_rest else {})
    if case.from_rest:
        nn.init.zeros_(model.fourth.weight)
        nn.init.zeros_(model.last.weight)
    limit = None if case.engine.startswith("zero") else case.max_norm  # ZeRO has a clipping of its own
    return model, binmask_dist.patch(model, make_optimizer(model), max_grad_norm=limit, compile=compile, **settings)


def build_frozen():
    model = Frozen()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    return model, binmask_dist.patch(model, optimizer, compile=False, **MASK)


def begin_step(case: Case, binmask, step: int) -> None:
    binmask.set_epoch(step * MASK["epochs"] // STEPS)
    if case.from_rest:
        for group in binmask.param_groups:
            group["lr"] = 0.1 * min(1.0, step / 5)


def single_process(case: Case, stop: int = STEPS):
    """The same global batches on one process, gradients averaged over the ranks' shares."""
    model, binmask = build(case)
    continue_single_process(case, model, binmask, stop=stop)
    return model, binmask


def continue_single_process(case: Case, model, binmask, start: int = 0, stop: int = STEPS) -> None:
    x, y = make_data(STEPS, case.accumulation)
    for step in range(start, stop):
        begin_step(case, binmask, step)
        for micro in range(case.accumulation):
            for rank in range(WORLD):
                loss = F.mse_loss(model(x[step, micro, rank]), y[step, micro, rank])
                (loss / case.accumulation / WORLD).backward()
        if case.engine.startswith("zero") and case.max_norm:  # ZeRO clips g, in which masked entries count
            nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        binmask.step()
        binmask.zero_grad()


def make_accelerator(case: Case):
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = binmask_dist.make_accelerator(
        case.engine, mixed_precision=case.precision, gradient_accumulation_steps=case.accumulation
    )
    if case.engine.startswith("zero"):
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = MICRO_BATCH
        if case.max_norm:
            config["gradient_clipping"] = case.max_norm
    return accelerator


def prepared(case: Case, accelerator):
    model, binmask = build(case)
    model, optimizer = accelerator.prepare(model, binmask)
    return model, optimizer, binmask


def train(case: Case, accelerator, model, optimizer, binmask, start=0, stop=STEPS):
    x, y = make_data(STEPS, case.accumulation)
    rank = accelerator.process_index
    for step in range(start, stop):
        begin_step(case, binmask, step)
        for micro in range(case.accumulation):
            with accelerator.accumulate(model):
                output = model(x[step, micro, rank].to(_input_dtype(case)))
                loss = F.mse_loss(output.float(), y[step, micro, rank])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


def _input_dtype(case: Case) -> torch.dtype:
    """DeepSpeed casts the model, not its inputs, which here come without its own loader."""
    return torch.bfloat16 if case.precision == "bf16" and case.engine.startswith("zero") else torch.float32


def whole_parameters(binmask) -> dict[str, torch.Tensor]:
    """What the optimizer holds for every parameter, gathered."""
    where = placements(binmask.param_groups, binmask.model)
    return {
        name: place.gather(None if place.holder is None else place.local(place.holder.detach()), torch.float32).clone()
        for name, place in where.items()
    }


def run_jobs(*jobs: Callable[[Path], Any]) -> NoReturn:
    """The program of a rank: FOLDER [JOB ...], by default all. The first rank writes what each returns to JOB.json."""
    by_name = {job.__name__: job for job in jobs}
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", nargs="*", default=list(by_name))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in arguments.jobs:
        try:
            outcome = by_name[name](arguments.folder)
        except Exception:
            traceback.print_exc()
            raise
        if is_first_rank():
            (arguments.folder / f"{name}.json").write_text(json.dumps(outcome))
            print(f"{name} done", flush=True)
    leave()


def leave() -> NoReturn:
    """The last call of a script: native threads that outlive Python's own end abort the process now and then."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
