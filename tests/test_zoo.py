"""The model zoo: one model of every timm family and many transformers architectures, made without a download.

Each is planned, patched and trained for two steps. Its zeros must lie where the masks say, and what it saves must
load into the stock class, which knows nothing of masks, and give the same outputs.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from binmask_dist import BinMask, patch

BATCH = 2


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def tensors_in(output: Any) -> list[Tensor]:
    """All floating-point tensors of a model's output, whatever its form."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def train_two_steps(model: nn.Module, run: Callable[[nn.Module], Any]) -> BinMask:
    model.train()
    binmask = patch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lam=1e-18,  # and mask_eps: below the gradients that layer scales of 1e-5 leave
        epochs=1,
        warmup=0.0,
        mask_lr=0.5,  # Adam moves every latent from 0.3 by about this much, so that half the masks flip
        mask_eps=1e-15,
        compile=False,
    )
    binmask.set_epoch(0)
    for _ in range(2):
        outputs = [tensor for tensor in tensors_in(run(model)) if tensor.requires_grad]
        loss = sum((tensor * torch.randn_like(tensor)).sum() for tensor in outputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # batch norm over two single pixels explodes
        binmask.step()
        binmask.zero_grad()
    assert binmask.skipped_steps == 0
    return binmask


def check_masks(model: nn.Module, binmask: BinMask, initial: nn.Module) -> int:
    """Check every masked weight against its mask and its latent; return how many are off."""
    masks = binmask.masks()
    params, initial_params = dict(model.named_parameters()), dict(initial.named_parameters())
    assert list(binmask.plan.masked) == [name for name in params if name in masks]
    off = 0
    for name, mask in masks.items():
        param, state = params[name].detach(), binmask.state.get(params[name], {})
        assert mask.shape == param.shape
        if "latent" in state:
            assert torch.equal(mask, state["latent"] >= 0), name
            assert torch.equal(param, torch.where(mask, state["weight"], 0.0)), name
        else:  # the loss does not depend on it
            assert mask.all(), name
            assert torch.equal(param, initial_params[name]), name
        off += mask.numel() - int(mask.count_nonzero())
    total = sum(mask.numel() for mask in masks.values())
    assert binmask.sparsity() == pytest.approx(off / total)
    by_layer = binmask.layer_sparsity()
    assert sum(by_layer[name] * mask.numel() for name, mask in masks.items()) == pytest.approx(off)
    assert 0.02 < off / total < 0.98, "too few masks flipped, or too many, for this to be a test"
    return off


def check_copy(model: nn.Module, loaded: nn.Module, run: Callable[[nn.Module], Any]) -> None:
    """`loaded` has the same state to the last bit, and computes the same."""
    states = model.state_dict(), loaded.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    with torch.no_grad():
        expected, outputs = (tensors_in(run(which.eval())) for which in (model, loaded))
    assert expected
    for one, other in zip(expected, outputs, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def zeros_in_files(folder: Path) -> int:
    zeros = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = (file.get_tensor(name) for name in file.keys())  # noqa: SIM118 (not a dict)
            zeros += sum(tensor.numel() - int(tensor.count_nonzero()) for tensor in tensors)
    return zeros


# The smallest model of every family, that is of every module of timm.models. Finding them means making all of the
# 1,351 models of timm 1.0.30 on the meta device, which takes five minutes.
TIMM_FAMILIES = {
    "beit": "beit_base_patch16_224",
    "byoanet": "eca_botnext26ts_256",  # halonet_h1, smaller by 5%, wants 256 pixels
    "byobnet": "test_byobnet",
    "cait": "cait_xxs24_224",
    "coat": "coat_tiny",
    "convit": "convit_tiny",
    "convmixer": "convmixer_768_32",
    "convnext": "test_convnext",
    "cpubone": "cpubone_nano",
    "crossvit": "crossvit_tiny_240",
    "csatv2": "csatv2",
    "cspnet": "cs3darknet_focus_s",
    "davit": "davit_tiny",
    "deepseek_vit": "deepseek_vit_412m",
    "deit": "deit_tiny_patch16_224",
    "densenet": "densenet121",
    "dla": "dla46x_c",
    "dpn": "dpn48b",
    "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0",
    "efficientnet": "test_efficientnet",
    "efficientvim": "efficientvim_m1",
    "efficientvit_mit": "efficientvit_b0",
    "efficientvit_msra": "efficientvit_m0",
    "eva": "vit_tiny_patch16_dinov3_qkvb",
    "fasternet": "fasternet_t0",
    "fastvit": "fastvit_t8",
    "focalnet": "focalnet_tiny_srf",
    "gcvit": "gcvit_xxtiny",
    "gemma4_vit": "gemma4_vit_167m",
    "ghostnet": "ghostnet_050",
    "hardcorenas": "hardcorenas_b",
    "hgnet": "hgnetv2_b0",
    "hiera": "hiera_tiny_224",
    "hieradet_sam2": "sam2_hiera_tiny",
    "hrnet": "hrnet_w18_small",
    "iformer": "iformer_t",
    "inception_next": "inception_next_atto",
    "inception_resnet_v2": "inception_resnet_v2",
    "inception_v3": "inception_v3",
    "inception_v4": "inception_v4",
    "lcnetv2": "lcnetv2_small",
    "levit": "levit_128s",
    "lowformer": "lowformer_b0",
    "mambaout": "test_mambaout",
    "maxxvit": "maxvit_pico_rw_256",
    "metaformer": "poolformerv2_s12",
    "mlp_mixer": "gmlp_ti16_224",
    "mobilenetv3": "mobilenetv3_small_050",
    "mobilenetv5": "mobilenetv5_base",
    "mobilevit": "mobilevit_xxs",
    "mvitv2": "mvitv2_tiny",
    "naflexvit": "naflexvit_base_patch16_parfac_gap",
    "nasnet": "nasnetalarge",
    "nest": "nest_tiny",
    "nextvit": "nextvit_small",
    "nfnet": "test_nfnet",
    "pit": "pit_ti_224",
    "pnasnet": "pnasnet5large",
    "pvt_v2": "pvt_v2_b0",
    "qwen3_vit": "qwen3_vit_88m",
    "rdnet": "rdnet_tiny",
    "regnet": "regnetx_002",
    "repghost": "repghostnet_050",
    "repvit": "repvit_m1",
    "res2net": "res2next50",
    "resnest": "resnest14d",
    "resnet": "test_resnet",
    "resnetv2": "resnetv2_18",
    "rexnet": "rexnet_100",
    "selecsls": "selecsls42",
    "senet": "legacy_seresnet18",
    "sequencer": "sequencer2d_s",
    "shvit": "shvit_s1",
    "sknet": "skresnet18",
    "starnet": "starnet_s050",
    "swiftformer": "swiftformer_xs",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window8_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_224",
    "tiny_vit": "tiny_vit_5m_224",
    "tnt": "tnt_s_legacy_patch16_224",
    "tresnet": "tresnet_m",
    "twins": "twins_svt_small",
    "vgg": "vgg11",
    "visformer": "visformer_tiny",
    "vision_transformer": "test_vit",
    "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
    "vision_transformer_relpos": "vit_srelpos_small_patch16_224",
    "vision_transformer_sam": "samvit_base_patch16_224",
    "vitamin": "vitamin_small_224",
    "volo": "volo_d1_224",
    "vovnet": "ese_vovnet19b_slim_dw",
    "xception": "legacy_xception",
    "xception_aligned": "xception41p",
    "xcit": "xcit_nano_12_p8_224",
}
TIMM_NOT_COVERED: dict[str, str] = {}  # family: why
TIMM_SIZES = {  # pixels; the others take 32
    "crossvit_tiny_240": 240,
    "csatv2": 64,
    "deepseek_vit_412m": 126,
    "efficientformer_l1": 224,
    "gemma4_vit_167m": 96,
    "inception_resnet_v2": 96,
    "inception_v3": 96,
    "inception_v4": 96,
    "nasnetalarge": 64,
    "qwen3_vit_88m": 64,
    "samvit_base_patch16_224": 64,
    "swinv2_tiny_window8_256": 64,  # at 32 pixels its last window is one patch, and it divides zero by zero
}
ONE_EACH = (1, 1, 1, 1)
TINY_VIT = {"embed_dim": 64, "depth": 2, "num_heads": 2}
TIMM_OPTIONS: dict[str, dict[str, Any]] = {  # families whose smallest model is large
    "beit_base_patch16_224": TINY_VIT,
    "csatv2": {"dims": (16, 32, 64, 128)},
    "davit_tiny": {"embed_dims": (24, 48, 96, 192)},
    "deepseek_vit_412m": TINY_VIT,
    "gemma4_vit_167m": {**TINY_VIT, "head_dim": 32, "intermediate_size": 128, "position_embedding_size": 64},
    "hiera_tiny_224": {"stages": ONE_EACH},
    "mobilenetv5_base": {"channel_multiplier": 0.25},
    "naflexvit_base_patch16_parfac_gap": TINY_VIT,
    "nasnetalarge": {"stem_size": 32, "num_features": 1056},
    "qwen3_vit_88m": {**TINY_VIT, "pos_embed_grid_size": 4},
    "res2next50": {"layers": ONE_EACH},
    "sam2_hiera_tiny": {"stages": ONE_EACH},
    "samvit_base_patch16_224": TINY_VIT,
    "sequencer2d_s": {"layers": ONE_EACH},
    "swin_tiny_patch4_window7_224": {"embed_dim": 32},
    "swinv2_cr_tiny_224": {"depths": (1, 1, 2, 1)},
    "swinv2_tiny_window8_256": {"embed_dim": 48},
    "tnt_s_legacy_patch16_224": {"depth": 2},
    "tresnet_m": {"layers": ONE_EACH},
    "twins_svt_small": {"depths": ONE_EACH},
    "vgg11": {"mlp_ratio": 0.05},
    "vit_srelpos_small_patch16_224": {"depth": 2},
    "vitamin_small_224": {"depth": 2},
}


def smallest(family: str) -> str:
    """By making all of the family, without their memory."""
    sizes = {}
    for name in timm.list_models(module=family):
        with torch.device("meta"):
            sizes[name] = sum(param.numel() for param in timm.create_model(name).parameters())
    return min(sizes, key=sizes.__getitem__)


def families() -> list[str]:
    """Of the timm that is installed; binmask_dist's own networks are among them once they are imported."""
    return sorted(set(timm.models.list_modules()) - TIMM_NOT_COVERED.keys() - {"networks"})


def test_families_are_those_of_the_models():
    assert len(families()) >= 90
    for family in families():
        assert family not in TIMM_FAMILIES or timm.models.is_model_in_modules(TIMM_FAMILIES[family], [family])


@pytest.mark.parametrize("family", families())
def test_timm(family, tmp_path):
    name = TIMM_FAMILIES.get(family) or smallest(family)  # a later timm has more
    size, options = TIMM_SIZES.get(name, 32), TIMM_OPTIONS.get(name, {})
    config = timm.get_pretrained_cfg(name)
    if config.fixed_input_size and size != config.input_size[-1]:
        options = {**options, "img_size": size}
    model = timm.create_model(name, num_classes=10, **options)
    stock = copy.deepcopy(model)
    images = torch.randn(BATCH, 3, size, size)

    def run(model: nn.Module) -> Any:
        return model(images)

    binmask = train_two_steps(model, run)
    off = check_masks(model, binmask, stock)
    save_model(model, str(tmp_path / "model.safetensors"))
    assert zeros_in_files(tmp_path) >= off > 0
    load_model(stock, tmp_path / "model.safetensors")
    check_copy(model, stock, run)


# transformers: class, configuration, inputs. Everything that is not said here is the default of the class.
VOCABULARY, LENGTH = 64, 10
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
}
SPEECH = {
    **TEXT,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
}


def text() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH))}


def text_to_text() -> dict[str, Tensor]:
    return {**text(), "decoder_input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH))}


def image(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def image_and_text() -> dict[str, Tensor]:
    return {**image(), **text()}


def sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 400)}


def spectrogram_to_text() -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(BATCH, 8, 32),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH)),
    }


Inputs = Callable[[], dict[str, Tensor]]
TRANSFORMERS: dict[str, tuple[dict[str, Any], Inputs]] = {
    # encoders
    "AlbertForMaskedLM": ({**TEXT, "embedding_size": 8}, text),
    "BertForMaskedLM": (TEXT, text),
    "BertForSequenceClassification": (TEXT, text),
    "ConvBertForMaskedLM": ({**TEXT, "embedding_size": 16, "num_groups": 2, "head_ratio": 1}, text),
    "DebertaV2ForSequenceClassification": (
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        text,
    ),
    "DistilBertForSequenceClassification": (
        {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
        text,
    ),
    "ElectraForPreTraining": ({**TEXT, "embedding_size": 8}, text),
    "ModernBertForMaskedLM": (TEXT, text),
    "MPNetForMaskedLM": (TEXT, text),
    "RobertaForMaskedLM": (TEXT, text),
    "XLNetLMHeadModel": ({"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}, text),
    # decoders
    "BloomForCausalLM": ({"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2}, text),
    "FalconForCausalLM": (TEXT, text),
    "Gemma2ForCausalLM": (GROUPED, text),
    "Gemma3ForCausalLM": (GROUPED, text),
    "GemmaForCausalLM": (GROUPED, text),
    "GPT2LMHeadModel": (
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        text,
    ),
    "GPTJForCausalLM": (
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "rotary_dim": 4},
        text,
    ),
    "GPTNeoForCausalLM": (
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "max_position_embeddings": 32,
            "attention_types": [[["global", "local"], 1]],
        },
        text,
    ),
    "GPTNeoXForCausalLM": (TEXT, text),
    "LlamaForCausalLM": (GROUPED, text),
    "MambaForCausalLM": (
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        text,
    ),
    "MistralForCausalLM": (GROUPED, text),
    "OPTForCausalLM": ({**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16}, text),
    "Phi3ForCausalLM": (GROUPED, text),
    "PhiForCausalLM": (TEXT, text),
    "Qwen2ForCausalLM": (GROUPED, text),
    "Qwen3ForCausalLM": (GROUPED, text),
    # mixtures of experts
    "DbrxForCausalLM": (
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 2,
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
        },
        text,
    ),
    "DeepseekV3ForCausalLM": (
        {
            **TEXT,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
        text,
    ),
    "GptOssForCausalLM": ({**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, text),
    "MixtralForCausalLM": ({**GROUPED, "num_local_experts": 4}, text),
    "OlmoeForCausalLM": ({**TEXT, "num_experts": 4, "num_experts_per_tok": 2}, text),
    "Qwen3MoeForCausalLM": (
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        text,
    ),
    # encoders with decoders
    "BartForConditionalGeneration": (
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": 32,
            "bos_token_id": 0,
            "pad_token_id": 1,
            "eos_token_id": 2,
            "forced_eos_token_id": 2,
        },
        text_to_text,
    ),
    "SwitchTransformersForConditionalGeneration": (
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
            "num_experts": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
        },
        text_to_text,
    ),
    "T5ForConditionalGeneration": (
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        text_to_text,
    ),
    # images
    "BeitForImageClassification": (IMAGE, image),
    "BitForImageClassification": (
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_groups": 2,
            "layer_type": "preactivation",
        },
        image,
    ),
    "ConvNextForImageClassification": (
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_stages": 4},
        lambda: image(32),
    ),
    "DeiTForImageClassification": (IMAGE, image),
    "Dinov2ForImageClassification": (IMAGE, image),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        lambda: image(32),
    ),
    "SegformerForSemanticSegmentation": (
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
        },
        lambda: image(32),
    ),
    "SwinForImageClassification": (
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        image,
    ),
    "ViTForImageClassification": (IMAGE, image),
    # images with text, and sound
    "CLIPModel": ({"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 8}, image_and_text),
    "SiglipModel": ({"text_config": TEXT, "vision_config": IMAGE}, image_and_text),
    "HubertForCTC": (SPEECH, sound),
    "Wav2Vec2ForCTC": (SPEECH, sound),
    "WhisperForConditionalGeneration": (
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        spectrogram_to_text,
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name, tmp_path):
    options, make_inputs = TRANSFORMERS[name]
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**copy.deepcopy(options)))
    initial = copy.deepcopy(model)
    inputs = make_inputs()

    def run(model: nn.Module) -> Any:
        return model(**inputs)

    binmask = train_two_steps(model, run)
    off = check_masks(model, binmask, initial)
    model.save_pretrained(tmp_path)
    assert zeros_in_files(tmp_path) >= off > 0
    check_copy(model, cls.from_pretrained(tmp_path), run)


def test_lora_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    base = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    model = peft.get_peft_model(copy.deepcopy(base), config)
    inputs = text()

    def run(model: nn.Module) -> Any:
        return model(**inputs)

    binmask = train_two_steps(model, run)
    off = check_masks(model, binmask, model)
    assert {name.split(".")[-3] for name in binmask.masks()} == {"lora_A", "lora_B", "modules_to_save"}
    model.save_pretrained(tmp_path)
    assert zeros_in_files(tmp_path) >= off > 0
    check_copy(model, peft.PeftModel.from_pretrained(base, tmp_path), run)
