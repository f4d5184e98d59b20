"""The engine-independent checkpoint on one process: atomic, without pickle, and refused whole if it does not fit."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import timm.optim
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

import binmask_dist
from binmask_dist import CheckpointError, load_checkpoint, save_checkpoint
from binmask_dist.engines import checkpoint_files

MASK = dict(lam=1e-3, epochs=4, mask_lr=0.1, mask_lr_final=1e-2, warmup=0.25)


def make(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), width=33, seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4)).to(dtype)
    model[3].bias.requires_grad_(False)
    optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    return model, binmask_dist.patch(model, optimizer, **MASK, **changes)


def train(model, binmask, start, stop):
    for step in range(start, stop):
        binmask.set_epoch(min(step // 10, 3))
        x = torch.randn(16, 9, generator=torch.Generator().manual_seed(step))
        (model(x.to(model[0].weight.dtype)) - torch.sin(x[:, :4])).square().mean().backward()
        binmask.step()
        binmask.zero_grad()


def equal(first, second) -> bool:
    (a, ours), (b, theirs) = first, second
    states = zip(ours.state.values(), theirs.state.values(), strict=True)
    return (
        all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())
        and all(_same(s[key], t[key]) for s, t in states for key in s if _counts(s, key))
        and ours.flips() == theirs.flips()
    )


def _counts(state, key) -> bool:
    """`flips` are compared as totals, and W is out of date until the masks learn."""
    return key != "flips" and (key != "weight" or state["latent_step"] > 0)


def _same(ours, theirs) -> bool:
    return type(ours) is type(theirs) and torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


# among them some that count in tensors, some in numbers, some in their groups, and one whose rate is a tensor
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lion": lambda p: timm.optim.Lion(p, lr=1e-3),
    "lamb": lambda p: timm.optim.Lamb(p, lr=1e-3),
    "novograd": lambda p: timm.optim.NvNovoGrad(p, lr=1e-2),
    "adabelief": lambda p: timm.optim.AdaBelief(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "adamw, rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [5, 23])  # in the warm-up, and after it
def test_training_goes_on_bit_for_bit(tmp_path, name, steps):
    model, binmask = make(OPTIMIZERS[name])
    train(model, binmask, 0, steps)
    binmask.param_groups[0]["lr"] *= 0.5
    save_checkpoint(tmp_path, binmask, extra={"step": steps})
    other, resumed = make(OPTIMIZERS[name], seed=1)
    assert load_checkpoint(tmp_path, resumed) == {"step": steps}
    assert equal((model, binmask), (other, resumed))
    assert resumed.param_groups[0]["lr"] == binmask.param_groups[0]["lr"]
    train(model, binmask, steps, 40)
    train(other, resumed, steps, 40)
    assert equal((model, binmask), (other, resumed))
    assert binmask.sparsity() > 0.1


def test_nothing_is_pickled_and_old_files_go(tmp_path):
    model, binmask = make()
    for stop in (10, 20):
        train(model, binmask, stop - 10, stop)
        save_checkpoint(tmp_path, binmask)
    tensors = [path.name for path in tmp_path.glob("*.safetensors")]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.json", *tensors}
    assert json.loads((tmp_path / "checkpoint.json").read_text())["files"] == tensors
    assert len(tensors) == 1


def test_many_files_when_tensors_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr("binmask_dist.engines.checkpoint_files.BYTES_PER_FILE", 2000)
    model, binmask = make()
    train(model, binmask, 0, 20)
    save_checkpoint(tmp_path, binmask)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    other, resumed = make(seed=1)
    load_checkpoint(tmp_path, resumed)
    assert equal((model, binmask), (other, resumed))


@pytest.fixture
def saved(tmp_path):
    model, binmask = make()
    train(model, binmask, 0, 20)
    save_checkpoint(tmp_path, binmask)
    return tmp_path


def refused(folder, message, **changes):
    """Loading raises this, and changes nothing."""
    model, binmask = make(seed=1, **changes)
    train(model, binmask, 0, 15)
    same_model, same_binmask = make(seed=1, **changes)
    train(same_model, same_binmask, 0, 15)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder, binmask)
    assert equal((model, binmask), (same_model, same_binmask))


def test_a_missing_folder_is_refused(tmp_path):
    refused(tmp_path / "nowhere", "there is no checkpoint in")


def test_a_truncated_tensor_file_is_refused(saved):
    path = next(saved.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    refused(saved, "is missing or cut off")


def test_a_missing_tensor_file_is_refused(saved):
    next(saved.glob("*.safetensors")).unlink()
    refused(saved, "is missing or cut off")


def test_a_foreign_or_damaged_index_is_refused(saved):
    (saved / "checkpoint.json").write_text('{"some": "thing"}')
    refused(saved, "was written by something else")
    (saved / "checkpoint.json").write_text('{"format": "binm')
    refused(saved, "is not readable JSON")


def test_another_model_or_optimizer_is_refused(saved):
    refused(saved, r"has shape \[33\] in the checkpoint, not \[20\]", width=20)
    refused(saved, "the checkpoint is of AdamW, not of SGD", optimizer=OPTIMIZERS["sgd"])
    model = nn.Sequential(nn.Linear(9, 2), nn.Linear(2, 2))
    binmask = binmask_dist.patch(model, torch.optim.AdamW(model.parameters()), **MASK)
    with pytest.raises(CheckpointError, match=r"of another model or other targets: they differ in '3\.weight'"):
        load_checkpoint(saved, binmask)


def test_a_save_that_fails_keeps_the_last_checkpoint(saved, monkeypatch):
    model, binmask = make()
    train(model, binmask, 0, 5)
    monkeypatch.setattr("binmask_dist.engines.checkpoint_files.BYTES_PER_FILE", 2000)
    write_file, written = checkpoint_files._write_file, []

    def full_disk(path, batch):
        if len(written) == 2:
            raise OSError("No space left on device")
        written.append(write_file(path, batch))
        return written[-1]

    monkeypatch.setattr(checkpoint_files, "_write_file", full_disk)
    with pytest.raises(CheckpointError, match=r"could not be written to .*No space left on device"):
        save_checkpoint(saved, binmask)
    expected_model, expected = make()
    train(expected_model, expected, 0, 20)
    other, resumed = make(seed=1)
    load_checkpoint(saved, resumed)
    assert equal((expected_model, expected), (other, resumed))


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    _, binmask = make()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written to"):
        save_checkpoint(tmp_path / "file" / "checkpoint", binmask)


def test_an_index_or_a_file_with_parts_missing_is_refused(saved):
    whole = (saved / "checkpoint.json").read_text()
    for section in ("scalars", "entries", "flips", "groups"):
        index = json.loads(whole)
        del index[section]
        (saved / "checkpoint.json").write_text(json.dumps(index))
        refused(saved, "damaged checkpoint")
    for section, message in (("entries", "entries are damaged: they differ in '0.weight'"), ("scalars", "scalars are")):
        index = json.loads(whole)
        del index[section]["0.weight"]
        (saved / "checkpoint.json").write_text(json.dumps(index))
        refused(saved, message)
    index = json.loads(whole)
    index["entries"]["0.weight"].remove("latent")
    (saved / "checkpoint.json").write_text(json.dumps(index))
    refused(saved, "holds 'latent:0.weight', of which its index says nothing")
    index = json.loads(whole)
    del index["groups"][0]["settings"]
    (saved / "checkpoint.json").write_text(json.dumps(index))
    refused(saved, "damaged checkpoint")
    (saved / "checkpoint.json").write_text(whole)
    file = next(saved.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors["latent:0.weight"]
    save_file(tensors, file)
    refused(saved, "damaged checkpoint")


SAVE_FOR_EVER = """
import sys, torch, binmask_dist
model = torch.nn.Linear(1000, 1000)
binmask = binmask_dist.patch(model, torch.optim.SGD(model.parameters(), lr=0.1), lam=1e-4, epochs=1, warmup=0.0)
binmask.set_epoch(0)
for step in range(10_000):
    with torch.no_grad():
        model.weight.fill_(step)
        model.bias.fill_(step)
    binmask_dist.save_checkpoint(sys.argv[1], binmask, extra={"step": step})
    print(step, flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    seen = []
    for attempt in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        process.stdout.readline()
        time.sleep(0.037 * (attempt + 1))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        model = nn.Linear(1000, 1000)
        binmask = binmask_dist.patch(model, torch.optim.SGD(model.parameters(), lr=0.1), lam=1e-4, epochs=1, warmup=0.0)
        step = load_checkpoint(tmp_path, binmask)["step"]
        assert (model.weight == step).all()
        assert (model.bias == step).all()
        seen.append(step)
    assert max(seen) > 0


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("way", ["checkpoint", "state_dict"])
def test_weights_of_another_precision_are_taken_into_this_one(tmp_path, dtypes, way):
    (model, binmask), (other, resumed) = (make(dtype=dtype) for dtype in dtypes)
    train(model, binmask, 0, 23)
    if way == "checkpoint":
        save_checkpoint(tmp_path, binmask)
        load_checkpoint(tmp_path, resumed)
    else:
        resumed.load_state_dict(binmask.state_dict())
    masks = binmask.masks()
    assert all(torch.equal(mask, masks[name]) for name, mask in resumed.masks().items())
    train(other, resumed, 23, 40)
    assert {param.dtype for param in other.parameters()} == {dtypes[1]}
    weights = {state["weight"].dtype for state in resumed.state.values() if "weight" in state}
    assert weights == {dtypes[1]}


def test_clipping_stays_as_patch_was_told(tmp_path):
    """ZeRO has a clipping of its own, and refuses this one: what another engine used is not its business."""
    (_, clipped), (_, plain) = make(max_grad_norm=0.2), make()
    for source, target in ((clipped, plain), (plain, clipped)):
        before = target.masked_groups[0]["max_grad_norm"]
        save_checkpoint(tmp_path, source)
        load_checkpoint(tmp_path, target)
        assert target.masked_groups[0]["max_grad_norm"] == before


def test_what_json_cannot_hold_is_said(tmp_path):
    model, binmask = make()
    binmask.param_groups[0]["something"] = torch.ones(3)
    with pytest.raises(CheckpointError, match="AdamW keeps 'something', a Tensor that JSON cannot hold"):
        save_checkpoint(tmp_path, binmask)
    del binmask.param_groups[0]["something"]
    train(model, binmask, 0, 1)
    binmask.state[binmask.masked_groups[0]["params"][0]]["listed"] = [torch.ones(3)]
    with pytest.raises(CheckpointError, match="AdamW keeps 'listed', a list that JSON cannot hold"):
        save_checkpoint(tmp_path, binmask)
    assert not list(tmp_path.iterdir())


def test_what_prepare_returned_can_be_saved_and_loaded(tmp_path):
    model, binmask = make()
    _, prepared = Accelerator(cpu=True).prepare(model, binmask)
    save_checkpoint(tmp_path, prepared, extra={"epoch": 3})
    assert load_checkpoint(tmp_path, prepared) == {"epoch": 3}
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(TypeError, match="give what patch returned, or what prepare made of it, not AdamW"):
            call(tmp_path, binmask.inner)


def test_a_checkpoint_that_was_edited_is_refused(saved):
    whole = (saved / "checkpoint.json").read_text()
    for flips in ([1, 2, 3], "ab", None, [1, "b"]):
        (saved / "checkpoint.json").write_text(json.dumps(json.loads(whole) | {"flips": flips}))
        refused(saved, "damaged")
    (saved / "checkpoint.json").write_text(whole)
    file = next(saved.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["latent:0.weight"] = torch.zeros(3, 2)
    save_file(tensors, file)
    refused(saved, r"'latent:0.weight' has shape \[3, 2\] in the checkpoint, not \[33, 9\]")
