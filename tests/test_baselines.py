"""Each method against a case worked out by hand, and the property that defines it."""

import copy
import math
from dataclasses import asdict

import pytest
import torch
from accelerate import DistributedType
from torch import nn
from torch.nn import functional as F

import binmask_dist
from binmask_dist.baselines import METHODS, Settings, make_method
from binmask_dist.baselines.base import largest
from binmask_dist.baselines.hard_concrete import HardConcrete, hard_concrete, probability_on
from binmask_dist.baselines.magnitude import cubic_sparsity
from binmask_dist.baselines.probmask import ProbMask, density_at, project_to_budget_, relaxed_bernoulli, temperature
from binmask_dist.baselines.random_gates import MOST_SAMPLES
from binmask_dist.baselines.rigl import drop_and_grow, drop_fraction, erk_densities
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.identity import configuration_name
from binmask_dist.training.masking import check_engine
from binmask_dist.training.tasks.base import RunError

WITH_TARGET = ("probmask", "magnitude", "rigl")
RANDOM = ("probmask", "hard_concrete")
EPOCHS, STEPS_PER_EPOCH = 5, 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


def make(name: str, model: nn.Module, **settings):
    target = {"target_sparsity": 0.8} if name in WITH_TARGET else {"lam": 0.3 if name == "dropout" else 1e-2}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    numbers = dict(steps=EPOCHS * STEPS_PER_EPOCH, mask_interval=3, mask_lr=0.05, mask_lr_final=0.01, seed=7)
    return make_method(name, model, optimizer, Settings(epochs=EPOCHS, **{**numbers, **target, **settings}))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)


def one_step(model: nn.Module, method, step: int) -> None:
    method.set_epoch(min(step // STEPS_PER_EPOCH, EPOCHS - 1))
    x, y = batch(step)
    F.cross_entropy(model(x), y).backward()
    method.step()
    method.zero_grad()


def train(name: str, steps: int = EPOCHS * STEPS_PER_EPOCH, **settings):
    model = network()
    method = make(name, model, **settings)
    for step in range(steps):
        one_step(model, method, step)
    return model, method


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def on_one_weight(name: str, weight: list[float], steps: int, slope, lr: float = 0.1, **settings) -> torch.Tensor:
    """Plain SGD on weights whose loss has the gradient `slope`."""
    model = nn.Linear(len(weight), 1, bias=False)
    model.weight.data = torch.tensor([weight])
    method = make_method(
        name, model, torch.optim.SGD(model.parameters(), lr=lr), Settings(epochs=1, steps=steps, **settings)
    )
    method.set_epoch(0)
    for _ in range(steps):
        model.weight.grad = slope(model.weight.detach())
        method.step()
    return model.weight.detach()[0]


# -- no masks


def test_dense_is_the_optimizer_itself():
    model, method = train("dense")
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for step in range(EPOCHS * STEPS_PER_EPOCH):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parameters(model), parameters(plain), strict=True))
    assert method.sparsity() == 0.0
    assert all(mask.all() for mask in method.masks().values())


def test_l1_adds_the_sign():
    # 1 - 0.1 * (2 + 0.5) and -1 - 0.1 * (2 - 0.5)
    moved = on_one_weight("l1", [1.0, -1.0, 0.0], 1, lambda w: torch.full_like(w, 2.0), lam=0.5)
    torch.testing.assert_close(moved, torch.tensor([0.75, -1.15, -0.2]))


def test_l1_shrinks_to_the_soft_threshold():
    """The least of (w - a)^2 / 2 + lam |w| is sign(a) max(|a| - lam, 0)."""
    goal = torch.tensor([[2.0, -1.0, 0.3, -0.2]])
    reached = on_one_weight("l1", [1.0, 1.0, 1.0, 1.0], 600, lambda w: w - goal, lr=0.02, lam=0.5)
    torch.testing.assert_close(reached, torch.tensor([1.5, -0.5, 0.0, 0.0]), atol=0.017, rtol=0)  # one step to and fro


def test_l1_has_no_penalty_while_fine_tuning():
    model, method = train("l1", steps=2)
    method.freeze()
    before = parameters(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    method.inner.state.clear()  # no momentum
    method.step()
    assert torch.allclose(model[0].weight, before[0] * (1 - 0.1 * 1e-3))  # weight decay alone


def test_l2_is_weight_decay():
    # 1 - 0.1 * (2 + 0.5 * 1) and -4 - 0.1 * (2 + 0.5 * -4)
    moved = on_one_weight("l2", [1.0, -4.0], 1, lambda w: torch.full_like(w, 2.0), lam=0.5)
    torch.testing.assert_close(moved, torch.tensor([0.75, -4.0]))
    _, method = train("l2", steps=1)
    decays = {name: group["weight_decay"] for group in method.param_groups for name in group["param_names"]}
    assert decays == {"0.weight": 1e-2, "2.weight": 1e-2, "0.bias": 1e-3, "2.bias": 1e-3}


def test_dropout_is_in_the_network():
    from binmask_dist.networks import MLP

    model, plain = (MLP(2, in_features=50, hidden=(64, 20), drop_rate=rate) for rate in (0.7, 0.0))
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(400, 50)
    hidden = nn.Sequential(*list(model.train())[:3])(x)
    assert (hidden == 0).float().mean() == pytest.approx(0.7, abs=0.02)
    torch.testing.assert_close(hidden[hidden != 0], (torch.tanh(model[1](x)) / 0.3)[hidden != 0])
    assert torch.equal(model.eval()(x), plain.eval()(x))


# -- masks by a rule


def test_magnitude_follows_the_cubic():
    # 0.8 * (1 - (1 - 1/2)^3) = 0.7
    assert [cubic_sparsity(step, 20, 100, 0.8) for step in (10, 20, 60, 100, 120)] == [
        0,
        0,
        pytest.approx(0.7),
        0.8,
        0.8,
    ]
    model = network()
    method = make("magnitude", model, warmup=0.2)
    total, seen = 180, []
    for step in range(1, 31):
        one_step(model, method, step - 1)
        seen.append(method.sparsity())
    end = 22  # round(0.75 * 30)
    for step, sparsity in enumerate(seen, start=1):
        last = end if step >= end else step - step % 3  # changed every third step, and at the end
        expected = cubic_sparsity(last, 6, end, 0.8) if last > 6 else 0.0
        assert sparsity == round(expected * total) / total
    assert seen[-1] == 0.8
    off = [param for param in (model[0].weight, model[2].weight)]
    assert sum(int((param == 0).sum()) for param in off) == 0.8 * total  # momentum has not moved them


def test_largest_ranks_all_tensors_together():
    first, second = largest([torch.tensor([[5.0, 1.0]]), torch.tensor([4.0, 3.0, 2.0])], 3)
    assert first.tolist() == [[True, False]]
    assert second.tolist() == [True, True, False]


def test_rigl_by_hand():
    # layer b is too small for its share and stays dense; a gets the rest of the budget: 0.5 * 104 - 4 = 48 of 100
    assert erk_densities({"a": (10, 10), "b": (2, 2)}, 0.5) == {"a": pytest.approx(0.48), "b": 1.0}
    # otherwise densities are as sum / prod: 20 / 100 and 40 / 400, with 250 in all: f (20 + 40) = 250
    both = erk_densities({"a": (10, 10), "b": (20, 20)}, 0.5)
    assert both == {"a": pytest.approx(0.2 * 250 / 60), "b": pytest.approx(0.1 * 250 / 60)}
    assert [drop_fraction(step, 100) for step in (0, 50, 100)] == [0.3, pytest.approx(0.15), 0.0]
    weight, grad = torch.tensor([3.0, -1.0, 2.0, 0.0, 0.0, 0.0]), torch.tensor([9.0, 0.5, 0.0, 1.0, -4.0, 0.1])
    stay, grow = drop_and_grow(weight, grad, weight != 0, count=1)
    assert stay.tolist() == [True, False, True, False, False, False]
    assert grow.tolist() == [False, False, False, False, True, False]


def test_rigl_keeps_the_number_of_weights():
    model = network()
    method = make("rigl", model)
    counts = {name: int((param != 0).sum()) for name, param in method.plan.masked.items()}
    assert sum(counts.values()) == pytest.approx(0.2 * 180, abs=1)
    for step in range(EPOCHS * STEPS_PER_EPOCH):
        before = parameters(model)
        one_step(model, method, step)
        if (step + 1) % 3 == 0 and step + 1 < 22:  # masks change in the place of weights: these go, or start at zero
            pairs = zip(parameters(model), before, strict=True)
            assert all(torch.equal(now[now != 0], then[now != 0]) for now, then in pairs)
        for name, mask in method.masks().items():
            assert int(mask.sum()) == counts[name]
            assert not method.plan.masked[name][~mask].any()
    flips = method.flips()
    assert flips.on_to_off == flips.off_to_on > 10


# -- random masks


def test_probmask_projects_to_its_budget():
    # (1 - v) + (1 - v) + (0.5 - v) = 1.5 for v = 1/3, where 0.2 - v is below zero
    scores = [torch.tensor([1.0, 0.2]), torch.tensor([[1.0], [0.5]])]
    project_to_budget_(scores, 1.5)
    torch.testing.assert_close(scores[0], torch.tensor([2 / 3, 0.0]), atol=1e-3, rtol=0)
    torch.testing.assert_close(scores[1], torch.tensor([[2 / 3], [1 / 6]]), atol=1e-3, rtol=0)
    scores = [torch.tensor([1.2, -0.1, 0.5])]
    project_to_budget_(scores, 2.0)  # kept already, once probabilities are such
    torch.testing.assert_close(scores[0], torch.tensor([1.0, 0.0, 0.5]))


def test_probmask_keeps_to_its_budget_and_ends_at_the_target():
    assert [density_at(epoch, 100, 0.1) for epoch in (0, 15, 16, 38, 60, 99)] == [
        *(1.0, 1.0, 1.0),
        pytest.approx(0.1 + 0.9 / 8),
        *(0.1, 0.1),
    ]
    assert [temperature(epoch, 10) for epoch in (0, 5)] == [1.0, pytest.approx(1 / 0.515)]
    model = network()
    method = make("probmask", model)
    for step in range(EPOCHS * STEPS_PER_EPOCH):
        one_step(model, method, step)
        scores = [method.state[param]["score"] for param in method.plan.masked.values()]
        assert all(score.min() >= 0 and score.max() <= 1 for score in scores)
        budget = density_at(step // STEPS_PER_EPOCH, EPOCHS, 0.2) * 180
        assert sum(float(score.sum()) for score in scores) <= budget + 1e-4
    with method.for_evaluation():
        assert sum(int((param == 0).sum()) for param in method.plan.masked.values()) == 0.8 * 180
    assert method.sparsity() == 0.8


def test_hard_concrete_by_hand():
    # sigmoid(0.5 + 2/3 log 11)
    assert float(probability_on(torch.tensor(0.5))) == pytest.approx(1 / (1 + math.exp(-0.5) / 11 ** (2 / 3)))
    # u = 1/2: c = sigmoid(0) = 1/2 is stretched to 1/2; score 3: sigmoid(4.5) * 1.2 - 0.1 is above one
    assert hard_concrete(torch.tensor([0.0, 3.0, -9.0]), torch.full((3,), 0.5)).tolist() == pytest.approx(
        [0.5, 1.0, 0.0]
    )
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    for score in (-2.0, 0.0, 1.0):
        gates = hard_concrete(torch.full_like(uniform, score), uniform)
        assert 0 <= gates.min() <= gates.max() <= 1
        assert float((gates > 0).float().mean()) == pytest.approx(float(probability_on(torch.tensor(score))), abs=0.005)


def test_hard_concrete_pays_for_weights():
    def sparsity(lam: float) -> float:
        _, method = train("hard_concrete", lam=lam, mask_lr=0.3)
        with method.for_evaluation():
            return method.sparsity()

    assert sparsity(0.0) < 0.2 < 0.8 < sparsity(1.0)


@pytest.mark.parametrize("kind", [ProbMask, HardConcrete])
def test_slopes_are_those_of_autograd(kind):
    method = make("probmask" if kind is ProbMask else "hard_concrete", network())
    method.set_epoch(1)
    generator = torch.Generator().manual_seed(0)
    score = torch.rand(500, generator=generator).mul_(0.98).add_(0.01).requires_grad_()
    gate = method.gate(score, torch.rand(500, generator=generator))
    (slope,) = torch.autograd.grad(gate.sum(), score)
    torch.testing.assert_close(method.gate_slope(score.detach(), gate.detach()), slope, rtol=1e-3, atol=1e-5)
    if kind is HardConcrete:
        (slope,) = torch.autograd.grad(1e-2 * probability_on(score).sum(), score)
        torch.testing.assert_close(method.penalty_slope(score.detach()), slope)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", RANDOM)
def test_random_masks_are_those_of_autograd(name, samples):
    """The same network with its gates in the forward pass, and torch's own optimizers for weights and scores."""
    model, twin = network(), network()
    method = make(name, model)
    layers = [twin[0], twin[2]]
    scores = [torch.full_like(layer.weight, method.first_score).requires_grad_() for layer in layers]
    of_weights = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    of_scores = torch.optim.Adam(scores)
    for step in range(12):
        method.set_epoch(step // STEPS_PER_EPOCH)
        x, y = batch(step)
        for sample in range(samples):
            gates = [torch.ones_like(score) for score in scores]
            if step:  # the first pass is dense
                generator = torch.Generator().manual_seed((7 * 1_000_003 + step) * MOST_SAMPLES + sample)
                drawn = step if sample else step - 1  # the first one at the end of the step before
                factor = temperature(drawn // STEPS_PER_EPOCH, EPOCHS)
                for index, score in enumerate(scores):
                    noise = torch.rand(score.shape, generator=generator)
                    gates[index] = (
                        relaxed_bernoulli(score, noise, factor) if name == "probmask" else hard_concrete(score, noise)
                    )
            hidden = torch.tanh(F.linear(x, layers[0].weight * gates[0], layers[0].bias))
            loss = F.cross_entropy(F.linear(hidden, layers[1].weight * gates[1], layers[1].bias), y)
            if step and sample == samples - 1 and name == "hard_concrete":
                loss = loss + samples * 1e-2 * sum(probability_on(score).sum() for score in scores)
            (loss / samples).backward()
            if sample:
                method.next_sample()
            (F.cross_entropy(model(x), y) / samples).backward()
        method.step()
        method.zero_grad()
        of_weights.step()
        if step:
            of_scores.param_groups[0]["lr"] = method.numbers["mask_lr"]
            of_scores.step()
            with torch.no_grad():
                method.project(scores)
        of_weights.zero_grad()
        of_scores.zero_grad()
        for layer, score, param in zip(layers, scores, method.plan.masked.values(), strict=True):
            torch.testing.assert_close(method.state[param]["weight"], layer.weight.detach(), atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(method.state[param]["score"], score.detach(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", RANDOM)
def test_evaluation_leaves_no_trace(name):
    model, method = train(name, steps=15, mask_lr=0.3)
    before = parameters(model)
    with method.for_evaluation():
        inside = parameters(model)
        masks = method.masks()
    assert not torch.equal(inside[0], before[0])
    assert not inside[0][~masks["0.weight"]].any()
    assert inside[0][masks["0.weight"]].all()
    assert all(torch.equal(now, then) for now, then in zip(parameters(model), before, strict=True))
    method.freeze()
    assert torch.equal(model[0].weight, inside[0])
    for step in range(15, 20):
        one_step(model, method, step)
        method.freeze()
    assert torch.equal(model[0].weight != 0, masks["0.weight"])
    assert not torch.equal(model[0].weight, inside[0])


# -- all of them


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_goes_on_bit_for_bit(name, tmp_path):
    model, method = train(name, steps=14)
    binmask_dist.save_checkpoint(tmp_path, method)
    other = network()
    resumed = make(name, other)
    binmask_dist.load_checkpoint(tmp_path, resumed)
    for step in range(14, 24):
        one_step(model, method, step)
        one_step(other, resumed, step)
    with method.for_evaluation(), resumed.for_evaluation():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(parameters(model), parameters(other), strict=True))
    assert method.flips() == resumed.flips()
    assert method.layer_sparsity() == resumed.layer_sparsity()


@pytest.mark.parametrize("name", METHODS)
def test_a_gradient_that_is_not_finite_changes_nothing(name):
    model, method = train(name, steps=4)
    before = copy.deepcopy((parameters(model), [dict(state) for state in method.state.values()]))
    x, y = batch(4)
    F.cross_entropy(model(x), y).backward()
    model[0].weight.grad[0, 0] = math.nan
    with pytest.warns(UserWarning, match="changed nothing"):
        method.step()
    after = (parameters(model), [dict(state) for state in method.state.values()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert method.skipped_steps == 1


@pytest.mark.parametrize("name", METHODS)
def test_clipping_is_by_the_gradient_of_the_weights(name):
    model = network()
    method = make(name, model, max_grad_norm=1e-3)
    for step in range(8):
        method.set_epoch(0)
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        method.step()
        if name not in ("l1", "rigl"):  # a penalty comes on top; no weight takes part in a change of masks
            norm = math.sqrt(sum(float(param.grad.square().sum()) for param in model.parameters()))
            assert norm == pytest.approx(1e-3, rel=2e-2)
        assert method.grad_norm > 1e-3
        method.zero_grad()


def test_an_engine_that_cuts_weights_up_is_refused():
    for name in ("probmask", "magnitude", "rigl", "hard_concrete"):
        for engine in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            with pytest.raises(RunError, match=f"{name} needs every weight whole.* run it on one process or under DDP"):
                check_engine(name, engine)
        check_engine(name, DistributedType.MULTI_GPU)
    for name in ("binmask", "dense", "l1", "l2", "dropout"):
        check_engine(name, DistributedType.FSDP)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(method="probmask"), "method probmask needs target_sparsity"),
        (dict(method="rigl"), "method rigl needs target_sparsity"),
        (dict(method="dense", target_sparsity=0.9), "method dense has no target_sparsity"),
        (dict(method="dropout", lam=1.5), "lam is the probability of dropout"),
        (dict(mask_samples=2), "method binmask draws no masks"),
        (dict(method="hard_concrete", mask_samples=2, accumulation=2), "cannot be had with accumulation"),
        (dict(method="hard_concrete", mask_samples=2, mixed_precision="fp16"), "cannot be had with fp16"),
        (dict(mask_interval=0), "mask_interval must be above zero"),
        (dict(batch_statistics=True), "give finetune_epochs"),
        (dict(validation_fraction=0.5, test_fraction=0.5), "leave nothing to train on"),
    ],
)
def test_what_does_not_go_together_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_a_configuration_is_named_by_its_method():
    def name(**options) -> str:
        return configuration_name(asdict(TrainConfig(**options)))

    assert name(method="rigl", target_sparsity=0.9).startswith("digits-test_resnet-rigl-target0.9-")
    assert name(method="l1", lam=1e-4).startswith("digits-test_resnet-l1-lam0.0001-")
    assert name(method="dense").startswith("digits-test_resnet-dense-")
    assert name().startswith("digits-test_resnet-lam2e-05-")
