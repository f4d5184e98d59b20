"""What the runs of section 3.2, scaled down, show: the bars and the paper's claims, worked out from the trials."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from result_documents import SIGNIFICANT, Finding, all_of, difference, is_better, label, name

from binmask_dist.report.analysis import ProblemAnalysis
from binmask_dist.report.configurations import Configuration
from binmask_dist.report.figures import over_training
from binmask_dist.report.statistics import Comparison, compare
from binmask_dist.report.trials import BATCH_STATISTICS, BEFORE_FINETUNING
from binmask_dist.training.tasks.base import RunError

AFTER = "test_accuracy"
BEFORE = BEFORE_FINETUNING + AFTER
BATCH = BEFORE_FINETUNING + BATCH_STATISTICS + AFTER
LOSS_BEFORE = BEFORE_FINETUNING + "test_loss"
CLOSE = 0.05  # sparsities are the same if the weights left differ by no more than this part
ONE_POINT, HIGH_SPARSITY, HIGHEST = 0.01, 0.9, 2  # of the bars
PAPER_GAIN = (12.9, 17.8)  # points by per-batch statistics
PAPER_SLOWER = {"wide_resnet32": 1.034, "vgg19_bn_32px": 1.110}  # BinMask's time over dense
PAPER_PROBMASK = {"wide_resnet32": 1.4, "vgg19_bn_32px": 1.9}  # ProbMask's over BinMask's


@dataclass
class Match:
    """A configuration of BinMask and those of other methods that are as sparse."""

    binmask: Configuration
    others: dict[str, Configuration] = field(default_factory=dict)


def _rank(configuration: Configuration) -> tuple[bool, str]:
    """BinMask first; always the same colours."""
    return configuration.method != "binmask", configuration.method


@dataclass
class Study:
    """All runs of one protocol: a curve for each method, and dense."""

    analysis: ProblemAnalysis

    @classmethod
    def of(cls, problems: Sequence[ProblemAnalysis]) -> "Study":
        configs = [each.config for problem in problems for each in problem.columns]
        if len(problems) > 1 or len({(config["test_split"], config["test_fraction"]) for config in configs}) > 1:
            names = ", ".join(problem.problem.name for problem in problems)
            raise RunError(f"the runs were tested on different data ({names}); give the folders of one protocol")
        (analysis,) = problems
        methods = [curve.configurations[0].method for curve in analysis.curves]
        methods += [each.method for each in analysis.problem.dense]
        twice = next((method for method in methods if methods.count(method) > 1), None)
        if twice:
            raise RunError(f"{name(twice)} was run with several settings; give the folders of one protocol")
        analysis.curves.sort(key=lambda curve: _rank(curve.configurations[0]))
        return cls(analysis)

    def of_method(self, method: str) -> list[Configuration]:
        """From dense to sparse."""
        return [each for each in self._sparse + self.analysis.problem.dense if each.method == method]

    @property
    def _sparse(self) -> list[Configuration]:
        return [each for curve in self.analysis.curves for each in curve.configurations]

    @property
    def binmask(self) -> list[Configuration]:
        return self.of_method("binmask")

    @property
    def rivals(self) -> list[str]:
        return [method for method in dict.fromkeys(each.method for each in self._sparse) if method != "binmask"]

    @property
    def most_seeds(self) -> int:
        return max(len(each.trials) for each in self.configurations)

    @cached_property
    def matches(self) -> list[Match]:
        """Ascending; configurations of BinMask that no other method matches are not among them."""
        found = []
        for ours in self.binmask:
            match = Match(ours)
            for method in self.rivals:
                nearest = min(self.of_method(method), key=lambda each: abs(each.sparsity - ours.sparsity))
                if abs(nearest.sparsity - ours.sparsity) <= CLOSE * (1 - ours.sparsity):
                    match.others[method] = nearest
            found += [match] if match.others else []
        return found

    @cached_property
    def configurations(self) -> list[Configuration]:
        """Dense, then by sparsity; what is matched follows its BinMask."""
        level = {each.id: each.sparsity for each in self._sparse}
        for match in self.matches:
            level |= {each.id: match.binmask.sparsity for each in match.others.values()}
        return self.analysis.problem.dense + sorted(self._sparse, key=lambda each: (level[each.id], _rank(each)))


@dataclass
class Bar:
    question: str
    met: bool | None
    missed_by: float  # points
    numbers: list[str]
    unknown: str = "there are no such runs"

    @property
    def verdict(self) -> str:
        if self.met is None:
            return f"cannot be said: {self.unknown}"
        return "met" if self.met else f"missed by {100 * self.missed_by:.2f} points"


def bars(study: Study) -> list[Bar]:
    return [_needs_no_finetuning(study), _ahead_of_others(study), _as_good_as_dense(study)]


def _needs_no_finetuning(study: Study) -> Bar:
    gains = [(each, compare(each.sample(BEFORE), each.sample(AFTER))) for each in study.binmask if each.sample(BEFORE)]
    worst = max((abs(gain.difference) for _, gain in gains), default=0.0)
    met = worst <= ONE_POINT if gains else None
    texts = [f"{label(each)}: fine-tuning adds {difference(gain)} points" for each, gain in gains]
    return Bar("BinMask before fine-tuning is within one point of its fine-tuned self", met, worst - ONE_POINT, texts)


def _ahead_of_others(study: Study) -> Bar:
    """Met where BinMask's mean is higher, or the interval of the difference has zero in it."""
    verdicts: list[bool | None] = []
    texts, missed = [], [0.0]
    for match in study.matches[-HIGHEST:]:
        for method in study.rivals:
            sparsity = f"{100 * match.binmask.sparsity:.2f}%"
            if method not in match.others:
                verdicts.append(None)
                texts.append(f"{sparsity}: no run of {name(method)} that is as sparse")
                continue
            found = compare(match.others[method].sample(AFTER), match.binmask.sample(AFTER))
            ahead = found.difference >= 0 or (found.high >= 0 if found.high is not None else None)
            missed.append(-(found.high or 0.0) if ahead is False else 0.0)
            verdicts.append(ahead)
            word = {True: "met", False: "missed", None: "cannot be said"}[ahead]
            texts.append(f"{sparsity}: BinMask less {name(method)} {difference(found)} points: {word}")
    met = all_of(verdicts) if len(study.matches) >= HIGHEST else None
    question = (
        f"at the {HIGHEST} highest matched sparsities BinMask's mean after fine-tuning is at least that of each other "
        "method, or the 95% interval of the difference (paired by seed unless it says Welch) holds zero"
    )
    return Bar(question, met, max(missed), texts, "not all of these have runs, or there is one seed and no interval")


def _as_good_as_dense(study: Study) -> Bar:
    """Within half the width of dense's own interval, below its mean; the least short of it counts."""
    question = (
        f"a sparsity of {HIGH_SPARSITY:.0%} or more at which BinMask's mean after fine-tuning is no further below "
        "dense's than half of dense's 95% interval"
    )
    sparse = [each for each in study.binmask if each.sparsity >= HIGH_SPARSITY]
    dense = study.of_method("dense")
    summary = dense[0].summaries.get(AFTER) if dense else None
    if not sparse or summary is None:
        return Bar(question, None, 0.0, [])
    short = {}
    texts = [f"dense: {100 * summary.mean:.2f} ± {100 * (summary.half_width or 0):.2f}"]
    for each in sparse:
        found = compare(dense[0].sample(AFTER), each.sample(AFTER))
        short[label(each)] = summary.mean - (each.mean(AFTER) or 0.0) - (summary.half_width or 0.0)
        texts.append(f"{label(each)}, {100 * each.sparsity:.2f}%: less dense {difference(found)} points")
    least = min(short.values())
    if summary.half_width is None and least > 0:
        return Bar(question, None, 0.0, texts[1:], "dense has one seed and no interval")
    return Bar(question, least <= 0, least, texts)


# the paper's claims


def claims(study: Study, times: Sequence[dict]) -> list[Finding]:
    return [
        _probmask_drops(study),
        *_batch_statistics_help(study),
        _binmask_does_not_drop(study),
        _no_difference_from_dense(study),
        _ahead_of_probmask(study),
        Finding(
            "BinMask is worse than ProbMask in a few configurations on CIFAR-100", None, "nothing was run on CIFAR-100"
        ),
        _loss_is_not_affected(study),
        *time_claims(times),
    ]


def _probmask_drops(study: Study) -> Finding:
    gains = {each.sparsity: compare(each.sample(BEFORE), each.sample(AFTER)) for each in _measured(study, "probmask")}
    holds = all_of(map(is_better, gains.values()))
    return Finding(
        "ProbMask is significantly worse without fine-tuning", holds, _by_sparsity(gains, "fine-tuning adds")
    )


def _batch_statistics_help(study: Study) -> list[Finding]:
    own = [each for each in _measured(study, "probmask") if each.sample(BATCH)]
    gains = {each.sparsity: compare(each.sample(BEFORE), each.sample(BATCH)) for each in own}
    low, high = PAPER_GAIN
    mean = 100 * float(np.mean([gain.difference for gain in gains.values()])) if gains else 0.0
    holds = low <= mean <= high if gains else None
    better = "per-batch statistics significantly improve ProbMask's accuracy before fine-tuning"
    return [
        Finding(better, all_of(map(is_better, gains.values())), _by_sparsity(gains, "they add")),
        Finding(f"by {low:g} to {high:g} points", holds, f"{mean:+.2f} in the mean" if gains else "no runs to compare"),
    ]


def _binmask_does_not_drop(study: Study) -> Finding:
    """Held against ProbMask's drop at the same sparsity."""
    pairs = [(m.binmask, m.others["probmask"]) for m in study.matches if "probmask" in m.others]
    pairs = [pair for pair in pairs if all(each.sample(BEFORE) for each in pair)]
    drops = [[compare(each.sample(BEFORE), each.sample(AFTER)).difference for each in pair] for pair in pairs]
    verdict = all_of(ours < theirs for ours, theirs in drops)
    texts = [
        f"{100 * pair[0].sparsity:.2f}%: {100 * ours:+.2f} against ProbMask's {100 * theirs:+.2f}"
        for pair, (ours, theirs) in zip(pairs, drops, strict=True)
    ]
    evidence = "fine-tuning adds " + "; ".join(texts) if texts else "no runs to compare"
    return Finding("BinMask has no large drop without fine-tuning: less than ProbMask's", verdict, evidence)


def _no_difference_from_dense(study: Study) -> Finding:
    question = "up to 97% sparsity BinMask does not differ significantly from dense"
    dense = study.of_method("dense")
    tests = {each.sparsity: compare(dense[0].sample(AFTER), each.sample(AFTER)) for each in study.binmask if dense}
    alike = [sparsity for sparsity, found in tests.items() if found.p is not None and found.p >= SIGNIFICANT]
    evidence = _by_sparsity(tests, "BinMask less dense")
    if not tests or all(found.p is None for found in tests.values()):
        return Finding(question, None, evidence)
    end = f"; not significant up to {100 * max(alike):.2f}%" if alike else "; significant at every sparsity"
    return Finding(question, bool(alike) and max(alike) >= 0.97, evidence + end)


def _ahead_of_probmask(study: Study) -> Finding:
    pairs = [(match.binmask, match.others["probmask"]) for match in study.matches if "probmask" in match.others]
    tests = {o.sparsity: compare(p.sample(AFTER), o.sample(AFTER)) for o, p in pairs[-HIGHEST:]}
    verdicts = [False if found.difference <= 0 else is_better(found) or None for found in tests.values()]
    question = f"BinMask is better than ProbMask at high sparsity (here: the {HIGHEST} highest, after fine-tuning)"
    return Finding(question, all_of(verdicts), _by_sparsity(tests, "BinMask less ProbMask"))


def _loss_is_not_affected(study: Study) -> Finding:
    question = (
        "masks become sparse early in training, without much effect on the test loss (here: more than half as sparse "
        "at half of training as in the end, and no significant difference from dense before fine-tuning)"
    )
    dense = study.of_method("dense")
    own = [each for each in study.binmask if each.sample(LOSS_BEFORE)]
    if not dense or not dense[0].sample(LOSS_BEFORE) or not own:
        return Finding(question, None, "no runs of both BinMask and dense that were measured before fine-tuning")
    texts, verdicts = [], []
    for each in own:
        found = compare(dense[0].sample(LOSS_BEFORE), each.sample(LOSS_BEFORE))
        steps, sparsity = over_training(each, "sparsity")
        training = [record["phase"] == "train" for record in each.trials[0].epochs]
        half = int(np.searchsorted(steps, steps[: sum(training)][-1] / 2))
        early = float(sparsity[:, half].mean() / max(each.sparsity, 1e-9))
        verdicts.append(None if found.p is None else early > 0.5 and found.p >= SIGNIFICANT)
        loss = difference(found, 1, 3)
        texts.append(
            f"{100 * each.sparsity:.2f}%: {early:.0%} of it at half of training, test loss less dense's {loss}"
        )
    return Finding(question, all_of(verdicts), "; ".join(texts))


def time_claims(times: Sequence[dict]) -> list[Finding]:
    """By the paper's own networks, ProbMask with two masks for a batch, as in its authors' code; what was measured on
    other networks is told beside it."""
    slower = "training with BinMask takes 1.034 (ResNet32) and 1.110 (VGG19) times as long as dense"
    longer = "ProbMask takes 1.4 (ResNet32) and 1.9 (VGG19) times as long as BinMask"
    if not times:
        return [Finding(question, None, "not measured") for question in (slower, longer)]
    rows = {(one["model"], method): row for one in times for method, row in one["rows"].items()}
    over_dense = {model: row["over_dense"] for (model, method), row in rows.items() if method == "binmask"}
    over_binmask = {
        model: row["over_binmask"] for (model, method), row in rows.items() if method == "probmask, 2 masks"
    }
    return [
        _ratios(slower, over_dense, {model: (None, most) for model, most in PAPER_SLOWER.items()}),
        _ratios(longer, over_binmask, {model: (least, None) for model, least in PAPER_PROBMASK.items()}, ", two masks"),
    ]


def _ratios(
    question: str,
    ratios: dict[str, Sequence[float]],
    bounds: dict[str, tuple[float | None, float | None]],
    label: str = "",  # behind the names of the networks
) -> Finding:
    """Whether least, median and most of each network's rounds lie within its bounds; it cannot be said of some that do
    and some that do not, nor of a network that was not measured."""
    verdicts = []
    for model, (low, high) in bounds.items():
        inside = [(low is None or ratio >= low) and (high is None or ratio <= high) for ratio in ratios.get(model, ())]
        verdicts.append(inside[0] if inside and len(set(inside)) == 1 else None)
    texts = [
        f"{model}{label}: {median:.3f} ({least:.3f} to {most:.3f})" for model, (least, median, most) in ratios.items()
    ]
    missing = [f"{model}{label}: not measured" for model in bounds if model not in ratios]
    return Finding(question, all_of(verdicts), "; ".join([*texts, *missing]))


def _measured(study: Study, method: str) -> list[Configuration]:
    return [each for each in study.of_method(method) if each.sample(BEFORE) and each.sample(AFTER)]


def _by_sparsity(comparisons: dict[float, Comparison], words: str) -> str:
    texts = [f"{100 * sparsity:.2f}%: {difference(found)}" for sparsity, found in comparisons.items()]
    return f"{words}, at {'; at '.join(texts)} points" if texts else "no runs to compare"
