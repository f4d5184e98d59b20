"""What each kind of parameter is, and what the plan does about it when nothing is named."""

import re

import pytest
import torch
from plans import SmallNet, entry, in_class, masked, plan_of, quant_linear, std_convolutions
from torch import nn
from torch.nn.utils import prune

# Kinds under "auto".


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(2, 2, 1),
        nn.Conv2d(2, 2, 1),
        nn.Conv3d(2, 2, 1),
        nn.ConvTranspose1d(2, 2, 1),
        nn.ConvTranspose2d(2, 2, 1),
        nn.ConvTranspose3d(2, 2, 1),
        nn.Linear(2, 6),
        nn.Bilinear(2, 2, 2),
        in_class("Conv2dSame", nn.Conv2d)(2, 2, 1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_weight_of_a_layer_is_masked_and_its_bias_is_not(layer):
    plan = plan_of(layer)
    assert list(plan.masked) == ["weight"]
    assert plan.masked["weight"] is layer.weight
    assert entry(plan, "bias").reason == "bias"


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(2),
        nn.BatchNorm2d(2),
        nn.LayerNorm(2),
        nn.GroupNorm(1, 2),
        nn.RMSNorm(2),
        nn.InstanceNorm2d(2, affine=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_norms_are_left_out(layer):
    plan = plan_of(nn.Sequential(nn.Linear(2, 2), layer))
    assert list(plan.masked) == ["0.weight"]
    assert entry(plan, "1.weight").reason == "norm"


def test_embeddings_are_left_out():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Embedding(3, 2), nn.EmbeddingBag(3, 2)])
    plan = plan_of(model)
    assert list(plan.masked) == ["0.weight"]
    assert entry(plan, "1.weight").reason == entry(plan, "2.weight").reason == "embedding"


@pytest.mark.parametrize("shape", [(1, 1, 8), (8,), (), (1, 8, 1, 1)])
def test_tokens_and_scales_are_left_out(shape):
    model = nn.Linear(2, 2)
    model.gamma = nn.Parameter(torch.ones(shape))
    plan = plan_of(model)
    assert list(plan.masked) == ["weight"]
    assert entry(plan, "gamma").reason == "vector or scale"


@pytest.mark.parametrize("shape", [(1, 17, 8), (49, 3)])
def test_position_embeddings_and_tables_are_left_out(shape):
    model = nn.Sequential(nn.Linear(2, 2))
    model.pos_embed = nn.Parameter(torch.ones(shape))
    assert masked(model) == ["0.weight"]
    assert "not of a known layer" in entry(plan_of(model), "pos_embed").reason


def test_multihead_attention_with_one_projection():
    assert masked(nn.MultiheadAttention(4, 2, add_bias_kv=True)) == ["in_proj_weight", "out_proj.weight"]


def test_multihead_attention_with_separate_projections():
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]
    assert masked(attention) == names


@pytest.mark.parametrize("cls", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_weights(cls):
    rnn = cls(3, 4, num_layers=2, bidirectional=True)
    plan = plan_of(rnn)
    assert set(plan.masked) == {name for name, _ in rnn.named_parameters() if name.startswith("weight_")}
    assert {e.kind for e in plan.entries if e.masked} == {f"{cls.__name__}.weight_ih", f"{cls.__name__}.weight_hh"}


@pytest.mark.parametrize("cls", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells(cls):
    assert masked(cls(3, 4)) == ["weight_ih", "weight_hh"]


def test_projected_lstm():
    assert masked(nn.LSTM(3, 4, proj_size=2)) == ["weight_ih_l0", "weight_hh_l0", "weight_hr_l0"]


def test_gpt2_conv1d():
    from transformers.pytorch_utils import Conv1D

    plan = plan_of(Conv1D(6, 4))
    assert list(plan.masked) == ["weight"]
    assert entry(plan, "weight").reason == "linear, stored transposed"


def test_fused_qkv_is_a_linear():
    from timm.layers import Attention

    assert masked(Attention(8, num_heads=2)) == ["qkv.weight", "proj.weight"]


def tiny_moe(name: str) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_local_experts=2,
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


def test_experts_of_mixtral():
    plan = plan_of(tiny_moe("Mixtral"))
    experts = [e for e in plan.entries if "Experts" in e.kind]
    assert {e.kind for e in experts} == {"MixtralExperts.gate_up_proj", "MixtralExperts.down_proj"}
    assert all(e.masked and e.reason == "experts" for e in experts)
    assert all(plan.masked[e.name].dim() == 3 for e in experts)
    assert not any(e.masked for e in plan.entries if e.kind == "MixtralTopKRouter.weight")


def test_experts_with_biases():
    plan = plan_of(tiny_moe("GptOss"))
    experts = {e.kind: e.masked for e in plan.entries if "Experts" in e.kind}
    assert experts == {
        "GptOssExperts.gate_up_proj": True,
        "GptOssExperts.gate_up_proj_bias": False,
        "GptOssExperts.down_proj": True,
        "GptOssExperts.down_proj_bias": False,
    }


def test_experts_of_dbrx():
    from transformers import DbrxConfig, DbrxForCausalLM

    ffn = {"ffn_hidden_size": 8, "moe_num_experts": 2, "moe_top_k": 1}
    attention = {"kv_n_heads": 1, "rope_theta": 1e4}
    config = DbrxConfig(d_model=8, n_heads=2, n_layers=1, vocab_size=20, ffn_config=ffn, attn_config=attention)
    plan = plan_of(DbrxForCausalLM(config))
    assert {e.kind for e in plan.entries if e.masked and "Expert" in e.kind} == {
        f"DbrxExpertGLU.{name}" for name in ("w1", "v1", "w2")
    }


def test_grouped_linear_of_convbert():
    from transformers.models.convbert.modeling_convbert import GroupedLinearLayer

    assert masked(GroupedLinearLayer(8, 8, num_groups=2)) == ["weight"]


# Shared and tied weights.


def test_tied_head_is_left_out_and_said_so():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "mid": nn.Linear(4, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    plan = plan_of(model)
    assert list(plan.masked) == ["mid.weight"]
    tied = entry(plan, "embed.weight")
    assert tied.reason == "embedding, tied to head.weight"
    assert tied.kind == "Embedding.weight = Linear.weight"
    assert [e.name for e in plan.entries] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("target", [["head"], ["embed.weight"], "head.*"])
def test_tied_head_can_be_named_by_either_name(target):
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    plan = plan_of(model, target)
    assert list(plan.masked) == ["embed.weight"]
    assert plan.notes == ("embed.weight and head.weight are one parameter with one mask",)


def test_weight_shared_by_two_layers_has_one_mask():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    plan = plan_of(model)
    assert list(plan.masked) == ["0.weight"]
    assert plan.notes == ("0.weight and 1.weight are one parameter with one mask",)


def test_layer_used_twice_has_one_mask_and_needs_no_note():
    layer = nn.Linear(4, 4)
    plan = plan_of(nn.Sequential(layer, nn.ReLU(), layer))
    assert list(plan.masked) == ["0.weight"]
    assert plan.notes == ()


# Weights that the layer computes from the parameter.


@pytest.mark.parametrize("layer", std_convolutions(), ids=lambda layer: type(layer).__name__)
def test_weight_standardised_convolutions(layer):
    model = nn.Sequential(layer, nn.Conv2d(4, 2, 1))
    plan = plan_of(model)
    assert list(plan.masked) == ["1.weight"]
    assert entry(plan, "0.weight").reason.startswith("weight-standardised: a zero in it is no zero")
    assert plan.notes == ()
    explicit = plan_of(model, ["0.weight"])
    assert list(explicit.masked) == ["0.weight"]
    assert explicit.notes == (
        f"{type(layer).__name__}.weight is weight-standardised: "
        "a zero in it is no zero in the weight that the layer uses",
    )


def test_conditional_convolution():
    from timm.layers import CondConv2d

    model = nn.ModuleList([CondConv2d(4, 4, 3, num_experts=2), nn.Linear(2, 2)])
    plan = plan_of(model)
    assert list(plan.masked) == ["1.weight"]
    assert entry(plan, "0.weight").reason.startswith("one of several kernels that are mixed")


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (nn.utils.parametrizations.weight_norm, "parametrizations.weight.original1"),
        (nn.utils.parametrizations.spectral_norm, "parametrizations.weight.original"),
        (nn.utils.parametrizations.orthogonal, "parametrizations.weight.original"),
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal"],
)
def test_parametrised_weights(wrap, name):
    model = nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 4))
    plan = plan_of(model)
    assert list(plan.masked) == ["1.weight"]
    assert entry(plan, f"0.{name}").reason.startswith("parametrised: ")
    assert entry(plan, f"0.{name}").kind == f"ParametrizedLinear.{name.removeprefix('parametrizations.')}"
    explicit = plan_of(model, [f"0.{name}"])
    assert list(explicit.masked) == [f"0.{name}"]
    assert len(explicit.notes) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda layer: nn.utils.weight_norm(layer), "weight_v"),
        (lambda layer: nn.utils.spectral_norm(layer), "weight_orig"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "weight_orig"),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_weights_under_hooks(wrap, name):
    model = nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 4))
    plan = plan_of(model)
    assert list(plan.masked) == ["1.weight"]
    assert entry(plan, f"0.{name}").reason.startswith("hooked (weight_norm, spectral_norm, prune): ")
    assert len(plan_of(model, [f"0.{name}"]).notes) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_recurrent_weight_under_weight_norm():
    rnn = nn.utils.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    assert masked(rnn) == ["weight_ih_l0"]


# Frozen, foreign, quantised, lazy.


def test_frozen_weights_are_left_out_and_said_so():
    model = SmallNet()
    model.layer1.requires_grad_(False)
    plan = plan_of(model)
    assert list(plan.masked) == ["stem.weight", "fc.weight"]
    assert entry(plan, "layer1.0.conv.weight").reason == "frozen (requires_grad is False)"


def test_weights_outside_the_optimizer_are_left_out_and_said_so():
    model = SmallNet()
    plan = plan_of(model, owned={id(param) for param in model.fc.parameters()})
    assert list(plan.masked) == ["fc.weight"]
    assert entry(plan, "stem.weight").reason == "not in the optimizer"


def quantised_parameters() -> dict[str, nn.Parameter]:
    packed = torch.zeros(8, 1, dtype=torch.uint8)
    in_torchao = in_class("AffineQuantizedTensor", nn.Parameter, __module__="torchao.dtypes")
    return {
        "Params4bit": in_class("Params4bit", nn.Parameter)(packed, requires_grad=False),
        "Int8Params": in_class("Int8Params", nn.Parameter)(torch.zeros(4, 4)),
        "AffineQuantizedTensor": in_torchao(torch.zeros(4, 4)),
        "torch.int8": nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False),
        "torch.float8_e4m3fn": nn.Parameter(torch.zeros(4, 4, dtype=torch.float8_e4m3fn), requires_grad=False),
    }


@pytest.mark.parametrize("name", quantised_parameters())
def test_quantised_parameters(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = quantised_parameters()[name]
    plan = plan_of(model)
    assert list(plan.masked) == ["1.weight"]
    assert entry(plan, "0.weight").reason == f"quantised ({name})"
    error = (
        f"target '0' names 0.weight, which is quantised ({name}); "
        "masks need floating-point weights: load the model unquantised, or exclude it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        plan_of(model, ["0"])


@pytest.mark.parametrize("class_name", ["QuantLinear", "TorchQuantLinear", "WQLinear_GEMM", "HQQLinear"])
def test_quantised_modules(class_name):
    model = nn.ModuleDict({"q_proj": quant_linear(class_name), "head": nn.Linear(4, 4)})
    plan = plan_of(model)
    assert list(plan.masked) == ["head.weight"]
    assert entry(plan, "q_proj.weight").reason == f"quantised ({class_name})"
    assert entry(plan, "q_proj.weight").numel == 32
    for targets in (["q_proj"], [".".join(("q_proj", "weight"))], ".*weight"):
        with pytest.raises(ValueError, match=rf"names q_proj.weight, which is quantised \({class_name}\); masks"):
            plan_of(model, targets)
    assert masked(model, ".*weight", exclude=["q_proj"]) == ["head.weight"]


def test_quantisation_aware_layer_has_an_ordinary_weight():
    assert masked(in_class("QuantLinear", nn.Linear)(4, 4)) == ["weight"]


def test_dynamically_quantised_layer_of_torch():
    from torch.ao.nn.quantized.dynamic import Linear

    plan = plan_of(nn.ModuleList([Linear(4, 4), nn.Linear(4, 4)]))
    assert list(plan.masked) == ["1.weight"]
    assert entry(plan, "0.weight").reason == "quantised (Linear)"


def test_complex_weights():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 4))
    assert masked(model) == ["1.weight"]
    with pytest.raises(ValueError, match=r"names 0.weight, which is complex; masks need real weights, or exclude it"):
        plan_of(model, ["0"])


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_empty_weights():
    model = nn.Sequential(nn.Linear(4, 0), nn.Linear(4, 4))
    assert masked(model) == ["1.weight"]
    assert entry(plan_of(model), "0.weight").reason == "empty"


def test_lazy_modules_are_an_error():
    error = "^0.weight has no shape yet; run a batch through the lazy module before patch$"
    with pytest.raises(ValueError, match=error):
        plan_of(nn.Sequential(nn.LazyLinear(4)))


def test_meta_model_gives_the_same_plan():
    with torch.device("meta"):
        model = SmallNet()
    assert plan_of(model).entries == plan_of(SmallNet()).entries


def test_partitioned_parameters_count_whole():
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].weight.ds_shape = torch.Size((4, 3))
    model[0].weight.data = torch.empty(0)  # what deepspeed.zero.Init leaves
    assert entry(plan_of(model), "0.weight").numel == 12


# LoRA.


@pytest.fixture
def lora_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.mid = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

    return get_peft_model(Net(), LoraConfig(r=2, target_modules=["mid", "embed"], modules_to_save=["head"]))


def test_lora(lora_model):
    plan = plan_of(lora_model)
    assert list(plan.masked) == [
        "base_model.model.mid.lora_A.default.weight",
        "base_model.model.mid.lora_B.default.weight",
        "base_model.model.head.modules_to_save.default.weight",
    ]
    for name in ("mid.base_layer.weight", "head.original_module.weight"):
        assert entry(plan, f"base_model.model.{name}").reason == "frozen (requires_grad is False)"
    assert plan.notes == (
        "the mask makes the adapter sparse; the weight that it is merged into stays dense",
        "modules_to_save: the copy that peft trains is masked, not the original",
    )


def test_lora_by_regex(lora_model):
    assert masked(lora_model, r".*lora_A\..*weight") == ["base_model.model.mid.lora_A.default.weight"]
    with pytest.raises(ValueError, match=r"mid.base_layer.weight, which is frozen"):
        plan_of(lora_model, r".*\.mid\..*")


def test_unfrozen_base_weight_is_no_adapter(lora_model):
    lora_model.base_model.model.mid.base_layer.requires_grad_(True)
    assert entry(plan_of(lora_model), "base_model.model.mid.base_layer.weight").note == ""
