"""The plan: which weights get a mask, which do not, and why.

`targets` and `exclude` follow PEFT's `target_modules`:

    "auto"      the weights of convolutions and linear maps: no biases, norms, embeddings, tokens, tables
    "inputs"    nothing but input masks, which every other choice takes in as well
    a string    a regex, matched in full against the names of parameters and of the modules that own them
    a list      names of parameters or modules, whole or from a dot on: "layer1.0.conv1", "fc.weight"

`exclude` takes a regex or a list and is checked first. A target that matches weights of layers takes those
alone, so that "layer1.*" leaves biases and norms in peace. One that matches no weight of a layer takes what
it does match, be it a bias, a norm or an embedding: then that is what was meant.

What a parameter is follows from the type of the module that owns it. Classes of libraries that need not be
installed are known by the names of their classes.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

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
class PlanEntry:
    """What happens to one parameter."""

    name: str
    kind: str  # class of the module that owns it, and its name there: Conv2d.weight
    numel: int
    masked: bool
    reason: str
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What is masked, what is not, and why. `print(plan)` shows one line for each kind of parameter.

    `masked` maps names to parameters in the order of model.named_parameters().
    """

    entries: tuple[PlanEntry, ...]
    masked: dict[str, nn.Parameter] = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()  # those of `masked` that are input masks

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the plan is words only: the parameters are the model's, and engines replace them.
        return {**self.__dict__, "masked": {}}

    def __str__(self) -> str:
        kinds: dict[tuple[bool, str, str], list[PlanEntry]] = {}
        for entry in self.entries:
            kinds.setdefault((entry.masked, entry.kind, entry.reason), []).append(entry)
        rows = [("masked", "kind", "parameters", "weights", "why")]
        for (masked, kind, reason), entries in sorted(kinds.items(), key=lambda item: not item[0][0]):
            numel = sum(entry.numel for entry in entries)
            rows.append(("yes" if masked else "no", kind, f"{len(entries):,}", f"{numel:,}", reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{masked:<{widths[0]}}  {kind:<{widths[1]}}  {count:>{widths[2]}}  {numel:>{widths[3]}}  {reason}"
            for masked, kind, count, numel, reason in rows
        ]
        return "\n".join([*lines, f"total: {self.total}", *[f"note: {note}" for note in self.notes]])

    @property
    def total(self) -> str:
        """How much is masked, in words."""
        chosen = [entry for entry in self.entries if entry.masked]
        part, whole = (sum(entry.numel for entry in entries) for entries in (chosen, self.entries))
        return (
            f"{len(chosen):,} of {len(self.entries):,} parameters masked, "
            f"{part:,} of {whole:,} weights ({part / max(whole, 1):.1%})"
        )


@dataclass(frozen=True)
class _Weight:
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


def make_plan(
    model: nn.Module,
    trainable_ids: set[int] | None,
    targets: str | Iterable[str] = "auto",
    exclude: str | Iterable[str] = (),
) -> Plan:
    """Decide for every parameter of `model`, by names, types and shapes: a model on the meta device will do.

    `trainable_ids` are the id()s of the parameters that the optimizer owns; None if that does not matter.
    """
    weights = [*_parameters(model, trainable_ids), *_quantised_buffers(model)]
    excluded = {w.name for hits in _find("exclude", exclude, weights).values() for w in hits}
    inputs = {w.name for w in weights if w.role == INPUT and not w.obstacle}
    if inputs & excluded:
        raise ValueError(f"{min(inputs & excluded)} is an input mask and cannot be excluded; take it out of the model")
    if isinstance(targets, str) and targets == "auto":
        matched = {w.name for w in weights}
        chosen = {w.name for w in weights if w.role == LAYER and not w.obstacle} - excluded
    elif isinstance(targets, str) and targets == "inputs":
        matched = {w.name for w in weights if w.role == INPUT}
        chosen = set()
        if not inputs:
            raise ValueError('targets is "inputs", but the model trains no InputMask; put one in front of it')
    else:
        found = _find("target", targets, weights)
        matched = {w.name for hits in found.values() for w in hits}
        chosen = {w.name for target, hits in found.items() for w in _take(target, hits, excluded)}
    chosen |= inputs  # U would train them as scales
    if not chosen:
        raise ValueError(_why_empty(weights, matched, excluded))
    entries = tuple(
        PlanEntry(
            name=w.name,
            kind=w.kind,
            numel=w.numel,
            masked=w.name in chosen,
            reason=_reason(w, chosen, excluded, matched),
            note=w.note if w.name in chosen else "",
        )
        for w in weights
    )
    masked = {w.name: w.param for w in weights if w.name in chosen and w.param is not None}
    notes = tuple(dict.fromkeys(entry.note for entry in entries if entry.note))
    return Plan(entries, masked, notes, tuple(name for name in masked if name in inputs))


def _reason(weight: _Weight, chosen: set[str], excluded: set[str], matched: set[str]) -> str:
    if weight.name in chosen:
        return weight.what if weight.role in (LAYER, INPUT) else f"targeted ({weight.what})"
    if weight.name in excluded:
        return "excluded"
    if weight.name not in matched:
        return "not targeted"
    return weight.obstacle if weight.obstacle and weight.role in (LAYER, INPUT) else weight.what


# What a parameter is.


def _parameters(model: nn.Module, owned: set[int] | None) -> Iterator[_Weight]:
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
        yield _Weight(
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


def _quantised_buffers(model: nn.Module) -> Iterator[_Weight]:
    """The weights that quantised modules keep where named_parameters() does not see them."""
    for name, module in model.named_modules():
        class_name = type(module).__name__
        # quantisation-aware layers have such names too, but train an ordinary weight
        is_parameter = isinstance(getattr(module, "weight", None), nn.Parameter)
        if not is_parameter and any(map(QUANTISED_MODULES.fullmatch, _class_names(module))):
            numel = getattr(module, "in_features", 0) * getattr(module, "out_features", 0)
            names, kind = (f"{name}.weight".lstrip("."),), f"{class_name}.weight"
            yield _Weight(None, names, (name,), kind, numel, LAYER, "linear", f"quantised ({class_name})")


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


# What targets and exclude match.


def _find(option: str, rule: str | Iterable[str], weights: list[_Weight]) -> dict[str, list[_Weight]]:
    """What each element of `targets` or `exclude` matches; one that matches nothing is an error."""
    found = {
        text: [w for w in weights if any(match(name) for name in w.names + w.module_names)]
        for text, match in _matchers(option, rule).items()
    }
    missing = [text for text, hits in found.items() if not hits]
    if missing:
        texts = ", ".join(map(repr, missing))
        raise ValueError(f"{option} {texts} matched no weight; {_hint(missing[0], weights)}")
    if option == "target" and not found:
        raise ValueError('targets is empty; leave it out, or say "auto", to mask all layers')
    return found


def _matchers(option: str, rule: str | Iterable[str]) -> dict[str, Callable[[str], object]]:
    if isinstance(rule, str):
        try:
            return {rule: re.compile(rule).fullmatch}
        except re.error as error:
            raise ValueError(f"{option} {rule!r} is not a valid regular expression: {error}") from None
    names = list(rule) if isinstance(rule, Iterable) else [rule]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{option} must be a regex or a list of names, not {rule!r}")
    return {name: re.compile(rf"(.*\.)?{re.escape(name)}").fullmatch for name in names}


def _take(target: str, hits: list[_Weight], excluded: set[str]) -> list[_Weight]:
    hits = [w for w in hits if w.name not in excluded]
    taken = [w for w in hits if w.role != OTHER] or hits
    for weight in taken:
        if weight.obstacle:
            way_out = f"{_way_out(weight)}, or exclude it"
            raise ValueError(f"target {target!r} names {weight.name}, which is {weight.obstacle}; {way_out}")
    return taken


def _way_out(weight: _Weight) -> str:
    return next(text for key, text in WAY_OUT.items() if weight.obstacle.startswith(key))


def _hint(text: str, weights: list[_Weight]) -> str:
    names = [name for w in weights for name in w.names]
    inside = next((name for name in names if name.startswith(f"{text}.")), None)
    if inside:
        return f"for all that is inside, such as {inside}, use the regex {re.escape(text) + '.*'!r}"
    layers = [w.name for w in weights if w.role == LAYER]
    return f"names look like {', '.join((difflib.get_close_matches(text, names) or layers or names)[:3])}"


def _why_empty(weights: list[_Weight], matched: set[str], excluded: set[str]) -> str:
    layers = [w for w in weights if w.name in matched and (w.role != OTHER or w.name in excluded)]
    reasons = Counter(_reason(w, set(), excluded, matched) for w in layers)
    if not reasons:
        return "nothing to mask: the model has no convolution or linear weight; name in targets what to mask"
    counts = [f"{count} weight{'s are' if count > 1 else ' is'} {reason}" for reason, count in reasons.items()]
    ways_out = [_way_out(w) for w in layers if w.role == LAYER and w.obstacle and w.name not in excluded]
    ways_out += ["name it in targets to mask it all the same" for w in layers if w.role == COMPUTED]
    return f"nothing to mask: {'; '.join([*counts, *dict.fromkeys(ways_out)])}"
