"""What the runs of section 3.3 show on one data set, worked out from the trials."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from result_documents import Finding, all_of, difference, is_better, label, name

from binmask_dist.report.analysis import ProblemAnalysis
from binmask_dist.report.configurations import Configuration
from binmask_dist.report.statistics import BOLD_ABOVE, Comparison, compare
from binmask_dist.report.tables import p_text, setting_text

NETWORKS = ("binmask", "l1", "l2", "dropout")
NORMS = {"binmask": "weight_l0", "l1": "weight_l1", "l2": "weight_l2"}
COEFFICIENTS = 5
REFERENCE = 0.01  # of L2: the weight decay that the other methods have too
IMPROVING = ("binmask", "l1")  # by the paper


@dataclass
class Chosen:
    """The configuration of each method that has the highest mean AUC on the validation part."""

    analysis: ProblemAnalysis

    @cached_property
    def by_method(self) -> dict[str, Configuration]:
        found: dict[str, Configuration] = {}
        for method in (*NETWORKS, "logistic"):
            own = [each for each in self.analysis.columns if each.method == method and each.sample("test_auc")]
            if own:
                found[method] = max(own, key=lambda each: each.mean("validation_auc") or 0.0)
        return found

    @property
    def by_test_auc(self) -> list[Configuration]:
        return sorted(self.by_method.values(), key=lambda each: -(each.mean("test_auc") or 0.0))

    @property
    def networks(self) -> dict[str, Configuration]:
        return {method: each for method, each in self.by_method.items() if method in NETWORKS}

    @property
    def reference(self) -> Configuration | None:
        """The network with weight decay alone."""
        own = [each for each in self.analysis.columns if each.method == "l2" and each.config["lam"] == REFERENCE]
        return next((each for each in own if each.sample("test_auc")), None)


def findings(analysis: ProblemAnalysis) -> list[Finding]:
    chosen = Chosen(analysis)
    return [
        _best_test_auc(chosen),
        _least("the smallest gap between training and test AUC", chosen, _gaps(chosen), "gap"),
        _least("the smallest mean weight L0", chosen, _samples(chosen, "weight_l0"), "L0"),
        _norms(analysis),
        _only_two_improve(chosen),
        _better_than_logistic(chosen),
    ]


def _best_test_auc(chosen: Chosen) -> Finding:
    """By the paper's rule for bold."""
    question = f"BinMask has the best test AUC, or the best is not significantly better (p > {BOLD_ABOVE})"
    ours = chosen.by_method.get("binmask")
    if ours is None or len(chosen.by_method) < 2:
        return Finding(question, None, "There are no runs to compare.")
    first, second = chosen.by_test_auc[:2]
    if first is ours:
        found = compare(second.sample("test_auc"), ours.sample("test_auc"))
        return Finding(question, _if_complete(chosen), f"It is the best; {_auc(ours, second, found)}.")
    found = compare(first.sample("test_auc"), ours.sample("test_auc"))
    holds = None if found.p is None else found.p > BOLD_ABOVE and _if_complete(chosen)
    return Finding(question, holds, f"{name(first.method)} is the best; {_auc(ours, first, found)}.")


def _if_complete(chosen: Chosen) -> bool | None:
    """True if no method is missing: one that was not run might be better."""
    return True if set(NETWORKS) <= chosen.networks.keys() else None


def _auc(ours: Configuration, other: Configuration, found: Comparison) -> str:
    p = "" if found.p is None else f", p = {p_text(found.p)}".replace("= <", "<")
    return f"test AUC of {label(ours)}, less that of {label(other)}: {difference(found, 1, 4)}{p}"


Samples = dict[str, dict[int, float]]


def _samples(chosen: Chosen, metric: str) -> Samples:
    return {method: each.sample(metric) for method, each in chosen.networks.items() if each.sample(metric)}


def _gaps(chosen: Chosen) -> Samples:
    train, test = _samples(chosen, "train_auc"), _samples(chosen, "test_auc")
    return {
        method: {seed: train[method][seed] - value for seed, value in test[method].items() if seed in train[method]}
        for method in train
        if train[method].keys() & test[method].keys()
    }


def _least(what: str, chosen: Chosen, samples: Samples, short: str) -> Finding:
    """Among the networks; the mean decides, and the difference from the next is given with its interval."""
    question = f"of the networks BinMask has {what}"
    if "binmask" not in samples or len(samples) < 2:
        return Finding(question, None, "There are no runs to compare.")
    means = {method: sum(values.values()) / len(values) for method, values in samples.items()}
    order = sorted(means, key=lambda method: means[method])
    rival = order[0] if order[0] != "binmask" else order[1]
    found = compare(samples[rival], samples["binmask"])
    listed = ", ".join(f"{name(method)} {means[method]:.4f}" for method in order)
    evidence = f"Means: {listed}; {short} of BinMask less that of {name(rival)}: {difference(found, 1, 4)}."
    holds = order[0] == "binmask" and _if_complete(chosen)
    return Finding(question, holds if min(found.trials) > 1 else None, evidence)


def _norms(analysis: ProblemAnalysis) -> Finding:
    """Held to be so if the norm is smaller with the largest coefficient than with the smallest."""
    verdicts: list[bool | None] = []
    texts = []
    for method, norm in NORMS.items():
        own = [each for each in analysis.columns if each.method == method and each.sample(norm)]
        own.sort(key=lambda each: each.config["lam"])
        if len(own) < 2:
            verdicts.append(None)
            continue
        means = [each.mean(norm) or 0.0 for each in own]
        verdicts.append(means[-1] < means[0])
        steady = "" if all(after <= before for before, after in pairwise(means)) else "not "
        ends = [setting_text(each.config["lam"]) for each in (own[0], own[-1])]
        texts.append(
            f"{norm.removeprefix('weight_').upper()} of {name(method)} from {means[0]:.4f} at {ends[0]} to "
            f"{means[-1]:.4f} at {ends[1]}, {steady}falling with every coefficient"
        )
    evidence = f"{'; '.join(texts)}." if texts else "There are no runs to compare."
    return Finding("L0, L1 and L2 regularisation make their weight norm smaller", all_of(verdicts), evidence)


def _only_two_improve(chosen: Chosen) -> Finding:
    question = "BinMask and L1 significantly improve the test AUC over weight decay alone, and no other method does"
    reference = chosen.reference
    if reference is None:
        return Finding(question, None, f"There are no runs of L2 at {REFERENCE:g}.")
    verdicts: list[bool | None] = [None for method in NETWORKS if method not in chosen.networks]
    texts = []
    for method, each in chosen.networks.items():
        if each is reference:
            texts.append(f"{label(each)}: is that itself")
            verdicts.append(True)
            continue
        found = compare(reference.sample("test_auc"), each.sample("test_auc"))
        better = is_better(found)
        verdicts.append(None if better is None else better == (method in IMPROVING))
        word = {True: "significantly better", False: "not significantly better", None: "not tested"}[better]
        texts.append(f"{label(each)}: {difference(found, 1, 4)}, {word}")
    return Finding(question, all_of(verdicts), f"{'; '.join(texts)}.")


def _better_than_logistic(chosen: Chosen) -> Finding:
    question = "with BinMask and with L1 the network is significantly better than logistic regression"
    regression = chosen.by_method.get("logistic")
    if regression is None:
        return Finding(question, None, "There are no runs of logistic regression.")
    own = [chosen.networks[method] for method in IMPROVING if method in chosen.networks]
    tests = [compare(regression.sample("test_auc"), each.sample("test_auc")) for each in own]
    verdicts = [*map(is_better, tests), *[None] * (len(IMPROVING) - len(own))]
    texts = [f"{label(each)}: {difference(found, 1, 4)}" for each, found in zip(own, tests, strict=True)]
    evidence = f"Test AUC less that of LR, {'; '.join(texts)}." if texts else "There are no runs to compare."
    return Finding(question, all_of(verdicts), evidence)
