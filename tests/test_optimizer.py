"""`BinMask` keeps the contract of a torch optimizer, and refuses what would silently go wrong."""

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import timm.optim
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import binmask_dist
from binmask_dist.method import graphs, joining
from binmask_dist.method.layout import in_model

MASK = dict(lam=1e-3, epochs=4, mask_lr=0.1, mask_lr_final=1e-2, warmup=0.25)


def network(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 4)).to(dtype)


def sgd(model, **changes):
    return torch.optim.SGD(model.parameters(), **(dict(lr=0.1, momentum=0.9) | changes))


def backward(model, seed: int) -> torch.Tensor:
    x = torch.randn(16, 9, generator=torch.Generator().manual_seed(seed))
    loss = F.mse_loss(model(x.to(model[0].weight.dtype)).float(), torch.sin(x[:, :4]))
    loss.backward()
    return loss


def train(model, binmask, steps, start=0):
    for step in range(start, start + steps):
        binmask.set_epoch(min(step // 10, 3))
        backward(model, step)
        binmask.step()
        binmask.zero_grad()


def trained(steps=25, dtype=torch.float32, **changes):
    model = network(dtype)
    binmask = binmask_dist.patch(model, sgd(model), **(MASK | changes))
    train(model, binmask, steps)
    return model, binmask


def contents(binmask) -> dict:
    """Parameters and state, copied, to see whether a step changed anything."""
    found = {}
    for index, param in enumerate(param for group in binmask.param_groups for param in group["params"]):
        found[index, "param"] = param.detach().clone()
        for key, value in binmask.state.get(param, {}).items():
            found[index, key] = value.clone() if isinstance(value, torch.Tensor) else value
    return found


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) if isinstance(first[key], torch.Tensor) else first[key] == second[key]
        for key in first
    )


# -- the contract of an optimizer


def test_masked_weights_have_groups_of_their_own():
    model = network()
    groups = [
        {"params": [model[0].weight, model[0].bias], "lr": 0.3},
        {"params": list(model[2].parameters()), "weight_decay": 0.01},
    ]
    binmask = binmask_dist.patch(model, torch.optim.SGD(groups, lr=0.1), targets=["0.weight", "2.weight"], **MASK)
    assert isinstance(binmask, torch.optim.Optimizer)
    assert [group["param_names"] for group in binmask.param_groups] == [
        ["0.bias"],
        ["0.weight"],
        ["2.bias"],
        ["2.weight"],
    ]
    assert [group["lr"] for group in binmask.param_groups] == [0.3, 0.3, 0.1, 0.1]
    assert [group["weight_decay"] for group in binmask.param_groups] == [0, 0, 0.01, 0.01]
    for group in binmask.masked_groups:
        assert (group["lam"], group["epochs"], group["mask_lr"]) == (1e-3, 4, 0.1)
    owned = [id(param) for group in binmask.param_groups for param in group["params"]]
    assert sorted(owned) == sorted(id(param) for param in model.parameters())


def test_a_group_keeps_its_own_penalty_and_rates():
    model = network()
    groups = [
        {"params": list(model[0].parameters()), "lam": 10.0},
        {"params": list(model[2].parameters()), "mask_lr": 0.3, "mask_lr_final": np.float32(0.25)},
    ]
    binmask = binmask_dist.patch(model, torch.optim.SGD(groups, lr=0.1), **MASK)
    keys = ("lam", "mask_lr_initial", "mask_lr_final")
    assert [tuple(group[key] for key in keys) for group in binmask.masked_groups] == [
        (10.0, 0.1, 1e-2),
        (1e-3, 0.3, 0.25),
    ]
    train(model, binmask, 30)
    assert [group["mask_lr"] for group in binmask.masked_groups] == [binmask.mask_rate(2), (0.3 + 0.25) / 2]
    sparsity = binmask.layer_sparsity()
    assert sparsity["0.weight"] > 0.9 > sparsity["2.weight"]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (dict(lam=-1.0), "lam of group 1 must be a finite number, 0 or more, not -1.0"),
        (dict(mask_lr="0.1"), "mask_lr of group 1 must be a finite number, 0 or more, not '0.1'"),
        (
            dict(warmup=0.5),
            "group 1 of the optimizer has 'warmup': a group may have lam, mask_lr, mask_lr_final of its own",
        ),
    ],
)
def test_what_a_group_cannot_have_of_its_own_is_refused(own, message):
    model = network()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), **own}]
    with pytest.raises(ValueError, match=message):
        binmask_dist.patch(model, torch.optim.SGD(groups, lr=0.1), **MASK)


def test_an_optimizer_with_hyper_parameters_of_the_same_name_is_refused():
    class Proximal(torch.optim.SGD):
        def __init__(self, params, lam):
            super().__init__(params, lr=0.1)
            self.defaults["lam"] = self.param_groups[0]["lam"] = lam

    model = network()
    with pytest.raises(ValueError, match="Proximal has a hyper-parameter that is called 'lam', as one of the masks is"):
        binmask_dist.patch(model, Proximal(model.parameters(), lam=1.0), **MASK)


def test_schedulers_hooks_and_closures():
    model = network()
    binmask = binmask_dist.patch(model, sgd(model), **MASK)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(binmask, T_max=10)
    calls = []
    binmask.register_step_pre_hook(lambda *_: calls.append("before"))
    binmask.register_step_post_hook(lambda *_: calls.append("after"))
    binmask.set_epoch(0)
    loss = binmask.step(lambda: backward(model, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns if it does not see the optimizer's steps
        scheduler.step()
    assert loss.item() > 0
    assert calls == ["before", "after"]
    assert all(group["lr"] < 0.1 for group in binmask.param_groups)


def test_groups_and_state_can_be_assigned_as_engines_do():
    _, binmask = trained()
    groups, state = binmask.param_groups, binmask.state
    binmask.param_groups = groups[:1]
    assert binmask.inner.param_groups == groups[:1]
    binmask.param_groups, binmask.state = groups, state
    assert binmask.inner.param_groups is groups
    assert binmask.inner.state is state


def test_pickle_and_deepcopy_go_on_alike():
    model, binmask = trained()
    torch.optim.lr_scheduler.StepLR(binmask, 100)  # puts a step of its own on the instance
    twins = [copy.deepcopy((model, binmask)), pickle.loads(pickle.dumps((model, binmask)))]
    train(model, binmask, 10, start=25)
    for twin_model, twin in twins:
        train(twin_model, twin, 10, start=25)
        assert same(contents(binmask), contents(twin))
        assert twin.sparsity() == binmask.sparsity() > 0


def test_state_dict_through_a_file_resumes_bit_for_bit():
    for dtype in (torch.float32, torch.bfloat16):
        model, binmask = trained(dtype=dtype)
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": binmask.state_dict()}, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        other = network(dtype)
        resumed = binmask_dist.patch(other, sgd(other), **MASK)
        other.load_state_dict(saved["model"])
        resumed.load_state_dict(state_dict=saved["optimizer"])
        assert same(contents(binmask), contents(resumed))
        state = resumed.state[other[0].weight]
        assert state["latent"].dtype == state["latent_exp_avg"].dtype == torch.float32
        assert state["weight"].dtype == dtype
        train(model, binmask, 15, start=25)
        train(other, resumed, 15, start=25)
        assert same(contents(binmask), contents(resumed))


def test_dcp_creates_state_with_a_step_that_changes_nothing():
    model = network()
    before = copy.deepcopy(model.state_dict())
    binmask = binmask_dist.patch(model, sgd(model, weight_decay=0.1), **(MASK | dict(warmup=0.0)))
    for group in binmask.param_groups:
        group["lr"] = 0.0
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    binmask.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    state = binmask.state[model[0].weight]
    assert set(state) >= {"weight", "latent", "latent_exp_avg", "latent_exp_avg_sq", "latent_step", "flips"}
    assert (state["latent"] == 0.3).all()
    assert state["latent_step"] == 0


def test_a_learning_rate_that_starts_at_zero_is_not_taken_for_that():
    model = network()
    binmask = binmask_dist.patch(model, sgd(model, lr=0.0), **(MASK | dict(warmup=0.0)))
    train(model, binmask, 1)
    assert binmask.state[model[0].weight]["latent_step"] == 1


def test_parameters_without_a_gradient_are_left_alone():
    model = network()
    binmask = binmask_dist.patch(model, sgd(model), **(MASK | dict(warmup=0.0)))
    binmask.set_epoch(0)
    backward(model, 0)
    model[2].weight.grad = None
    before = model[2].weight.detach().clone()
    binmask.step()
    assert torch.equal(model[2].weight, before)
    assert model[2].weight not in binmask.state
    assert binmask.layer_sparsity()["2.weight"] == 0.0


def test_an_average_of_the_model_is_masked_again():
    model = network()
    binmask = binmask_dist.patch(model, sgd(model), **MASK)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(30):
        train(model, binmask, 1, start=step)
        average.update_parameters(model)
    masks = binmask.masks()
    assert any(average.module.get_parameter(name)[~mask].any() for name, mask in masks.items())
    binmask.apply_masks_(average)
    for name, mask in masks.items():
        assert not average.module.get_parameter(name)[~mask].any()
    with pytest.raises(ValueError, match=r"has no parameter '0\.weight'"):
        binmask.apply_masks_(nn.Linear(2, 2))
    average.module.get_parameter("0.weight").data = torch.empty(0)
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \(0,\) and not .*under ZeRO-3 the model itself"):
        binmask.apply_masks_(average)


def test_what_only_deepspeed_can_read_is_refused():
    """Weights that ZeRO-3 offloads to NVMe, or quantizes: as its attributes tell of them."""
    for part, place in ((torch.empty(1), "nvme"), (torch.empty(4, dtype=torch.int8), None)):
        param = nn.Linear(2, 2).weight
        param.ds_tensor = part
        param.ds_tensor.final_location = place
        with pytest.raises(ValueError, match=r"ZeRO-3 keeps 'x' on NVMe or quantized.*offload parameters to the CPU"):
            in_model("x", param)


def test_a_model_may_have_the_names_that_wrappers_have():
    model = nn.Sequential()
    model.add_module("module", nn.Linear(6, 6))
    binmask = binmask_dist.patch(model, sgd(model), **MASK)
    binmask.apply_masks_(model)
    binmask.apply_masks_(AveragedModel(model))
    binmask.apply_masks_(AveragedModel(AveragedModel(model)))


def test_the_model_stays_ordinary():
    """No hooks, no parametrizations, no new names: copies, pickles and compiles as it did."""
    model, _ = trained()
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(copied[0].weight, model[0].weight)


def test_warm_up_leaves_masks_on_and_the_optimizer_alone():
    model, binmask = trained(steps=10)
    assert binmask.masked_groups[0]["learning"] is False
    assert binmask.sparsity() == 0.0
    assert binmask.flips() == binmask_dist.Flips(0, 0)
    train(model, binmask, 10, start=10)
    assert binmask.sparsity() > 0.0


def test_state_at_rest_is_at_most_sixteen_bytes_per_masked_weight():
    for dtype, expected in ((torch.float32, 16), (torch.bfloat16, 14)):
        _, binmask = trained(dtype=dtype)
        dense = network(dtype)
        plain = sgd(dense)
        backward(dense, 0)
        plain.step()
        size = {
            optimizer: sum(
                value.numel() * value.element_size()
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.numel() > 2
            )
            for optimizer in (binmask, plain)
        }
        masked = sum(param.numel() for param in binmask.plan.masked.values())
        assert (size[binmask] - size[plain]) / masked == expected


# -- gradients that are not finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["on", "off", "unmasked"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("steps", [5, 25])  # in the warm-up, and after it
def test_a_gradient_that_is_not_finite_changes_nothing(bad, where, max_grad_norm, steps):
    model, binmask = trained(steps=steps, max_grad_norm=max_grad_norm)
    before = contents(binmask)
    backward(model, 99)
    if where == "unmasked":
        model[0].bias.grad[0] = bad
    elif steps > 10 or where == "on":  # nothing is off in the warm-up
        mask = binmask.masks()["0.weight"]
        model[0].weight.grad[tuple((mask if where == "on" else ~mask).nonzero()[0])] = bad
    else:
        pytest.skip("nothing is off in the warm-up")
    with pytest.warns(UserWarning, match="NaN or inf: the step changed nothing"):
        binmask.step()
    binmask.zero_grad()
    assert same(contents(binmask), before)
    assert binmask.skipped_steps == 1
    train(model, binmask, 5, start=steps)
    assert binmask.skipped_steps == 1
    assert not same(contents(binmask), before)


def test_large_but_finite_gradients_are_not_refused():
    for dtype in (torch.float32, torch.float64):
        model = network(dtype)
        binmask = binmask_dist.patch(model, torch.optim.SGD(model.parameters(), lr=1e-30), **MASK)
        binmask.set_epoch(2)
        for param in model.parameters():
            param.grad = torch.full_like(param, 1e25)
        binmask.step()
        assert binmask.skipped_steps == 0
        assert binmask.grad_norm > 1e25


def test_the_check_can_be_switched_off():
    model, binmask = trained(check_finite=False)
    backward(model, 99)
    model[0].bias.grad[0] = float("nan")
    binmask.step()
    assert binmask.skipped_steps == 0
    assert model[0].bias.isnan().any()


@pytest.mark.parametrize("compile", [False, True])
def test_masked_weights_are_plus_zero(compile):
    """A file full of random signs would not compress."""
    model, binmask = trained(steps=30, compile=compile)
    assert not graphs.compiler_failed()
    for name, mask in binmask.masks().items():
        off = model.get_parameter(name)[~mask]
        assert len(off) > 10
        assert not torch.signbit(off).any()


# -- bad input: one clear sentence each


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lam=-1.0), "lam must be a finite number, 0 or more, not -1.0"),
        (dict(lam=float("nan")), "lam must be a finite number"),
        (dict(lam="1e-3"), "lam must be a finite number"),
        (dict(epochs=0), "epochs must be a whole number, 1 or more, not 0"),
        (dict(epochs=2.5), "epochs must be a whole number"),
        (dict(alpha0=2.0), r"alpha0 must lie between 0 and alpha1 \(1.0\), not 2.0"),
        (dict(alpha0=-0.1), "masks start on"),
        (dict(alpha1=0.0), "alpha1 must be positive"),
        (dict(warmup=1.5), "warmup is a fraction of the epochs"),
        (dict(mask_lr=-1e-3), "mask_lr must be a finite number"),
        (dict(mask_eps=0.0), "mask_eps must be positive"),
        (dict(mask_lr_final=float("inf")), "mask_lr_final must be a finite number"),
        (dict(mask_betas=(0.9, 1.0)), r"mask_betas must be two numbers in \[0, 1\)"),
        (dict(mask_betas=(0.9, 0.99, 0.999)), "mask_betas must be two numbers"),
        (dict(mask_betas=0.9), "mask_betas must be two numbers"),
        (dict(warmup="0.1"), "warmup is a fraction of the epochs, between 0 and 1, not '0.1'"),
        (dict(alpha0=None), "alpha0 must lie between 0 and alpha1"),
        (dict(alpha1="1"), "alpha1 must be positive, not '1'"),
        (dict(mask_eps=None), "mask_eps must be positive, not None"),
        (dict(max_grad_norm="1"), "max_grad_norm must be positive or None, not '1'"),
        (dict(max_grad_norm=0), "max_grad_norm must be positive"),
        (dict(from_zeros="no"), "from_zeros must be True or False, not 'no'"),
        (dict(check_finite=None), "check_finite must be True or False, not None"),
        (dict(compile="off"), "compile must be True or False, not 'off'"),
        (dict(targets="nothing"), "matched no weight"),
        (dict(targets="("), "is not a valid regular expression"),
    ],
)
def test_bad_settings_are_refused_and_the_optimizer_is_left_as_it_was(changes, message):
    model = network()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match=message):
        binmask_dist.patch(model, optimizer, **(MASK | changes))
    assert len(optimizer.param_groups) == 1
    assert "masked" not in optimizer.param_groups[0]


def test_bad_optimizers_are_refused():
    model = network()
    with pytest.raises(ValueError, match="owns none of the model's parameters"):
        binmask_dist.patch(model, sgd(network()), **MASK)
    optimizer = sgd(model)
    binmask = binmask_dist.patch(model, optimizer, **MASK)
    for again in (optimizer, binmask):
        with pytest.raises(ValueError, match="patched already; call patch once"):
            binmask_dist.patch(model, again, **MASK)
    lookahead = timm.optim.Lookahead(sgd(model))
    with pytest.raises(TypeError, match="Lookahead is wrapped around SGD, which would keep groups of its own"):
        binmask_dist.patch(model, lookahead, **MASK)
    with pytest.raises(TypeError, match="LBFGS evaluates the model inside its step"):
        binmask_dist.patch(model, torch.optim.LBFGS(model.parameters()), **MASK)
    with pytest.raises(ValueError, match="with maximize the masks would learn in the other direction"):
        binmask_dist.patch(model, sgd(model, maximize=True), **MASK)
    with pytest.raises(TypeError, match=r"has been through accelerator\.prepare; call patch before it"):
        binmask_dist.patch(model, Accelerator(cpu=True).prepare(sgd(model)), **MASK)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not NoneType"):
        binmask_dist.patch(None, sgd(model), **MASK)
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, not Linear"):
        binmask_dist.patch(model, nn.Linear(1, 1), **MASK)
    scheduled = sgd(model)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    with pytest.raises(ValueError, match="make the learning-rate scheduler after patch"):
        binmask_dist.patch(model, scheduled, **MASK)


def test_forgetting_set_epoch_is_an_error_and_not_a_dense_run():
    model = network()
    binmask = binmask_dist.patch(model, sgd(model), **MASK)
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"call binmask.set_epoch\(epoch\) at the start of every epoch"):
        binmask.step()
    for epoch in (-1, 1.0, True):
        with pytest.raises(ValueError, match="epoch must be a whole number"):
            binmask.set_epoch(epoch)


def test_stepping_the_optimizer_that_was_patched_is_an_error_and_not_a_dense_run():
    model = network()
    optimizer = sgd(model)
    binmask = binmask_dist.patch(model, optimizer, lam=1e-3, epochs=2, warmup=0.0)
    binmask.set_epoch(0)
    backward(model, seed=0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"this SGD was given to patch.* give accelerator\.prepare what patch"):
        optimizer.step()
    prepared = Accelerator(cpu=True).prepare(optimizer)
    with pytest.raises(RuntimeError, match="given to patch"):
        prepared.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for twin in (copy.deepcopy(binmask), pickle.loads(pickle.dumps(binmask))):
        with pytest.raises(RuntimeError, match="given to patch"):
            twin.inner.step()
    binmask.step()
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    with pytest.raises(RuntimeError, match="given to patch"):  # after a good step, too
        optimizer.step()


def test_a_run_that_is_too_short_for_masks_to_go_off_says_so():
    def run(mask_lr: float, epochs: int = 4) -> list[str]:
        model = network()
        binmask = binmask_dist.patch(
            model, sgd(model), lam=1.0, epochs=epochs, warmup=0.25, mask_lr=mask_lr, mask_lr_final=mask_lr
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for epoch in range(epochs):
                binmask.set_epoch(epoch)
                for seed in range(10):
                    backward(model, seed)
                    binmask.step()
                    binmask.zero_grad()
                    binmask.set_epoch(epoch)  # as the Trainer's callback does at every step
        assert (binmask.sparsity() > 0) == (mask_lr > 0.01)  # with this lam, masks go off as soon as they can
        return [str(warning.message) for warning in said]

    (sentence,) = run(mask_lr=0.009)  # 30 steps of learning carry a latent by 0.27, and it starts at 0.3
    assert (
        "4 epochs of 10 steps are too few" in sentence and "by 0.27" in sentence and "mask_lr=0.03 or more" in sentence
    )
    assert run(mask_lr=0.02) == []
    assert run(mask_lr=0.0) == []  # masks that are not to learn


def test_a_sparse_gradient_is_refused():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    binmask = binmask_dist.patch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), targets=["0.weight"], **(MASK | dict(warmup=0.0))
    )
    binmask.set_epoch(0)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="sparse gradient"):
        binmask.step()


def test_state_that_lies_end_to_end_can_be_copied_and_loaded():
    """Copies do not share memory with the original, and go on as it does; a loaded state is laid end to end again."""

    def lies_end_to_end(binmask) -> bool:
        latents = [binmask.state[param]["latent"] for param in binmask.masked_groups[0]["params"]]
        return joining.as_one(latents) is not None

    model, binmask = trained()
    assert lies_end_to_end(binmask)
    twin, twin_binmask = copy.deepcopy((model, binmask))
    loaded, loaded_binmask = trained(steps=1)
    loaded.load_state_dict(model.state_dict())
    loaded_binmask.load_state_dict(copy.deepcopy(binmask.state_dict()))
    before = contents(binmask)
    train(twin, twin_binmask, 20, start=25)
    assert all(torch.equal(value, before[key]) for key, value in contents(binmask).items())
    train(loaded, loaded_binmask, 20, start=25)
    train(model, binmask, 20, start=25)
    assert lies_end_to_end(loaded_binmask)
    for other in (twin_binmask, loaded_binmask):
        theirs = contents(other)
        assert all(torch.equal(value, theirs[key]) for key, value in contents(binmask).items())


def test_the_state_of_a_dense_optimizer_is_refused():
    """Its groups can have the sizes of ours, and would take their place: no masks, and no word about it."""
    model = network()
    groups = [{"params": [model[0].bias, model[2].bias]}, {"params": [model[0].weight, model[2].weight]}]
    dense = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    backward(model, 0)
    dense.step()
    saved = dense.state_dict()
    binmask = binmask_dist.patch(model, sgd(model), **MASK)
    before = contents(binmask)
    with pytest.raises(ValueError, match="this state was not saved with these masks"):
        binmask.load_state_dict(saved)
    assert len(binmask.masked_groups) == 1
    assert contents(binmask).keys() == before.keys()


def test_weights_that_start_off_do_not_count_in_the_first_norm():
    model = network()
    with torch.no_grad():
        model[0].weight[:20] = 0
    binmask = binmask_dist.patch(model, sgd(model), **(MASK | dict(from_zeros=True, max_grad_norm=1e-3)))
    binmask.set_epoch(0)
    backward(model, 0)
    expected = torch.cat([(p.grad * (p != 0) if p.ndim > 1 else p.grad).reshape(-1) for p in model.parameters()]).norm()
    assert expected < torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm() * 0.99
    binmask.step()
    assert binmask.grad_norm == pytest.approx(float(expected), rel=1e-5)


def test_a_complex_parameter_that_is_not_masked_is_trained():
    model = network()
    model.register_parameter("phase", nn.Parameter(torch.randn(3, dtype=torch.complex64)))
    binmask = binmask_dist.patch(model, sgd(model), **MASK)
    binmask.set_epoch(0)
    before = model.phase.detach().clone()
    (backward(model, 0).detach() + model.phase.abs().sum()).backward()
    binmask.step()
    assert not torch.equal(model.phase, before)
    assert binmask.grad_norm**2 == pytest.approx(sum(float(p.grad.abs().square().sum()) for p in model.parameters()))


@pytest.mark.parametrize("epoch", [0, 1])  # in the warm-up, and after it
def test_double_precision_is_kept(epoch):
    models = []
    for compile in (False, True):
        model = network(torch.float64)
        binmask = binmask_dist.patch(model, sgd(model), **(MASK | dict(compile=compile)))
        binmask.set_epoch(epoch)
        for seed in range(3):
            backward(model, seed)
            binmask.step()
            binmask.zero_grad()
        models.append(model)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, ours.float().double())


def test_a_rate_in_a_tensor_is_scaled_once_in_each_group():
    model = network()
    binmask = binmask_dist.patch(model, sgd(model, lr=torch.tensor(0.1)), **MASK)
    for group in binmask.param_groups:
        group["lr"] *= 0.5
    assert [float(group["lr"]) for group in binmask.param_groups] == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize("make", [transformers.Adafactor, timm.optim.Adafactor], ids=["transformers", "timm"])
def test_an_optimizer_may_have_no_learning_rate(make):
    """Theirs follows from the number of the step."""
    model = network()
    binmask = binmask_dist.patch(model, make(model.parameters()), **MASK)
    assert {group["lr"] for group in binmask.param_groups} == {None}
    train(model, binmask, 25)
    assert 0 < binmask.sparsity() < 1


def test_numbers_of_numpy_are_numbers():
    model = network()
    binmask = binmask_dist.patch(model, sgd(model), **(MASK | dict(lam=np.float32(1e-3), epochs=np.int64(4))))
    binmask.set_epoch(np.int64(2))
    group = binmask.masked_groups[0]
    assert (type(group["lam"]), type(group["epochs"]), type(group["epoch"])) == (float, int, int)


def test_the_state_of_other_targets_is_refused():
    first, second = network(), network()
    saved = binmask_dist.patch(first, sgd(first), targets=["0"], **MASK)
    train(first, saved, 25)
    binmask = binmask_dist.patch(second, sgd(second), targets=["2"], **MASK)
    before = copy.deepcopy(binmask.param_groups)
    with pytest.raises(ValueError, match=r"other targets or of another model: they differ in '0\.weight'; patch with"):
        binmask.load_state_dict(saved.state_dict())
    assert [group["param_names"] for group in binmask.param_groups] == [group["param_names"] for group in before]


def test_masks_can_be_read_when_a_layer_was_taken_out_of_the_model():
    model, binmask = trained()
    expected = binmask.layer_sparsity()
    del model[0]
    assert binmask.layer_sparsity() == expected
    assert binmask.masks().keys() == expected.keys()


@pytest.mark.parametrize("parameters", [nn.Module.parameters, nn.Module.named_parameters])
def test_a_group_that_is_added_later_gets_the_names_of_the_model(parameters):
    model = network()
    model[2].requires_grad_(False)
    binmask = binmask_dist.patch(model, sgd(model[0]), **MASK)
    binmask.add_param_group({"params": parameters(model[2].requires_grad_(True)), "lr": 0.01})
    binmask.add_param_group({"params": nn.Parameter(torch.ones(2))})
    assert [group["param_names"] for group in binmask.param_groups[-2:]] == [
        ["2.weight", "2.bias"],
        ["not_in_model.3.0"],
    ]
    train(model, binmask, 15)
    assert list(binmask.layer_sparsity()) == ["0.weight"]


def test_a_compiled_training_step_may_hold_the_masks_step():
    torch.compiler.reset()
    (model, binmask), (expected, _) = trained(steps=0), trained()
    step = torch.compile(lambda: binmask.step(), backend="eager")
    for number in range(25):
        binmask.set_epoch(min(number // 10, 3))
        backward(model, number)
        step()
        binmask.zero_grad()
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compiled", "parallel"])
def test_a_model_that_is_wrapped_already_has_its_own_names(wrap):
    model = network()
    wrapped = wrap(model)
    binmask = binmask_dist.patch(wrapped, sgd(wrapped), targets=["0"], **MASK)
    assert list(binmask.plan.masked) == ["0.weight"]
    assert binmask.model is model
