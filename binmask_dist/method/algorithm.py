"""Algorithm 1 of "Effective Neural Network L0 Regularization With BinMask", as functions of tensors.

One step, for a weight W with mask b = q(latent), q(x) = 1 if x >= 0 else 0, and the gradient g that
backpropagation gives for the product W * b:

    g_W     = g * b                                        dL/dW
    g_b     = g * W + lam * b                              dL/db plus the penalty; the identity
                                                           straight-through estimator: dL/dlatent = dL/db
    W       = U(W, g_W)                                    the user's optimizer
    latent  = clip(Adam(latent, g_b, rate), -alpha1, alpha1)
    product = W * q(latent)                                what the next forward pass sees

`learn_` is everything before U, `product_` everything after it. Both only do element-wise maths, so they may
be handed a flat, padded or sharded piece of a weight. fp32 inside, the tensors' own dtype outside. They are written
for torch.compile: scalars arrive as one tensor, because a Python float would be a new graph for every value.
`learn_and_update_` takes U into the same pass where U is known (see `updates.py`), and `update_` is such a U alone.
`learn_eagerly_` is the same step where there is no compiler, in the few passes that torch's own kernels allow.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam

from binmask_dist.method.scratch import scratch_like


def warmup_epochs(warmup: float, epochs: int) -> int:
    """E_b' of Algorithm 1: how many epochs the masks wait before they learn."""
    return round(warmup * epochs)


def mask_rate(epoch: int, *, epochs: int, waiting: int, initial: float, final: float) -> float:
    """Learning rate of the latents in an epoch at or after the `waiting` epochs of warm-up.

    The paper prints eta_0 + (eta_1 - eta_0) / 2 * (cos(...) + 1), which would start at the final rate eta_1 and end
    at the initial rate eta_0. The names, and the text around it, say the opposite: the two are swapped here.
    """
    last = epochs - waiting - 1
    if last <= 0:  # one epoch of learning: the paper's fraction is 0 / 0
        return initial
    progress = min((epoch - waiting) / last, 1.0)
    return final + (initial - final) / 2 * (math.cos(progress * math.pi) + 1)


@dataclass(frozen=True)
class Scalars:
    """The scalars of one step."""

    step: int  # Adam's, counted from 1
    lam: float
    rate: float
    betas: tuple[float, float]
    eps: float
    alpha1: float
    clip: float = 1.0

    def tensor(self, device: torch.device) -> Tensor:
        """In the order in which `learn_` unpacks them, with Adam's bias corrections worked in."""
        beta1, beta2 = self.betas
        step_size = self.rate / (1 - beta1**self.step)
        second_moment_scale = math.sqrt(1 - beta2**self.step)
        values = [self.lam, beta1, 1 - beta1, beta2, 1 - beta2, step_size, second_moment_scale]
        return torch.tensor([*values, self.eps, self.alpha1, self.clip], dtype=torch.float32, device=device)


def latent_gradient(grad: Tensor, weight: Tensor, keep: Tensor, lam: Tensor | float) -> Tensor:
    """g_b = g * W + lam * b."""
    return grad * weight + torch.where(keep, lam, 0.0)


def learn_(
    grad: Tensor,  # any dtype: g; becomes clip * g_W
    weight: Tensor,  # any dtype: W before its update
    latent: Tensor,  # fp32
    exp_avg: Tensor,  # fp32: Adam's first moment of the latent
    exp_avg_sq: Tensor,  # fp32: Adam's second moment
    scalars: Tensor,  # fp32, shape (10,): Scalars.tensor
) -> Tensor:
    """Update the latents in place and leave g_W in `grad`, for U. Returns how many masks flipped."""
    grad_w, _, flips = _learn(grad, weight, latent, exp_avg, exp_avg_sq, scalars)
    grad.copy_(grad_w)
    return flips


def learn_and_update_(
    update: Callable,  # U, from updates.py
    grad: Tensor,  # stays as it is
    weight: Tensor,  # W
    latent: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    param: Tensor,  # becomes W * b
    *rest: Tensor,  # what U keeps for the weight, the scalars of `learn_`, the scalars of U
) -> Tensor:
    """`learn_`, U and `product_` in one pass over memory, for an optimizer whose U is known."""
    *kept, scalars, update_scalars = rest
    grad_w, keep, flips = _learn(grad, weight, latent, exp_avg, exp_avg_sq, scalars)
    new_weight = _updated(update, weight, grad_w, kept, update_scalars)
    weight.copy_(new_weight)
    param.copy_(torch.where(keep, new_weight, 0.0))
    return flips


def update_(
    update: Callable,
    grad: Tensor,  # stays as it is
    param: Tensor,  # W: all masks are on, and do not learn
    *rest: Tensor,  # as in `learn_and_update_`
) -> None:
    """U in one pass over memory, for the warm-up."""
    *kept, scalars, update_scalars = rest
    clip = scalars[-1]
    param.copy_(_updated(update, param, grad.float() * clip, kept, update_scalars))


def _updated(update: Callable, weight: Tensor, grad_w: Tensor, kept: Sequence[Tensor], scalars: Tensor) -> Tensor:
    """The new W in fp32. What U keeps for the weight is updated in place."""
    new_weight, *new_kept = update(weight.float(), grad_w, *kept, scalars)
    for tensor, value in zip(kept, new_kept, strict=True):
        tensor.copy_(value)
    return new_weight


def _learn(
    grad: Tensor, weight: Tensor, latent: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Update the latents in place; returns clip * g_W in fp32, the new mask, and how many masks flipped."""
    lam, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, scale, eps, alpha1, clip = scalars.unbind()
    g = grad.float()
    keep = latent >= 0
    grad_b = latent_gradient(g, weight.float(), keep, lam)
    m = exp_avg * beta1 + grad_b * one_minus_beta1
    v = exp_avg_sq * beta2 + grad_b * grad_b * one_minus_beta2
    moved = latent - (m * step_size) / (v.sqrt() / scale + eps)
    keep_now = moved >= 0
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    latent.copy_(torch.minimum(torch.maximum(moved, -alpha1), alpha1))
    return torch.where(keep, g * clip, 0.0), keep_now, (keep_now != keep).sum(dtype=torch.int32)


def learn_eagerly_(
    grad: Tensor,
    weight: Tensor,
    latent: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Scalars,
    sizes: Sequence[int] = (),  # of the weights, if several lie end to end
) -> Tensor:
    """`learn_` with torch's fused Adam. Returns how many masks flipped, in each of the weights if there are several."""
    keep = mask(latent, "mask before")
    # in fp32, and in the latent's memory order, which the fused Adam takes for granted
    grad_b = torch.mul(grad.float(), weight.float(), out=scratch_like("grad_b", latent)).add_(keep, alpha=scalars.lam)
    beta1, beta2 = scalars.betas

    # one by one: the fused Adam rounds the end of a run of memory differently
    def weights(tensor: Tensor) -> list[Tensor]:
        return list(tensor.split(sizes)) if sizes else [tensor]

    adam(
        weights(latent),
        weights(grad_b),
        weights(exp_avg),
        weights(exp_avg_sq),
        [],
        list(torch.full((len(sizes) or 1,), scalars.step - 1.0, device=latent.device).unbind()),
        fused=latent.device.type in ("cpu", "cuda"),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=scalars.rate,
        weight_decay=0.0,
        eps=scalars.eps,
        maximize=False,
    )
    latent.clamp_(-scalars.alpha1, scalars.alpha1)
    grad.mul_(keep if scalars.clip == 1.0 else keep * scalars.clip)
    flipped = mask(latent).sub_(keep)
    if sizes:
        return torch.stack([_count(part) for part in weights(flipped)])
    return _count(flipped)


def _count(flipped: Tensor) -> Tensor:
    """How many are 1 or -1, and not 0. `count_nonzero` takes several times as long."""
    flat = flipped.reshape(-1)
    exact = flat if flat.numel() <= 2**24 else flat.double()  # fp32 counts to 2^24
    return torch.dot(exact, exact).long()


def mask_gradient_(grad: Tensor, latent: Tensor, scalars: Tensor) -> None:
    """Leave g_W in `grad` while the masks are fixed."""
    clip = scalars[-1]
    grad.copy_(torch.where(latent >= 0, grad.float() * clip, 0.0))


def mask_gradient_eagerly_(grad: Tensor, latent: Tensor, scalars: Scalars) -> None:
    grad.mul_(mask(latent)).mul_(scalars.clip)


def product_(param: Tensor, weight: Tensor, latent: Tensor) -> None:
    """param = W * b."""
    param.copy_(torch.where(latent >= 0, weight, 0.0))


def product_eagerly_(param: Tensor, weight: Tensor, latent: Tensor) -> None:
    # 0 + W * b: a negative W times zero is -0.0, and a file full of random signs does not compress
    torch.addcmul(weight.new_zeros(()), weight, mask(latent).to(weight.dtype), out=param)


def smooth_(smoothed: Tensor, latent: Tensor, gamma: float) -> None:
    """The smoothed mask of section 2.2, once b is known: gamma * smoothed + (1 - gamma) * b."""
    smoothed.mul_(gamma).add_(mask(latent), alpha=1 - gamma)


def mask(latent: Tensor, name: str = "mask") -> Tensor:
    """b as floating point numbers: eager torch is several times slower on a mixture with bools."""
    return torch.ge(latent, 0, out=scratch_like(name, latent))


def masked_square_sum(grad: Tensor, latent: Tensor) -> Tensor:
    """Sum of squares of g_W, for gradient clipping: masked entries do not count, unless they are not finite."""
    return (grad.float() * (latent >= 0)).square().sum()
