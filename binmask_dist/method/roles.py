"""What each parameter of a model is: the weight of a layer, an input mask, something from which a layer computes its
weight, or none of these; and what may keep it from being masked.

It follows from the type of the module that owns the parameter. Classes of libraries that need not be installed are
known by the names of their classes.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from binmask_dist.method.input_mask import InputMask

LAYER, INPUT, COMPUTED, OTHER = "layer", "input", "computed", "other"

# Module types, the weights of theirs that are linear maps, and what to call them.
LAYERS: tuple[tuple[tuple[type, ...], tuple[str, ...], str], ...] = (
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), ("weight",), "convolution"),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), ("weight",), "transposed convolution"),
    ((nn.Linear,), ("weight",), "linear"),
    ((nn.Bilinear,), ("weight",), "bilinear"),
    (
        (nn.MultiheadAttention,),
        ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
        "attention projection",
    ),
    ((nn.RNNCellBase,), ("weight_ih", "weight_hh"), "recurrent"),
)
LAYERS_BY_CLASS_NAME: dict[str, tuple[tuple[str, ...], str]] = {
    "Conv1D": (("weight",), "linear, stored transposed"),  # transformers: GPT-2 and its kin
    "GroupedLinearLayer": (("weight",), "grouped linear"),  # transformers: ConvBERT
    "DbrxExpertGLU": (("w1", "v1", "w2"), "experts"),  # transformers: 2-D, experts stacked along the rows
}
# Layers that compute the weight they use from the parameter, in their forward.
COMPUTED_BY_CLASS_NAME = {
    "StdConv2d": "weight-standardised",
    "StdConv2dSame": "weight-standardised",
    "ScaledStdConv2d": "weight-standardised",
    "ScaledStdConv2dSame": "weight-standardised",
    "WeightStandardizedConv2d": "weight-standardised",  # transformers: BiT
    "CondConv2d": "one of several kernels that are mixed",
}
NOT_A_ZERO = "a zero in it is no zero in the weight that the layer uses"
QUANTISED_PARAMETERS = ("Params4bit", "Int8Params")
QUANTISED_PACKAGES = ("bitsandbytes", "torchao", "optimum", "hqq")  # their tensors may claim a float dtype
QUANTISED_MODULES = re.compile(
    ".*QuantLinear.*|WQLinear.*|HQQLinear|QLinear|QuantizedLinear|EetqLinear|WeightedQuantizedModule"
)
WAY_OUT = {  # of what keeps a parameter of any kind from being masked
    "quantised": "masks need floating-point weights: load the model unquantised",
    "complex": "masks need real weights",
    "empty": "there is nothing to mask in it",
    "frozen": "set requires_grad before patch",
    "not in the optimizer": "make the optimizer from model.parameters()",
}
PEFT_NOTES = {
    "BaseTunerLayer": "the mask makes the adapter sparse; the weight that it is merged into stays dense",
    "AuxiliaryTrainingWrapper": "modules_to_save: the copy that peft trains is masked, not the original",
}


@dataclass(frozen=True)
class Weight:
    """One distinct parameter under all its names, or a quantised weight that is no parameter."""

    param: nn.Parameter | None
    names: tuple[str, ...]
    module_names: tuple[str, ...]
    kind: str
    numel: int
    role: str  # LAYER, INPUT, COMPUTED or OTHER
    what: str
    obstacle: str  # starts with a key of WAY_OUT; empty if nothing keeps it from being masked
    note: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def way_out(self) -> str:
        """What to do about the obstacle."""
        return next(text for key, text in WAY_OUT.items() if self.obstacle.startswith(key))


def weights_of(model: nn.Module, owned: set[int] | None) -> list[Weight]:
    """All of a model's. `owned`: the id()s of the parameters that the optimizer has; None if that does not matter."""
    return [*_parameters(model, owned), *_quantised_buffers(model)]


def _parameters(model: nn.Module, owned: set[int] | None) -> Iterator[Weight]:
    """Every distinct parameter, in the order and under the first name of model.named_parameters()."""
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[nn.Parameter, list[tuple[str, str]]] = {}  # (module, name there), wherever it is used
    for module_name, module in modules.items():
        for leaf, param in module._parameters.items():
            if param is not None:
                places.setdefault(param, []).append((module_name, leaf))
    for param, where in places.items():
        names = tuple(f"{module_name}.{leaf}".lstrip(".") for module_name, leaf in where)
        if isinstance(param, UninitializedParameter):
            raise ValueError(f"{names[0]} has no shape yet; run a batch through the lazy module before patch")
        owners = {modules[place[0]]: (place[1], name) for place, name in zip(where, names, strict=True)}
        kind = " = ".join(dict.fromkeys(_kind(modules, *place) for place in where))
        role, what, note = _shared_role(param, owners)
        if role == COMPUTED:
            note = f"{kind} is {what}"
        yield Weight(
            param=param,
            names=names,
            module_names=tuple(module_name for module_name, _ in where if module_name),
            kind=kind,
            numel=_shape(param).numel(),
            role=role,
            what=what,
            obstacle=_obstacle(param, owned),
            note=note or _peft_note(modules, where[0][0]),
        )


def _quantised_buffers(model: nn.Module) -> Iterator[Weight]:
    """The weights that quantised modules keep where named_parameters() does not see them."""
    for name, module in model.named_modules():
        class_name = type(module).__name__
        # quantisation-aware layers have such names too, but train an ordinary weight
        is_parameter = isinstance(getattr(module, "weight", None), nn.Parameter)
        if not is_parameter and any(map(QUANTISED_MODULES.fullmatch, _class_names(module))):
            numel = getattr(module, "in_features", 0) * getattr(module, "out_features", 0)
            names, kind = (f"{name}.weight".lstrip("."),), f"{class_name}.weight"
            yield Weight(None, names, (name,), kind, numel, LAYER, "linear", f"quantised ({class_name})")


def _kind(modules: dict[str, nn.Module], module_name: str, leaf: str) -> str:
    module = modules[module_name]
    if isinstance(module, ParametrizationList):  # module_name is head.parametrizations.weight
        host, _, weight = module_name.rpartition("parametrizations.")
        module, leaf = modules[host.rstrip(".")], f"{weight}.{leaf}"
    if isinstance(module, nn.RNNBase):
        leaf = re.sub(r"_l\d+(_reverse)?", "", leaf)
    return f"{type(module).__name__}.{leaf}"


def _shared_role(param: nn.Parameter, owners: dict[nn.Module, tuple[str, str]]) -> tuple[str, str, str]:
    """(role, what it is, note) of a parameter that one module owns, or several."""
    roles = [_role(module, leaf, param) for module, (leaf, _) in owners.items()]
    names = [name for _, name in owners.values()]
    layers = [name for name, (role, _) in zip(names, roles, strict=True) if role == LAYER]
    role, what = next((role for role in roles if role[0] != LAYER), roles[0])
    note = f"{' and '.join(names)} are one parameter with one mask" if len(names) > 1 else ""
    if role == OTHER and layers:
        what = f"{what}, tied to {layers[0]}"
    elif role == COMPUTED:
        what = f"{what}: {NOT_A_ZERO}"
    return role, what, note


def _role(module: nn.Module, leaf: str, param: nn.Parameter) -> tuple[str, str]:
    """What a parameter is to a module that owns it: (role, in words)."""
    class_names = _class_names(module)
    computed = next((COMPUTED_BY_CLASS_NAME[n] for n in class_names if n in COMPUTED_BY_CLASS_NAME), "")
    weights, what = _layer_weights(module)
    if isinstance(module, InputMask):
        return INPUT, "input mask"
    if computed and leaf == "weight":
        return COMPUTED, computed
    if leaf in weights:
        return LAYER, what
    if isinstance(module, ParametrizationList):
        return COMPUTED, "parametrised"
    if any(leaf.startswith(f"{weight}_") for weight in weights):  # weight_g, weight_v, weight_orig
        return COMPUTED, "hooked (weight_norm, spectral_norm, prune)"
    # transformers has a class of experts for each model: MixtralExperts, Qwen3MoeExperts, GptOssExperts
    if class_names[0].endswith("Experts") and len(_shape(param)) == 3:
        return LAYER, "experts"
    # The rest is left out whatever it is, and only the word depends on names.
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return OTHER, "embedding"
    if leaf.startswith("bias") or leaf.endswith("bias"):
        return OTHER, "bias"
    if any("Norm" in name for name in class_names):
        return OTHER, "norm"
    is_vector = sum(size > 1 for size in _shape(param)) <= 1
    return OTHER, "vector or scale" if is_vector else "not of a known layer (token, table, router, ...)"


def _layer_weights(module: nn.Module) -> tuple[Iterable[str], str]:
    if isinstance(module, nn.RNNBase):
        return [name for name in module._flat_weights_names if name.startswith("weight_")], "recurrent"
    for types, weights, what in LAYERS:
        if isinstance(module, types):
            return weights, what
    return next((LAYERS_BY_CLASS_NAME[n] for n in _class_names(module) if n in LAYERS_BY_CLASS_NAME), ((), ""))


def _obstacle(param: nn.Parameter, owned: set[int] | None) -> str:
    cls = type(param)
    if cls.__name__ in QUANTISED_PARAMETERS or cls.__module__.split(".")[0] in QUANTISED_PACKAGES:
        return f"quantised ({cls.__name__})"
    if param.is_complex():
        return "complex"
    if not _shape(param).numel():
        return "empty"
    if not param.is_floating_point() or param.dtype.itemsize < 2:  # float8 is for storage, not for training
        return f"quantised ({param.dtype})"
    if not param.requires_grad:
        return "frozen (requires_grad is False)"
    return "" if owned is None or id(param) in owned else "not in the optimizer"


def _peft_note(modules: dict[str, nn.Module], module_name: str) -> str:
    parts = module_name.split(".")
    for depth in reversed(range(len(parts))):
        class_names = _class_names(modules[".".join(parts[:depth])])
        for name, note in PEFT_NOTES.items():
            if name in class_names and parts[depth] != "base_layer":
                return note
    return ""


def _shape(param: nn.Parameter) -> torch.Size:
    return getattr(param, "ds_shape", param.shape)  # under deepspeed.zero.Init the tensor itself is empty


def _class_names(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]
