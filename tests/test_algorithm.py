"""`BinMask` walks beside Algorithm 1 written literally, for hundreds of steps and thousands of flips, per optimizer."""

import copy
import math

import pytest
import timm.optim
import torch
from torch import nn
from torch.nn import functional as F

import binmask_dist
from binmask_dist.method import algorithm, graphs, kernels
from binmask_dist.method.reference import Adam, Reference, evaluate

EPOCHS, STEPS_PER_EPOCH = 10, 30
MASK = dict(lam=2e-4, epochs=EPOCHS, mask_lr=2e-2, mask_lr_final=1e-3, warmup=0.1)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=2e-3, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "timm-lion": lambda p: timm.optim.Lion(p, lr=3e-4, weight_decay=1e-2),
    "timm-lamb": lambda p: timm.optim.Lamb(p, lr=5e-3, weight_decay=1e-2),
}


def small_network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 40), nn.Tanh(), nn.Linear(40, 5)
    )


def batches(count: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(36, 5, generator=generator)
    for _ in range(count):
        x = torch.randn(32, 1, 6, 6, generator=generator)
        yield x, (x.flatten(1) @ teacher).argmax(1)


def grouped(params, masked):
    """The two groups that patch makes: optimizers that look across parameters then add up in the same order."""
    groups = [[p for n, p in params if n not in masked], [p for n, p in params if n in masked]]
    return [{"params": group} for group in groups if group]


def walk(
    make_optimizer,
    network=small_network,
    compile=False,
    compare=None,
    adam=Adam,
    steps=EPOCHS * STEPS_PER_EPOCH,
    **changes,
):
    """Train both; `compare(binmask, model, reference)` runs after each step."""
    settings = MASK | changes
    model = network()
    twin = copy.deepcopy(model)
    binmask = binmask_dist.patch(model, make_optimizer(model.parameters()), compile=compile, **settings)
    masked = set(binmask.plan.masked)
    named = list(twin.named_parameters())
    reference = Reference(twin, sorted(masked), lambda _: make_optimizer(grouped(named, masked)), adam=adam, **settings)
    for step, (x, y) in enumerate(batches(steps)):
        epoch = step // STEPS_PER_EPOCH
        binmask.set_epoch(epoch)
        F.cross_entropy(model(x), y).backward()
        binmask.step()
        binmask.zero_grad()
        reference.step(epoch, lambda m, p, x=x, y=y: F.cross_entropy(evaluate(m, p, x), y))
        if compare is not None:
            compare(binmask, model, reference)
    return binmask, model, reference


def identical(binmask, model, reference):
    products = reference.products()
    for name, param in model.named_parameters():
        assert torch.equal(param, products[name]), name
        state = binmask.state[param]
        if name in reference.latents and state["latent_step"] > 0:
            assert torch.equal(state["latent"], reference.latents[name]), name
            assert torch.equal(state["weight"], reference.weights[name]), name
            assert torch.equal(state["latent_exp_avg_sq"].abs(), reference.adam[name].v), name


class TorchAdam:
    """torch.optim.Adam for one tensor, with the arguments of reference.Adam."""

    def __init__(self) -> None:
        self.latent = None

    def __call__(self, latent, grad, rate):
        if self.latent is None:
            self.latent = nn.Parameter(latent.clone())
            self.optimizer = torch.optim.Adam([self.latent], fused=True)
        self.latent.data.copy_(latent)
        self.latent.grad = grad
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        return self.latent.detach().clone()

    @property
    def v(self):
        return self.optimizer.state[self.latent]["exp_avg_sq"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eager_is_identical_to_the_last_bit_with_torchs_adam(name):
    binmask, _, reference = walk(OPTIMIZERS[name], compare=identical, adam=TorchAdam)
    check_flips(binmask, reference)


@pytest.mark.parametrize("name", ["rmsprop", "timm-lion"])
def test_compiled_is_identical_to_the_last_bit_with_adam_written_out(name):
    binmask, _, reference = walk(OPTIMIZERS[name], compile=True, compare=identical, adam=Adam)
    assert binmask.masked_groups[0]["compile"]
    assert not graphs.compiler_failed()
    check_flips(binmask, reference)


@torch.no_grad()
def differs_by_rounding(binmask, model, reference):
    """One step from the same state. Both then go on from the reference's: training would amplify what they round
    differently, until some flip comes a step later, and how soon depends on the processor."""
    products, masks = reference.products(), reference.masks()
    for name, param in model.named_parameters():
        state, product = binmask.state[param], products[name].detach()
        pairs = [(state[key], value) for key, value in reference.optimizer.state[reference.weights[name]].items()]
        same = torch.ones_like(param, dtype=torch.bool)
        if name in masks and state["latent_step"] > 0:
            latent, adam = reference.latents[name].detach(), reference.adam[name]
            same = (state["latent"] >= 0) == masks[name]
            assert (latent[~same].abs() < 1e-5).all(), name
            pairs += [(state["weight"], reference.weights[name]), (state["latent"], latent)]
            pairs += [(state["latent_exp_avg"], adam.m), (state["latent_exp_avg_sq"], adam.v)]
        torch.testing.assert_close(param[same], product[same], rtol=1e-4, atol=1e-6)
        param.copy_(product)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
            ours.copy_(theirs)


COMPILED_UPDATES = {
    "sgd": OPTIMIZERS["sgd"],
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-4),
    "sgd-dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.5),
    "adam": OPTIMIZERS["adam"],
    "adamw": OPTIMIZERS["adamw"],
}


@pytest.mark.parametrize("name", COMPILED_UPDATES)
def test_an_update_that_is_compiled_too_differs_by_rounding_only(name, monkeypatch):
    """U of torch's own classes, in the same pass as the masks; the state stays torch's, step counts included."""
    ran = []
    function = kernels.learn_and_update_
    monkeypatch.setattr(kernels, "learn_and_update_", lambda *a: ran.append(function(*a)) or ran[-1])
    _, _, reference = walk(COMPILED_UPDATES[name], compile=True, compare=differs_by_rounding)
    learning = (EPOCHS - 1) * STEPS_PER_EPOCH
    assert sum(flips is not None for step in ran for flips in step) >= 3 * (learning - 1)
    assert sum(reference.flips) > 2000


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("name", COMPILED_UPDATES)
def test_the_warm_up_is_the_plain_optimizer_compiled_or_not(name, max_grad_norm, monkeypatch):
    """Eagerly to the last bit. Compiled, U takes one pass and differs by rounding; its state stays torch's."""
    ran = []
    function = kernels.update_
    monkeypatch.setattr(kernels, "update_", lambda *a: ran.append(function(*a)) or ran[-1])
    make_optimizer = COMPILED_UPDATES[name]
    model = small_network()
    plain, eager, compiled = (copy.deepcopy(model) for _ in range(3))
    optimizer = make_optimizer(plain.parameters())
    optimizers = {plain: optimizer}
    for network, compile in ((eager, False), (compiled, True)):
        settings = MASK | {"compile": compile, "max_grad_norm": max_grad_norm, "warmup": 0.5}
        optimizers[network] = binmask_dist.patch(network, make_optimizer(network.parameters()), **settings)
        optimizers[network].set_epoch(0)
    for x, y in batches(30):
        for network, its_own in optimizers.items():
            F.cross_entropy(network(x), y).backward()
            if network is plain and max_grad_norm:
                assert nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm) > max_grad_norm
            its_own.step()
            its_own.zero_grad()
    assert not graphs.compiler_failed()
    assert [all(step) for step in ran] == [True] * (30 if name == "sgd-plain" else 29)  # the first step makes U's state
    for ours, fast, theirs in zip(eager.parameters(), compiled.parameters(), plain.parameters(), strict=True):
        if max_grad_norm is None:
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(fast, theirs, rtol=1e-4, atol=1e-6)
        for key, value in optimizer.state[theirs].items():
            torch.testing.assert_close(optimizers[compiled].state[fast][key], value, rtol=1e-4, atol=1e-6)


def check_flips(binmask, reference):
    flips = binmask.flips()
    assert [flips.on_to_off, flips.off_to_on] == reference.flips
    assert flips.returns == flips.off_to_on > 500
    assert flips.on_to_off > 3000
    assert 0.2 < binmask.sparsity() < 0.95


def test_muon_inside():
    """Muon takes matrices only, and moves masked entries too."""

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 40, bias=False), nn.Tanh(), nn.Linear(40, 5, bias=False))

    _, _, reference = walk(lambda p: torch.optim.Muon(p, lr=0.02), network, compare=identical, adam=TorchAdam)
    assert sum(reference.flips) > 1000


def test_compiled_and_eager_end_a_short_run_with_the_same_masks():
    """They round differently (torch's Adam fuses a multiply-add), which moves latents in the last bits only."""
    results = [walk(OPTIMIZERS["sgd"], compile=compile, steps=60) for compile in (False, True)]
    (eager, eager_model, _), (compiled, compiled_model, _) = results
    assert eager.flips().on_to_off > 1000
    for name, mask in eager.masks().items():
        assert torch.equal(mask, compiled.masks()[name])
    for ours, theirs in zip(eager_model.parameters(), compiled_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_masks_that_never_flip_are_the_plain_optimizer():
    """With nothing that moves them, masks stay at one; the weights are the user's own optimizer's, bitwise."""
    for changes in (dict(lam=0.0, mask_lr=0.0, mask_lr_final=0.0), dict(warmup=1.0)):
        model, plain = small_network(), small_network()
        optimizer = OPTIMIZERS["sgd"](plain.parameters())
        binmask = binmask_dist.patch(model, OPTIMIZERS["sgd"](model.parameters()), **(MASK | changes))
        for step, (x, y) in enumerate(batches(100)):
            binmask.set_epoch(step // 10)
            for network, opt in ((model, binmask), (plain, optimizer)):
                F.cross_entropy(network(x), y).backward()
                opt.step()
                opt.zero_grad()
        assert binmask.sparsity() == 0.0
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_frozen_masks_keep_their_zeros_and_thaw():
    model = small_network()
    binmask = binmask_dist.patch(model, OPTIMIZERS["sgd"](model.parameters()), **MASK)

    def train(steps, seed):
        for x, y in batches(steps, seed):
            F.cross_entropy(model(x), y).backward()
            binmask.step()
            binmask.zero_grad()

    binmask.set_epoch(3)
    train(60, 1)
    before, flips = binmask.masks(), binmask.flips()
    assert 0.05 < binmask.sparsity() < 0.95
    binmask.freeze()
    train(40, 2)
    after = binmask.masks()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert binmask.flips() == flips
    for name, param in binmask.plan.masked.items():
        assert not param[~before[name]].any()
        assert param[before[name]].all()
    binmask.unfreeze()
    train(40, 3)
    assert binmask.flips() != flips


def test_schedule_starts_at_the_initial_rate_and_ends_at_the_final_one():
    rate = dict(epochs=300, waiting=30, initial=1e-3, final=1e-5)
    assert algorithm.warmup_epochs(0.1, 300) == 30
    assert algorithm.mask_rate(30, **rate) == pytest.approx(1e-3)
    assert algorithm.mask_rate(299, **rate) == pytest.approx(1e-5)
    middle = algorithm.mask_rate(30 + 134, **rate) + algorithm.mask_rate(30 + 135, **rate)
    assert middle / 2 == pytest.approx((1e-3 + 1e-5) / 2)
    assert algorithm.mask_rate(310, **rate) == pytest.approx(1e-5)
    assert algorithm.mask_rate(9, epochs=10, waiting=9, initial=1e-3, final=1e-5) == 1e-3
    rates = [algorithm.mask_rate(epoch, **rate) for epoch in range(30, 300)]
    assert rates == sorted(rates, reverse=True)


def test_clipping_by_the_norm_of_what_the_optimizer_is_given():
    """g_W is clipped as torch clips it, masked entries do not count, and the latents see g unclipped."""
    limit = 0.3
    model = small_network()
    twin = copy.deepcopy(model)
    make = OPTIMIZERS["sgd"]
    binmask = binmask_dist.patch(model, make(model.parameters()), max_grad_norm=limit, **MASK)
    masked = set(binmask.plan.masked)
    reference = Reference(twin, sorted(masked), lambda _: make(grouped(list(twin.named_parameters()), masked)), **MASK)
    plain_step, clipped = reference.optimizer.step, []

    def clip_then_step():
        norm = torch.nn.utils.clip_grad_norm_(list(reference.weights.values()), limit)
        clipped.append(norm.item())
        plain_step()

    reference.optimizer.step = clip_then_step
    for step, (x, y) in enumerate(batches(200)):
        binmask.set_epoch(step // 20)
        F.cross_entropy(model(x), y).backward()
        binmask.step()
        binmask.zero_grad()
        reference.step(step // 20, lambda m, p, x=x, y=y: F.cross_entropy(evaluate(m, p, x), y))
        assert binmask.grad_norm == pytest.approx(clipped[-1], rel=1e-5)
    assert sum(norm > limit for norm in clipped) > 50
    assert sum(reference.flips) > 1000
    ours, theirs = binmask.masks(), reference.masks()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, reference.products()[name], rtol=1e-3, atol=1e-5)


def test_starting_from_a_sparse_model():
    """Weights that are zero start off, stay off, and the first step does not refill them."""
    model = small_network()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param[param.abs() < param.abs().median()] = 0
    zeros = {name: param == 0 for name, param in model.named_parameters() if param.dim() > 1}
    binmask = binmask_dist.patch(model, OPTIMIZERS["adamw"](model.parameters()), from_zeros=True, **MASK)
    assert binmask.sparsity() == pytest.approx(0.5, abs=0.02)
    for step, (x, y) in enumerate(batches(100)):
        binmask.set_epoch(step // 10)
        F.cross_entropy(model(x), y).backward()
        binmask.step()
        binmask.zero_grad()
        assert not any(model.get_parameter(name)[zero].any() for name, zero in zeros.items())
    assert binmask.sparsity() > 0.55


def test_penalty_alone_turns_everything_off():
    """With no loss gradient, Adam moves each latent by the rate, so alpha0 / rate steps turn every mask off."""
    layer = nn.Linear(7, 5, bias=False)
    binmask = binmask_dist.patch(
        layer, torch.optim.SGD(layer.parameters(), lr=0.1), lam=1e-3, epochs=1, warmup=0.0, mask_lr=0.01
    )
    binmask.set_epoch(0)
    steps = math.ceil(0.3 / 0.01)
    for step in range(steps + 1):
        assert binmask.sparsity() == (1.0 if step > steps else 0.0)
        layer.weight.grad = torch.zeros_like(layer.weight)
        binmask.step()
    assert binmask.sparsity() == 1.0
    assert binmask.flips() == binmask_dist.Flips(35, 0)
