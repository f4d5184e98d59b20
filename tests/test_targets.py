"""The plan: the forms of targets and exclude, every error, and the plan as an object."""

import copy
import pickle
import re

import pytest
from plans import ALL_LAYERS, SmallNet, entry, masked, plan_of, quant_linear, std_convolutions
from torch import nn

# The forms of targets and exclude.


def test_auto_takes_all_layers():
    assert masked(SmallNet()) == ALL_LAYERS


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("layer1.0.conv.weight", ["layer1.0.conv.weight"]),
        (r"layer1\.0\.conv", ["layer1.0.conv.weight"]),
        (r".*conv", ["layer1.0.conv.weight", "layer1.1.conv.weight"]),
        (r"layer1.*", ["layer1.0.conv.weight", "layer1.1.conv.weight"]),
        (".*", ALL_LAYERS),
        (["fc"], ["fc.weight"]),
        (["fc", "stem.weight"], ["stem.weight", "fc.weight"]),
        (("conv",), ["layer1.0.conv.weight", "layer1.1.conv.weight"]),
        (["1.conv.weight"], ["layer1.1.conv.weight"]),
        ({"weight"}, ALL_LAYERS),
        ((name for name in ["fc"]), ["fc.weight"]),
    ],
)
def test_targets(targets, names):
    plan = plan_of(SmallNet(), targets)
    assert list(plan.masked) == names
    assert [e.name for e in plan.entries if e.masked] == names


def test_what_is_not_targeted_says_so():
    plan = plan_of(SmallNet(), ["fc"])
    assert entry(plan, "stem.weight").reason == "not targeted"
    assert entry(plan, "fc.bias").reason == "bias"


def test_names_match_from_a_dot_on_only():
    with pytest.raises(ValueError, match="matched no weight"):
        plan_of(SmallNet(), ["onv.weight"])
    with pytest.raises(ValueError, match="matched no weight"):
        plan_of(SmallNet(), ["layer1.0.con"])


def test_dots_in_lists_are_dots():
    model = nn.ModuleDict({"axb": nn.Linear(2, 2), "a": nn.ModuleDict({"b": nn.Linear(2, 2)})})
    assert masked(model, ["a.b"]) == ["a.b.weight"]


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (["fc.bias"], ["fc.bias"]),
        (r".*conv\.bias", ["layer1.0.conv.bias", "layer1.1.conv.bias"]),
        (["layer1.0.norm"], ["layer1.0.norm.weight", "layer1.0.norm.bias"]),
        (["token"], ["token"]),
        (["token", "fc"], ["token", "fc.weight"]),
    ],
)
def test_target_that_matches_no_layer_takes_what_it_matches(targets, names):
    plan = plan_of(SmallNet(), targets)
    assert set(plan.masked) == set(names)
    assert all(e.reason.startswith("targeted (") for e in plan.entries if e.masked and e.name != "fc.weight")


@pytest.mark.parametrize(
    ("targets", "exclude", "names"),
    [
        ("auto", ["fc"], ALL_LAYERS[:3]),
        ("auto", "fc", ALL_LAYERS[:3]),
        ("auto", r"layer1\..*", ["stem.weight", "fc.weight"]),
        (".*", ["conv", "stem.weight"], ["fc.weight"]),
        (["conv", "fc"], ["layer1.1.conv"], ["layer1.0.conv.weight", "fc.weight"]),
        (["conv", "fc"], ["fc"], ["layer1.0.conv.weight", "layer1.1.conv.weight"]),
    ],
)
def test_exclude_is_checked_first(targets, exclude, names):
    plan = plan_of(SmallNet(), targets, exclude)
    assert list(plan.masked) == names
    assert {e.reason for e in plan.entries if e.name in ALL_LAYERS and not e.masked} <= {"excluded", "not targeted"}


def test_excluding_a_frozen_weight_makes_the_target_valid():
    model = SmallNet()
    model.stem.requires_grad_(False)
    assert masked(model, r".*\.weight", exclude=["stem"]) == ALL_LAYERS[1:]


# Errors.


@pytest.mark.parametrize(
    ("targets", "error"),
    [
        ("x", "target 'x' matched no weight; names look like stem.weight, layer1.0.conv.weight, layer1.1.conv.weight"),
        (
            ["x"],
            "target 'x' matched no weight; names look like stem.weight, layer1.0.conv.weight, layer1.1.conv.weight",
        ),
        (["fc", "x", "y"], "target 'x', 'y' matched no weight; names look like stem.weight"),
        (["layer1.0.cnv"], "target 'layer1.0.cnv' matched no weight; names look like layer1.0.conv"),
        (
            ["layer1"],
            "target 'layer1' matched no weight; for all that is inside, such as layer1.0.conv.weight, "
            "use the regex 'layer1.*'",
        ),
        ("layer1", "target 'layer1' matched no weight; for all that is inside"),
        ("(", "target '(' is not a valid regular expression: missing ), unterminated subpattern at position 0"),
        ("", "target '' matched no weight; names look like stem.weight"),
        ([], 'targets is empty; leave it out, or say "auto", to mask all layers'),
    ],
)
def test_targets_that_match_nothing(targets, error):
    with pytest.raises(ValueError, match=f"^{re.escape(error)}"):
        plan_of(SmallNet(), targets)


@pytest.mark.parametrize(
    ("exclude", "error"),
    [
        ("x", "exclude 'x' matched no weight; names look like stem.weight"),
        (["fc", "y"], "exclude 'y' matched no weight"),
        ("[", "exclude '[' is not a valid regular expression: "),
    ],
)
def test_excludes_that_match_nothing(exclude, error):
    with pytest.raises(ValueError, match=f"^{re.escape(error)}"):
        plan_of(SmallNet(), exclude=exclude)


@pytest.mark.parametrize("rule", [None, 3, ["fc", 3], [["fc"]]])
def test_wrong_types(rule):
    with pytest.raises(TypeError, match=r"^target must be a regex or a list of names, not "):
        plan_of(SmallNet(), rule)
    with pytest.raises(TypeError, match=r"^exclude must be a regex or a list of names, not "):
        plan_of(SmallNet(), exclude=rule)


def test_frozen_target():
    model = SmallNet()
    model.fc.requires_grad_(False)
    error = (
        "target 'fc' names fc.weight, which is frozen (requires_grad is False); "
        "set requires_grad before patch, or exclude it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        plan_of(model, ["fc"])


def test_target_that_the_optimizer_does_not_own():
    model = SmallNet()
    error = (
        "target 'fc' names fc.weight, which is not in the optimizer; "
        "make the optimizer from model.parameters(), or exclude it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        plan_of(model, "fc", owned={id(model.stem.weight)})


def frozen_net() -> nn.Module:
    return SmallNet().requires_grad_(False)


def quantised_net() -> nn.Module:
    return nn.ModuleDict({"q": quant_linear("QuantLinear"), "norm": nn.LayerNorm(4)})


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        (nn.LayerNorm(4), {}, "the model has no convolution or linear weight; name in targets what to mask"),
        (frozen_net(), {}, "4 weights are frozen (requires_grad is False); set requires_grad before patch"),
        (
            SmallNet(),
            {"owned": set()},
            "4 weights are not in the optimizer; make the optimizer from model.parameters()",
        ),
        (nn.Linear(2, 2), {"exclude": ["weight"]}, "1 weight is excluded"),
        (SmallNet(), {"targets": ["fc"], "exclude": ["fc"]}, "2 weights are excluded"),
        (
            quantised_net(),
            {},
            "1 weight is quantised (QuantLinear); masks need floating-point weights: load the model unquantised",
        ),
        (
            std_convolutions()[0],
            {},
            "1 weight is weight-standardised: a zero in it is no zero in the weight that the layer uses; "
            "name it in targets to mask it all the same",
        ),
    ],
)
def test_nothing_to_mask(model, options, error):
    with pytest.raises(ValueError, match=f"^{re.escape('nothing to mask: ' + error)}$"):
        plan_of(model, **options)


# The plan as an object.


def test_print():
    model = SmallNet()
    model.layer1[1].conv.requires_grad_(False)
    model.head = nn.Linear(4, 5)
    assert str(plan_of(model, exclude=["head"])) == "\n".join(
        [
            "masked  kind                parameters  weights  why",
            "yes     Conv2d.weight                2      124  convolution",
            "yes     Linear.weight                1        8  linear",
            "no      SmallNet.token               1       12  not of a known layer (token, table, router, ...)",
            "no      Conv2d.bias                  3       12  bias",
            "no      BatchNorm2d.weight           3       12  norm",
            "no      BatchNorm2d.bias             3       12  bias",
            "no      Conv2d.weight                1       16  frozen (requires_grad is False)",
            "no      Linear.bias                  1        2  bias",
            "no      Linear.weight                1       20  excluded",
            "no      Linear.bias                  1        5  excluded",
            "total: 3 of 17 parameters masked, 132 of 223 weights (59.2%)",
        ]
    )


def test_notes_are_printed():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    assert str(plan_of(model)).endswith("\nnote: 0.weight and 1.weight are one parameter with one mask")


def test_every_parameter_has_one_entry_in_order():
    model = SmallNet()
    plan = plan_of(model)
    assert [(e.name, e.numel) for e in plan.entries] == [(n, p.numel()) for n, p in model.named_parameters()]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copy_of_a_plan_is_words_only(duplicate):
    plan = plan_of(SmallNet())
    again = duplicate(plan)
    assert str(again) == str(plan)
    assert again.entries == plan.entries
    assert again.masked == {}
    assert plan.masked
