"""Masks that are put on or off by rank: the right number, of the right weights, and nothing else changes."""

import pytest
import torch
from torch import nn

import binmask_dist
from binmask_dist import InputMask


def learnt(latents: torch.Tensor, **changes) -> tuple[nn.Linear, binmask_dist.BinMask]:
    """One layer whose masks have learnt, with these latents."""
    torch.manual_seed(0)
    layer = nn.Linear(latents.shape[1], latents.shape[0], bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    binmask = binmask_dist.patch(
        layer, optimizer, **dict(lam=1e-3, epochs=2, warmup=0.0, mask_lr_final=1e-3, compile=False) | changes
    )
    binmask.set_epoch(0)
    layer.weight.grad = torch.randn_like(layer.weight)
    binmask.step()
    binmask.zero_grad()
    state = binmask.state[layer.weight]
    state["flips"][0] = int((latents < 0).sum())
    state["latent"].copy_(latents)
    with torch.no_grad():
        layer.weight.copy_(state["weight"] * (latents >= 0))
    return layer, binmask


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.25, 0.5, 0.7])
def test_the_lowest_latents_are_off(sparsity):
    latents = torch.rand(50, 40, generator=torch.Generator().manual_seed(1)) * 1.2 - 0.9  # three quarters below zero
    layer, binmask = learnt(latents)
    before = binmask.state[layer.weight]["weight"].clone()
    binmask.settle(sparsity)
    off = ~binmask.masks()["weight"]
    assert int(off.sum()) == round(sparsity * off.numel())
    assert not off.any() or latents[off].max() < latents[~off].min()
    assert torch.equal(layer.weight, torch.where(off, 0.0, before))  # those that come back have the W they left with
    assert binmask.flips().on_to_off - binmask.flips().off_to_on == int(off.sum())


def test_equal_latents_are_drawn_by_lot():
    latents = torch.full((200, 100), -0.2)
    latents[:, :10] = 0.25
    _, binmask = learnt(latents)
    binmask.settle(0.4)
    off = ~binmask.masks()["weight"]
    assert binmask.sparsity() == pytest.approx(0.4, abs=0.01)
    assert not off[:, :10].any()
    columns = off[:, 10:].float().mean(dim=0)
    assert 0.25 < columns.min() < columns.max() < 0.65  # everywhere, and not the first ones


def test_masks_that_have_not_begun_to_go_off_stay_on():
    latents = torch.full((10, 10), 0.3)
    latents[0] = 0.1
    _, binmask = learnt(latents)
    with pytest.warns(UserWarning, match="50 masks were to be off, and only 10 have begun"):
        binmask.settle(0.5)
    assert binmask.sparsity() == 0.1
    assert not binmask.masks()["weight"][0].any()


def test_masks_that_have_not_learnt_are_left_alone():
    layer = nn.Linear(5, 5)
    binmask = binmask_dist.patch(layer, torch.optim.SGD(layer.parameters(), lr=0.1), lam=1e-3, epochs=2)
    before = layer.weight.detach().clone()
    with pytest.warns(UserWarning, match="only 0 have begun"):
        binmask.settle(0.5)
    assert binmask.sparsity() == 0.0
    assert torch.equal(layer.weight, before)


def test_settled_masks_stay_while_frozen():
    latents = torch.rand(20, 30, generator=torch.Generator().manual_seed(2)) - 0.5
    layer, binmask = learnt(latents, alpha0=0.0)  # -0.0 would be on
    binmask.settle(0.2)
    binmask.freeze()
    for _ in range(5):
        layer.weight.grad = torch.randn_like(layer.weight)
        binmask.step()
    assert binmask.sparsity() == pytest.approx(0.2, abs=0.002)
    assert (layer.weight == 0).float().mean().item() == pytest.approx(0.2, abs=0.002)


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, float("nan")])
def test_a_sparsity_that_is_none_is_refused(sparsity):
    _, binmask = learnt(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="between 0 and 1"):
        binmask.settle(sparsity)


def test_input_masks_alone_are_refused():
    model = nn.Sequential(InputMask(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    binmask = binmask_dist.patch(model, optimizer, lam=1e-3, epochs=2, targets="inputs")
    with pytest.raises(ValueError, match="only inputs are masked here"):
        binmask.settle(0.5)
