"""Input masks: Algorithm 1 with W fixed at one, the smoothed mask of section 2.2, and all forms of `InputMask`."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F

import binmask_dist
from binmask_dist import InputMask
from binmask_dist.method.reference import Reference, evaluate

EPOCHS, STEPS = 10, 20
MASK = dict(epochs=EPOCHS, mask_lr=5e-3, mask_lr_final=1e-4, warmup=0.2, lam=2e-4, input_lam=2e-2)
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=1e-2),
}


def network(mask: InputMask) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(mask, nn.Flatten(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(count: int, seed: int = 1):
    """24 features, of which the labels depend on the first six."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(6, 3, generator=generator)
    for _ in range(count):
        x = torch.randn(32, 24, generator=generator)
        yield x, (x[:, :6] @ teacher).argmax(1)


def train(model: nn.Module, binmask, count: int, start: int = 0) -> None:
    for step, (x, y) in list(enumerate(batches(start + count)))[start:]:
        binmask.set_epoch(step // STEPS)
        F.cross_entropy(model(x), y).backward()
        binmask.step()
        binmask.zero_grad()


def selecting(mask: InputMask, make_optimizer=OPTIMIZERS["sgd"], **changes):
    model = network(mask)
    return model, binmask_dist.patch(model, make_optimizer(model.parameters()), **{**MASK, **changes})


@pytest.mark.parametrize("targets", ["inputs", "auto"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("groups", [None, [*range(6)] * 4])
def test_walks_beside_algorithm_1(optimizer, targets, groups):
    make_optimizer = OPTIMIZERS[optimizer]
    model, binmask = selecting(InputMask(24) if groups is None else InputMask(groups=groups), make_optimizer)
    if targets == "inputs":
        model, binmask = selecting(model[0], make_optimizer, targets="inputs")
    twin = copy.deepcopy(model)
    masked = list(binmask.plan.masked)
    reference = Reference(twin, masked, make_optimizer, inputs=["0.scale"], **MASK)
    for step, (x, y) in enumerate(batches(EPOCHS * STEPS)):
        binmask.set_epoch(step // STEPS)
        F.cross_entropy(model(x), y).backward()
        binmask.step()
        binmask.zero_grad()
        reference.step(step // STEPS, lambda m, p, x=x, y=y: F.cross_entropy(evaluate(m, p, x), y))
        assert torch.equal(binmask.smoothed_masks()["0.scale"], reference.smoothed["0.scale"])
    state = binmask.state[model[0].scale]
    assert torch.equal(state["weight"], torch.ones_like(state["weight"]))
    assert torch.equal(model[0].scale, reference.masks()["0.scale"].float())
    for name, product in reference.products().items():
        assert torch.equal(model.get_parameter(name), product), name
    assert (binmask.flips().on_to_off, binmask.flips().off_to_on) == tuple(reference.flips)
    assert len(masked) == (1 if targets == "inputs" else 3)
    if groups is None:
        assert 0 < int(model[0].scale.sum()) < 24  # something was learnt
        assert model[0].scale[:6].mean() > model[0].scale[6:].mean()


def test_smoothing_runs_during_the_warm_up():
    model, binmask = selecting(InputMask(24), targets="inputs")
    assert torch.equal(binmask.smoothed_masks()["0.scale"], torch.zeros(24))
    train(model, binmask, 7)  # of 40 steps of warm-up
    assert torch.equal(model[0].scale, torch.ones(24))
    torch.testing.assert_close(binmask.smoothed_masks()["0.scale"], torch.full((24,), 1 - 0.9**7))
    assert "smoothed" not in binmask.state[model[2].weight]


def test_no_optimizer_or_schedule_moves_w():
    model, binmask = selecting(InputMask(24), targets="inputs")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(binmask, 5, eta_min=1e-2)
    for _ in range(3):
        train(model, binmask, 5)
        schedule.step()
    assert set(model[0].scale.unique().tolist()) <= {0.0, 1.0}
    assert "momentum_buffer" not in binmask.state[model[0].scale]


def test_a_gradient_norm_leaves_input_masks_out():
    model, binmask = selecting(InputMask(24), targets="inputs", max_grad_norm=1e6)
    x, y = next(iter(batches(1)))
    binmask.set_epoch(0)
    F.cross_entropy(model(100 * x), y).backward()
    rest = torch.stack([p.grad.square().sum() for name, p in model.named_parameters() if name != "0.scale"]).sum()
    binmask.step()
    assert binmask.grad_norm == pytest.approx(float(rest.sqrt()), rel=1e-5)
    model[0].scale.grad[3] = float("nan")
    with pytest.warns(UserWarning, match="changed nothing"):
        binmask.step()


def test_checkpoints_go_on_to_the_same_bits(tmp_path):
    model, binmask = selecting(InputMask(24), targets="inputs")
    train(model, binmask, 90)
    binmask_dist.save_checkpoint(tmp_path, binmask)
    kept = copy.deepcopy(binmask.state_dict())
    weights = copy.deepcopy(model.state_dict())
    train(model, binmask, 60, start=90)
    expected = binmask.smoothed_masks()["0.scale"]
    assert len(expected.unique()) > 2
    for load in (
        lambda m, b: binmask_dist.load_checkpoint(tmp_path, b),
        lambda m, b: (m.load_state_dict(weights), b.load_state_dict(kept)),
    ):
        other, again = selecting(InputMask(24), targets="inputs")
        load(other, again)
        train(other, again, 60, start=90)
        assert torch.equal(again.smoothed_masks()["0.scale"], expected)
        assert torch.equal(other[2].weight, model[2].weight)


def test_dcp_makes_the_state_that_training_makes():
    model, binmask = selecting(InputMask(24), targets="inputs")
    made = get_optimizer_state_dict(model, binmask)["state"]
    trained, other = selecting(InputMask(24), targets="inputs")
    train(trained, other, 2)
    expected = get_optimizer_state_dict(trained, other)["state"]
    assert {name: set(entries) for name, entries in made.items()} == {n: set(e) for n, e in expected.items()}


@pytest.mark.parametrize(
    ("mask", "inputs", "zero"),
    [
        (InputMask((4, 4)), (2, 3, 4, 4), (slice(None), slice(None), 0, 1)),  # a pixel in all channels
        (InputMask((3, 1, 1)), (2, 3, 4, 4), (slice(None), 1)),  # a channel
        (InputMask((5, 1)), (2, 5, 7), (slice(None), 1)),  # a token
        (InputMask(groups=[0, 1, 1, 2]), (2, 4), (slice(None), slice(1, 3))),  # one-hot columns
        (InputMask(np.int64(3)), (2, 3), (slice(None), 1)),
        (InputMask(groups=[[0, 0], [1, 1]]), (2, 6, 2, 2), (slice(None), slice(None), 1)),  # pixels by rows
    ],
)
def test_shapes(mask, inputs, zero):
    with torch.no_grad():
        mask.scale.view(-1)[1] = 0
    x = torch.rand(inputs) + 1
    expected = x.clone()
    expected[zero] = 0
    assert torch.equal(mask(x), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a shape or groups"),
        ({"shape": 3, "groups": [0]}, "either a shape or groups"),
        ({"shape": 0}, "positive whole numbers"),
        ({"shape": (3, -1)}, "positive whole numbers"),
        ({"groups": [0, 2]}, "every number"),
        ({"groups": [0.5, 1.0]}, "numbers of masks"),
        ({"groups": []}, "numbers of masks"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        InputMask(**arguments)


def test_mistakes_of_patch():
    with pytest.raises(ValueError, match="no batch dimension"):
        InputMask((4, 4))(torch.ones(4, 4))
    with pytest.raises(ValueError, match="does not fit inputs"):
        InputMask((3, 4, 4))(torch.ones(2, 1, 4, 4))
    with pytest.raises(ValueError, match="cannot be excluded"):
        selecting(InputMask(24), exclude=["0.scale"])
    plain = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="trains no InputMask"):
        binmask_dist.patch(plain, torch.optim.SGD(plain.parameters(), lr=1), lam=0.1, epochs=1, targets="inputs")
    for changes, message in (({"input_lam": -1.0}, "input_lam"), ({"input_alpha0": 2.0}, "input_alpha0")):
        with pytest.raises(ValueError, match=message):
            selecting(InputMask(24), **changes)
    assert "input mask" in str(selecting(InputMask(24))[1].plan)
