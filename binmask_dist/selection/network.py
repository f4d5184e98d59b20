"""A network behind an input mask, and the paper's network for tables."""

import itertools
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from binmask_dist.method.input_mask import InputMask


def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (64, 20)) -> nn.Sequential:
    """The paper's network for tables: hidden layers with tanh."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((inputs, *hidden)):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1] if hidden else inputs, outputs))


class MaskedLinear(nn.Module):
    """A linear layer behind an input mask, which it multiplies into its weight instead: (x * s) W = x (s * W).

    That spares the backward pass the gradient of a whole batch of inputs, and lets inputs be sparse. Its weight is the
    transpose of a linear layer's, (inputs, outputs): the order in which a sparse product reads and writes.
    """

    def __init__(self, mask: InputMask, linear: nn.Linear) -> None:
        super().__init__()
        self.mask = mask
        weight = linear.weight.detach().t().contiguous()
        self.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * self.mask.mask[:, None]
        if x.layout == torch.strided:
            product = x @ weight
        else:
            with torch.autocast(x.device.type, enabled=False):  # sparse products are not there in bf16
                product = torch.sparse.mm(x, weight)
        return product if self.bias is None else product + self.bias


# what one row comes to does not depend on the other rows of its batch, nor on chance
ROW_BY_ROW: tuple[type[nn.Module], ...] = (
    *(MaskedLinear, InputMask, nn.Linear, nn.Conv1d, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten, nn.Identity),
    *(nn.LayerNorm, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU),
)


def is_row_by_row(model: nn.Module) -> bool:
    """Whether a row that is twice in a batch may as well be there once with twice the weight: False if unknown."""
    kinds = {type(module) for module in model.modules()}
    return all(kind in ROW_BY_ROW or kind.forward is nn.Sequential.forward for kind in kinds)


def behind_mask(network: nn.Module, mask: InputMask, example_shape: Sequence[int]) -> tuple[nn.Module, bool]:
    """The network with a mask in front, and whether it takes batches that are sparse."""
    if len(example_shape) == 1 and type(network).forward is nn.Sequential.forward:
        layers = list(network.children())
        if layers and type(layers[0]) is nn.Flatten:  # of what is flat already
            layers = layers[1:]
        if layers and _is_plain_linear(layers[0]):
            return nn.Sequential(MaskedLinear(mask, layers[0]), *layers[1:]), True
    return nn.Sequential(mask, network), False


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is nothing but a weight and a bias: no normalised weight, no hook that somebody has put there."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    is_linear = type(module) is nn.Linear and set(dict(module.named_parameters())) <= {"weight", "bias"}
    return is_linear and not any(hooks)
