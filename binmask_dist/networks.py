"""The networks of the paper's experiments, registered with timm: once this module is imported, `timm.create_model` and
`timm.list_models(module="networks")` know them by name.

    wide_resnet32   CIFAR, as ProbMask's authors define it: stages of 32, 64 and 128 channels
    vgg19_bn_32px   CIFAR, as ProbMask's authors define it: one linear layer after the convolutions
                    (of both: no bias in the linear layer, which they write as a 1 x 1 convolution, and He's normal
                    distribution by inputs for all weights)
    lenet5_bn       MNIST-CNN: batch normalisation after the convolutions
    mlp_bn          MNIST-MLP: 512 and 512 neurons, ReLU followed by batch normalisation
    mlp_tanh        all other tables: 64 and 20 neurons with tanh
"""

from collections.abc import Sequence
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

MLPS = ("mlp_bn", "mlp_tanh")


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class WideResNet32(nn.Sequential):
    """ResNet32 with twice the usual width: five blocks in each of the three stages. Both can be less."""

    def __init__(
        self, num_classes: int = 10, in_chans: int = 3, width: int = 32, blocks: int = 5, drop_rate: float = 0.0
    ) -> None:
        layers: list[nn.Module] = [nn.Conv2d(in_chans, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            for block in range(blocks):
                layers.append(BasicBlock(inputs, outputs, stride if block == 0 else 1))
                inputs = outputs
        head = _dropping(nn.Flatten(), drop_rate)
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), head, nn.Linear(inputs, num_classes, bias=False))
        _start_as_probmask(self)


class VGG19(nn.Sequential):
    """VGG19 with batch normalisation, and a single linear layer, for images that five poolings leave one pixel of."""

    def __init__(self, num_classes: int = 10, in_chans: int = 3, drop_rate: float = 0.0) -> None:
        layers: list[nn.Module] = []
        inputs = in_chans
        for outputs, repeats in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            for _ in range(repeats):
                layers += [nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, _dropping(nn.Flatten(), drop_rate), nn.Linear(inputs, num_classes, bias=False))
        _start_as_probmask(self)


class LeNet5(nn.Sequential):
    """LeNet5 with batch normalisation after its convolutions. The first one pads 28 pixels to the original's 32."""

    def __init__(self, num_classes: int = 10, in_chans: int = 1, img_size: int | Sequence[int] = 28) -> None:
        height, width = _both(img_size)
        pixels = ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
        super().__init__(
            *(nn.Conv2d(in_chans, 6, 5, padding=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(16 * pixels, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)),
        )


class MLP(nn.Sequential):
    """Hidden layers on a flat input of `in_features` numbers; without those, on the pixels of an image."""

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 1,
        img_size: int | Sequence[int] = 28,
        in_features: int = 0,
        hidden: Sequence[int] = (),
        activation: str = "tanh",
        batch_norm: bool = False,
        drop_rate: float = 0.0,
    ) -> None:
        height, width = _both(img_size)
        inputs = in_features or in_chans * height * width
        layers: list[nn.Module] = [nn.Flatten()]
        for outputs in hidden:
            neurons = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]()
            layers += [nn.Linear(inputs, outputs), _dropping(neurons, drop_rate)]
            if batch_norm:
                layers.append(nn.BatchNorm1d(outputs))
            inputs = outputs
        super().__init__(*layers, nn.Linear(inputs, num_classes))


def _start_as_probmask(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")


def _dropping(module: nn.Module, rate: float) -> nn.Module:
    """With dropout after it, inside one module: the layers keep their names."""
    return nn.Sequential(module, nn.Dropout(rate)) if rate else module


def _both(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _about(input_size: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """What timm wants to know of a network that has no pretrained weights."""
    grey = (0.5,) * input_size[0]
    return {"url": "", "num_classes": 10, "input_size": input_size, "mean": grey, "std": grey, "crop_pct": 1.0, **more}


default_cfgs = generate_default_cfgs(  # the name is timm's: register_model looks for it
    {
        "wide_resnet32": _about((3, 32, 32)),
        "vgg19_bn_32px": _about((3, 32, 32)),
        "lenet5_bn": _about((1, 28, 28), fixed_input_size=True),
        "mlp_bn": _about((1, 28, 28), fixed_input_size=True),
        "mlp_tanh": _about((1, 28, 28), fixed_input_size=True),
    }
)


@register_model
def wide_resnet32(pretrained: bool = False, **kwargs: Any) -> WideResNet32:
    return build_model_with_cfg(WideResNet32, "wide_resnet32", pretrained, **kwargs)


@register_model
def vgg19_bn_32px(pretrained: bool = False, **kwargs: Any) -> VGG19:
    return build_model_with_cfg(VGG19, "vgg19_bn_32px", pretrained, **kwargs)


vgg19_bn = vgg19_bn_32px  # timm has another network under the shorter name


@register_model
def lenet5_bn(pretrained: bool = False, **kwargs: Any) -> LeNet5:
    return build_model_with_cfg(LeNet5, "lenet5_bn", pretrained, **kwargs)


@register_model
def mlp_bn(pretrained: bool = False, **kwargs: Any) -> MLP:
    layers = {"hidden": (512, 512), "activation": "relu", "batch_norm": True, **kwargs}
    return build_model_with_cfg(MLP, "mlp_bn", pretrained, **layers)


@register_model
def mlp_tanh(pretrained: bool = False, **kwargs: Any) -> MLP:
    layers = {"hidden": (64, 20), "activation": "tanh", **kwargs}
    return build_model_with_cfg(MLP, "mlp_tanh", pretrained, **layers)
