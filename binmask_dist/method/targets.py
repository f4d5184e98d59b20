"""The plan: which weights get a mask, which do not, and why.

`targets` and `exclude` follow PEFT's `target_modules`:

    "auto"      the weights of convolutions and linear maps: no biases, norms, embeddings, tokens, tables
    "inputs"    nothing but input masks, which every other choice takes in as well
    a string    a regex, matched in full against the names of parameters and of the modules that own them
    a list      names of parameters or modules, whole or from a dot on: "layer1.0.conv1", "fc.weight"

`exclude` takes a regex or a list and is checked first. A target that matches weights of layers takes those
alone, so that "layer1.*" leaves biases and norms in peace. One that matches no weight of a layer takes what
it does match, be it a bias, a norm or an embedding: then that is what was meant.

What each parameter is, `roles.py` finds out.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from binmask_dist.method.roles import COMPUTED, INPUT, LAYER, OTHER, Weight, weights_of


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


def make_plan(
    model: nn.Module,
    trainable_ids: set[int] | None,
    targets: str | Iterable[str] = "auto",
    exclude: str | Iterable[str] = (),
) -> Plan:
    """Decide for every parameter of `model`, by names, types and shapes: a model on the meta device will do.

    `trainable_ids` are the id()s of the parameters that the optimizer owns; None if that does not matter.
    """
    weights = weights_of(model, trainable_ids)
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


def _reason(weight: Weight, chosen: set[str], excluded: set[str], matched: set[str]) -> str:
    if weight.name in chosen:
        return weight.what if weight.role in (LAYER, INPUT) else f"targeted ({weight.what})"
    if weight.name in excluded:
        return "excluded"
    if weight.name not in matched:
        return "not targeted"
    return weight.obstacle if weight.obstacle and weight.role in (LAYER, INPUT) else weight.what


# What targets and exclude match.


def _find(option: str, rule: str | Iterable[str], weights: list[Weight]) -> dict[str, list[Weight]]:
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


def _take(target: str, hits: list[Weight], excluded: set[str]) -> list[Weight]:
    hits = [w for w in hits if w.name not in excluded]
    taken = [w for w in hits if w.role != OTHER] or hits
    for weight in taken:
        if weight.obstacle:
            way_out = f"{weight.way_out}, or exclude it"
            raise ValueError(f"target {target!r} names {weight.name}, which is {weight.obstacle}; {way_out}")
    return taken


def _hint(text: str, weights: list[Weight]) -> str:
    names = [name for w in weights for name in w.names]
    inside = next((name for name in names if name.startswith(f"{text}.")), None)
    if inside:
        return f"for all that is inside, such as {inside}, use the regex {re.escape(text) + '.*'!r}"
    layers = [w.name for w in weights if w.role == LAYER]
    return f"names look like {', '.join((difflib.get_close_matches(text, names) or layers or names)[:3])}"


def _why_empty(weights: list[Weight], matched: set[str], excluded: set[str]) -> str:
    layers = [w for w in weights if w.name in matched and (w.role != OTHER or w.name in excluded)]
    reasons = Counter(_reason(w, set(), excluded, matched) for w in layers)
    if not reasons:
        return "nothing to mask: the model has no convolution or linear weight; name in targets what to mask"
    counts = [f"{count} weight{'s are' if count > 1 else ' is'} {reason}" for reason, count in reasons.items()]
    ways_out = [w.way_out for w in layers if w.role == LAYER and w.obstacle and w.name not in excluded]
    ways_out += ["name it in targets to mask it all the same" for w in layers if w.role == COMPUTED]
    return f"nothing to mask: {'; '.join([*counts, *dict.fromkeys(ways_out)])}"
