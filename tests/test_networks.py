"""The paper's networks, as timm finds them."""

import pytest
import timm
import torch

import binmask_dist.networks as networks

# By hand. wide_resnet32: 864 + 64; 10 * 9216 + 640; 18432 + 9 * 36864 + 1280 + 2048 + 128;
# 73728 + 9 * 147456 + 2560 + 8192 + 256; 1280. vgg19: 20,018,880 in convolutions, 11,008 in norms, 5120.
# lenet5: 150 + 12; 2400 + 32; 48120; 10164; 850. mlp_bn: 401920 + 1024; 262656 + 1024; 5130.
# mlp_tanh: 50240; 1300; 210.
PARAMETERS = {
    "wide_resnet32": 1_860_512,
    "vgg19_bn_32px": 20_035_008,
    "lenet5_bn": 61_728,
    "mlp_bn": 671_754,
    "mlp_tanh": 51_750,
}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_timm_lists_them_all() -> None:
    assert set(timm.list_models(module="networks")) == set(PARAMETERS)
    assert set(networks.MLPS) < set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_size_and_shapes(name: str) -> None:
    model = timm.create_model(name)
    assert count(model) == PARAMETERS[name]
    assert timm.data.resolve_model_data_config(model)["input_size"] == model.pretrained_cfg["input_size"]
    assert model(torch.randn(2, *model.pretrained_cfg["input_size"])).shape == (2, 10)


@pytest.mark.parametrize("name", PARAMETERS)
def test_classes_channels_and_size(name: str) -> None:
    sizes = {} if name in ("wide_resnet32", "vgg19_bn_32px") else {"img_size": 32}
    model = timm.create_model(name, num_classes=7, in_chans=2, **sizes)
    assert model(torch.randn(2, 2, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("name", ["wide_resnet32", "vgg19_bn_32px"])
def test_cifar_networks_start_as_in_probmasks_code(name: str) -> None:
    torch.manual_seed(0)
    for module in timm.create_model(name).modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            inputs = module.weight[0].numel()
            error = 1 / (2 * module.weight.numel()) ** 0.5  # of a standard deviation from so many numbers
            assert module.bias is None
            assert float(module.weight.detach().std()) == pytest.approx((2 / inputs) ** 0.5, rel=5 * error)


def test_an_mlp_takes_a_flat_input_and_other_layers() -> None:
    model = timm.create_model("mlp_tanh", in_features=5, num_classes=3)
    assert count(model) == (5 * 64 + 64) + (64 * 20 + 20) + (20 * 3 + 3)
    assert [type(layer).__name__ for layer in model] == ["Flatten", "Linear", "Tanh", "Linear", "Tanh", "Linear"]
    assert model(torch.randn(4, 5)).shape == (4, 3)
    model = timm.create_model("mlp_bn", in_features=5, num_classes=3, hidden=(8,))
    assert [type(layer).__name__ for layer in model] == ["Flatten", "Linear", "ReLU", "BatchNorm1d", "Linear"]


def test_there_are_no_pretrained_weights() -> None:
    assert not any(timm.is_model_pretrained(name) for name in PARAMETERS)
    with pytest.raises(RuntimeError, match=r"[Pp]retrained"):
        timm.create_model("lenet5_bn", pretrained=True)


def test_the_functions_make_the_same_networks() -> None:
    """The benchmarks call them without timm, and without arguments."""
    assert count(networks.vgg19_bn()) == PARAMETERS["vgg19_bn_32px"]
    assert count(networks.wide_resnet32()) == PARAMETERS["wide_resnet32"]
