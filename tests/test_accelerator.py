"""What was asked for and what runs are compared; every silent fallback is an error with a sentence."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import binmask_dist
from binmask_dist.engines import accelerator as module


@pytest.fixture(autouse=True)
def clean_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def make_binmask():
    model = nn.Linear(4, 4)
    return model, binmask_dist.patch(model, torch.optim.SGD(model.parameters(), lr=0.1), lam=1e-3, epochs=2)


def test_one_process_trains_through_accelerate():
    accelerator = binmask_dist.make_accelerator()
    model, binmask = make_binmask()
    model, optimizer = accelerator.prepare(model, binmask)
    binmask.set_epoch(0)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert binmask.sparsity() == 0.0


def test_an_engine_that_needs_more_processes_is_refused():
    with pytest.raises(RuntimeError, match=r"asked for ddp, but single runs on 1 process.*cpu2\.yaml"):
        binmask_dist.make_accelerator("ddp")


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="engine must be auto or one of single, ddp, fsdp2, zero1, zero2, zero3"):
        binmask_dist.make_accelerator("zero4")


def test_processes_that_do_not_talk_are_refused(monkeypatch):
    """Two were started, and a plain Accelerator on a CPU host runs each of them alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = SimpleNamespace(num_processes=1, distributed_type="NO")
    with pytest.raises(RuntimeError, match="2 processes were started but this one runs alone"):
        module._check_what_runs(alone, "ddp")


def test_an_engine_that_fell_back_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    fallen_back = SimpleNamespace(num_processes=2, distributed_type="MULTI_CPU")
    for asked in ("fsdp2", "zero3"):
        with pytest.raises(RuntimeError, match=f"asked for {asked}, but ddp runs on 2 process"):
            module._check_what_runs(fallen_back, asked)


def test_a_precision_that_would_not_run_is_refused():
    if torch.accelerator.is_available():
        pytest.skip("fp16 runs on this device")
    assert binmask_dist.make_accelerator(mixed_precision="bf16").native_amp
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(RuntimeError, match="mixed_precision fp16 does not run on this cpu: take bf16, or leave it out"):
        binmask_dist.make_accelerator(mixed_precision="fp16")


def test_fsdp1_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="FSDP1 flattens parameters over layers; set fsdp_version: 2"):
        binmask_dist.make_accelerator()


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}, "elastic_checkpoint"),
        ({"zero_optimization": {"stage": 3}, "checkpoint": {"load_universal": True}}, "load_universal"),
    ],
)
def test_deepspeed_checkpoints_that_would_lose_the_masks_are_refused(config, kind):
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 1, **config})
    with pytest.raises(ValueError, match=f"DeepSpeed's {kind} keeps only Adam's moments and would lose the masks"):
        binmask_dist.make_accelerator(f"zero{config['zero_optimization']['stage']}", deepspeed_plugin=plugin)


def test_an_engine_that_replaced_the_optimizer_is_found_out():
    _, binmask = make_binmask()
    module.check_in_charge(binmask, SimpleNamespace(optimizer=SimpleNamespace(optimizer=binmask)))
    replaced = SimpleNamespace(optimizer=torch.optim.AdamW(nn.Linear(1, 1).parameters()))
    with pytest.raises(RuntimeError, match="replaced BinMask by AdamW; with optimizer offload set zero_force"):
        module.check_in_charge(binmask, replaced)


def test_a_users_own_accelerator_works_too():
    model, binmask = make_binmask()
    _, optimizer = Accelerator(cpu=True).prepare(model, binmask)
    module.check_in_charge(binmask, optimizer)
