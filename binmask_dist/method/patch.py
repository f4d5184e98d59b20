"""`patch`: from a model and its optimizer to a `BinMask`."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from binmask_dist.method import graphs
from binmask_dist.method.layout import parameter_names
from binmask_dist.method.optimizer import BinMask
from binmask_dist.method.targets import Plan, make_plan

GAMMA = 0.9  # of the smoothed masks of inputs
WORTH_COMPILING = 2**20  # masked weights; with fewer, compiling takes longer than it can save
OF_GROUPS = ("lam", "mask_lr", "mask_lr_final")  # what a group of the optimizer may say itself, like its lr


def patch(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    lam: float,
    epochs: int,
    targets: str | Sequence[str] = "auto",
    exclude: str | Sequence[str] = (),
    alpha0: float = 0.3,
    alpha1: float = 1.0,
    mask_lr: float = 1e-3,
    mask_lr_final: float = 1e-5,
    warmup: float = 0.1,
    mask_betas: tuple[float, float] = (0.9, 0.999),
    mask_eps: float = 1e-8,
    max_grad_norm: float | None = None,
    check_finite: bool = True,
    from_zeros: bool = False,
    input_lam: float | None = None,
    input_alpha0: float = 0.02,
    compile: bool | None = None,
) -> BinMask:
    """Train `model` with BinMask: give the result to `accelerator.prepare` in place of `optimizer`.

    Masked weights get groups of their own, which carry the masks' hyper-parameters: to change lam or the rate during
    training set `lam` or `mask_lr_initial` in `masked_groups`. A group of `optimizer` that has `lam`, `mask_lr` or
    `mask_lr_final` itself, as it may have its own lr, keeps them. Call before `prepare`, and make learning-rate
    schedulers afterwards, from what this returns.

    lam            penalty for each weight that is on
    epochs         E of Algorithm 1: how many epochs training will take
    targets        "auto" (convolution and linear weights), a regex matched in full, or a list of names; see the plan.
                   Input masks are always among them; "inputs": they alone
    exclude        the same forms, checked first
    alpha0, alpha1 where latents start, and the bound they are clipped to
    mask_lr        the latents' learning rate, annealed to mask_lr_final by a cosine in whole epochs; over all steps it
                   should add up to several times alpha0, or no mask has the time to go off
    warmup         fraction of the epochs in which all masks stay on
    mask_betas, mask_eps  of the latents' Adam
    max_grad_norm  clip by the norm of g_W, in which masked entries do not count
    check_finite   a step whose gradients have a NaN or inf changes nothing; reads every gradient once more
    from_zeros     the model is sparse already: weights that are zero start off
    input_lam      lam of input masks; by default lam
    input_alpha0   alpha0 of input masks
    compile        compile the step, and with it the update of torch's SGD, Adam and AdamW; by default if there are
                   enough weights to be worth it
    """
    model = _unwrapped(model)
    _check_optimizer(model, optimizer)
    _check(lam=lam, epochs=epochs, alpha0=alpha0, alpha1=alpha1, warmup=warmup, max_grad_norm=max_grad_norm)
    _check_rates(mask_lr, mask_lr_final, mask_betas, mask_eps)
    _check_switches(check_finite=check_finite, from_zeros=from_zeros, compile=compile is None or compile)
    input_lam = lam if input_lam is None else input_lam
    _check_penalty("input_lam", input_lam)
    _check_start("input_alpha0", input_alpha0, alpha1)
    owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not any(id(param) in owned for param in model.parameters()):
        raise ValueError(
            "the optimizer owns none of the model's parameters; make it from model.parameters(), before prepare"
        )
    plan = make_plan(model, owned, targets, exclude)
    masked_elements = sum(entry.numel for entry in plan.entries if entry.masked)
    if compile is None:
        compile = masked_elements >= WORTH_COMPILING
    hyper_parameters = {
        "masked": True,
        "lam": float(lam),
        "epochs": int(epochs),
        "alpha0": float(alpha0),
        "alpha1": float(alpha1),
        "mask_lr": float(mask_lr),
        "mask_lr_initial": float(mask_lr),
        "mask_lr_final": float(mask_lr_final),
        "warmup": float(warmup),
        "mask_betas": tuple(map(float, mask_betas)),
        "mask_eps": float(mask_eps),
        "max_grad_norm": None if max_grad_norm is None else float(max_grad_norm),
        "check_finite": check_finite,
        "from_zeros": from_zeros,
        "compile": compile and not graphs.compilation_is_off(),
        "epoch": None,
        "learning": False,
        "frozen": False,
        "skipped_steps": 0,
        "grad_norm": None,
    }
    _check_groups(optimizer, hyper_parameters)
    # fixed: U leaves W at one
    of_inputs = {
        **hyper_parameters,
        "lam": float(input_lam),
        "alpha0": float(input_alpha0),
        "fixed": True,
        "gamma": GAMMA,
    }
    _split_groups(model, optimizer, plan, hyper_parameters, of_inputs)
    return BinMask(optimizer, plan, model)


def _split_groups(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    hyper_parameters: dict[str, Any],
    of_inputs: dict[str, Any],
) -> None:
    """Part every group into its unmasked weights, its masked ones and its input masks, with names."""
    kinds = {id(param): "input" if name in plan.inputs else "masked" for name, param in plan.masked.items()}
    extras: dict[str, dict[str, Any]] = {"unmasked": {}, "masked": hyper_parameters, "input": of_inputs}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        named = list(zip(parameter_names(model, group["params"], index), group["params"], strict=True))
        for kind, extra in extras.items():
            part = [(name, param) for name, param in named if kinds.get(id(param), "unmasked") == kind]
            if part:
                part_names, params = (list(column) for column in zip(*part, strict=True))
                # a learning rate in a tensor is scaled in place by schedulers, in each group of its own
                own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
                masking = {**extra, **_said_by(group)} if extra else {}
                groups.append({**own, "params": params, "param_names": part_names, **masking})
    optimizer.param_groups = groups


def _said_by(group: dict[str, Any]) -> dict[str, float]:
    """The masks' hyper-parameters that the group has brought along."""
    said = {key: float(group[key]) for key in OF_GROUPS if key in group}
    return {**said, "mask_lr_initial": said["mask_lr"]} if "mask_lr" in said else said


def _unwrapped(model: Any) -> Any:
    """What DDP or torch.compile is around: parameters go by the model's own names."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def _check_optimizer(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, BinMask) or any(group.get("masked") for group in optimizer.param_groups):
        raise ValueError("this optimizer is patched already; call patch once")
    if type(optimizer).__module__.startswith("accelerate."):
        raise TypeError("this optimizer has been through accelerator.prepare; call patch before it, on the model's own")
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError("with maximize the masks would learn in the other direction; minimise the negated loss")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the model inside its step, where weights are not masked; use a first-order one"
        )
    if callable(getattr(optimizer, "eval", None)):
        raise TypeError(
            f"{type(optimizer).__name__} changes the weights for evaluation (it has .eval()), behind the masks' back; "
            "use an optimizer that does not"
        )
    inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if inside:
        raise TypeError(
            f"{type(optimizer).__name__} is wrapped around {type(inside[0]).__name__}, which would keep groups of its "
            "own; patch the one inside, or use it alone"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "patch changes the optimizer's groups; make the learning-rate scheduler after patch (if there is none, and "
            "initial_lr came with a state that was loaded, remove it from the groups)"
        )


def _check_groups(optimizer: Optimizer, hyper_parameters: dict[str, Any]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for key in sorted(group.keys() & hyper_parameters.keys()):
            if key in optimizer.defaults:
                if key == "max_grad_norm":  # of LAMB, which reads it in its defaults
                    continue
                raise ValueError(
                    f"{type(optimizer).__name__} has a hyper-parameter that is called {key!r}, as one of the masks is: "
                    "they would take each other's place in the groups"
                )
            if key not in OF_GROUPS:
                raise ValueError(
                    f"group {index} of the optimizer has {key!r}: a group may have {', '.join(OF_GROUPS)} of its own; "
                    "the others are the same for all masks, and for patch to be told"
                )
            check = _check_penalty if key == "lam" else _check_rate
            check(f"{key} of group {index}", group[key])


def _check(*, lam: Any, epochs: Any, alpha0: float, alpha1: float, warmup: float, max_grad_norm: float | None) -> None:
    _check_penalty("lam", lam)
    if isinstance(epochs, bool) or not isinstance(epochs, Integral) or epochs < 1:
        raise ValueError(f"epochs must be a whole number, 1 or more, not {epochs!r}")
    if not (_is_number(alpha1) and alpha1 > 0):
        raise ValueError(f"alpha1 must be positive, not {alpha1!r}")
    _check_start("alpha0", alpha0, alpha1)
    if not (_is_number(warmup) and 0 <= warmup <= 1):
        raise ValueError(f"warmup is a fraction of the epochs, between 0 and 1, not {warmup!r}")
    if max_grad_norm is not None and not (_is_number(max_grad_norm) and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm must be positive or None, not {max_grad_norm!r}")


def _check_penalty(name: str, lam: Any) -> None:
    if not (_is_number(lam) and lam >= 0):
        raise ValueError(f"{name} must be a finite number, 0 or more, not {lam!r}")


def _check_start(name: str, alpha0: float, alpha1: float) -> None:
    if not (_is_number(alpha0) and 0 <= alpha0 <= alpha1):
        raise ValueError(f"{name} must lie between 0 and alpha1 ({alpha1}), not {alpha0!r}: masks start on")


def _check_rates(mask_lr: float, mask_lr_final: float, mask_betas: tuple[float, float], mask_eps: float) -> None:
    if not (_is_number(mask_eps) and mask_eps > 0):
        raise ValueError(
            f"mask_eps must be positive, not {mask_eps!r}: weights without a gradient would divide by zero"
        )
    _check_rate("mask_lr", mask_lr)
    _check_rate("mask_lr_final", mask_lr_final)
    are_two = isinstance(mask_betas, tuple | list) and len(mask_betas) == 2
    if not (are_two and all(_is_number(beta) and 0 <= beta < 1 for beta in mask_betas)):
        raise ValueError(f"mask_betas must be two numbers in [0, 1), not {mask_betas!r}")


def _check_switches(**switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):  # the word "False" would be taken for yes
            raise ValueError(f"{name} must be True or False, not {value!r}")


def _check_rate(name: str, rate: Any) -> None:
    if not (_is_number(rate) and rate >= 0):
        raise ValueError(f"{name} must be a finite number, 0 or more, not {rate!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
