"""Models to plan for, and short ways to ask for their plans."""

import torch
from torch import nn

from binmask_dist.method.targets import Plan, make_plan


def plan_of(model: nn.Module, targets="auto", exclude=(), owned: set[int] | None = None) -> Plan:
    return make_plan(model, owned, targets, exclude)


def masked(model: nn.Module, targets="auto", exclude=()) -> list[str]:
    return list(plan_of(model, targets, exclude).masked)


def entry(plan: Plan, name: str):
    return next(entry for entry in plan.entries if entry.name == name)


def in_class(name: str, *bases: type, **members) -> type:
    """A class of the given name, as a library that is not installed would have it."""
    return type(name, bases, members)


class SmallNet(nn.Module):
    """A stem, two blocks and a head: names such as layer1.0.conv.weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(self._block(), self._block())
        self.fc = nn.Linear(4, 2)
        self.token = nn.Parameter(torch.zeros(1, 3, 4))

    def _block(self) -> nn.Module:
        block = nn.Module()
        block.conv = nn.Conv2d(4, 4, 1)
        block.norm = nn.BatchNorm2d(4)
        return block


ALL_LAYERS = ["stem.weight", "layer1.0.conv.weight", "layer1.1.conv.weight", "fc.weight"]


def std_convolutions() -> list[nn.Module]:
    from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
    from transformers.models.bit.modeling_bit import WeightStandardizedConv2d

    plain = [cls(4, 4, 3) for cls in (StdConv2d, ScaledStdConv2d, WeightStandardizedConv2d)]
    return plain + [cls(4, 4, 3) for cls in (StdConv2dSame, ScaledStdConv2dSame)]


def quant_linear(class_name: str) -> nn.Module:
    """GPTQ and AWQ keep packed integers in buffers."""
    layer = in_class(class_name, nn.Module)()
    layer.in_features, layer.out_features = 8, 4
    layer.register_buffer("qweight", torch.zeros(1, 4, dtype=torch.int32))
    layer.register_buffer("scales", torch.ones(1, 4))
    return layer
