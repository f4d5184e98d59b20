"""The table, the figure and the bars of benchmarks/feature_selection.py, from the results of its trials alone."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats
from selection_data import differences

from binmask_dist.files import replacing, write_atomically

OURS = "BinMask"
RIVALS_IN_TIME = ("STG", "STG packaged", "LassoNet")
NOTES = """\
- All networks but LassoNet's are trained on the same batches with the paper's settings, or with the package's for *STG
  packaged*. A row that a small table has several times in a batch is computed once, for every method alike.
- *STG* is the package's layer in front of the same network, in the protocol's loop, with the package's loss. *STG
  packaged* has the package's defaults for training as well, Adam at 1e-5 and batches of 100, with which a gate moves by
  about 1e-5 in a step: nearly all gates stay near one half, and almost any count has a cut there.
- *LassoNet* has one hidden layer of 100 (on MNIST-CNN, too, where that is much less to compute than the other methods'
  network), minibatches of 256 of a table that is duplicated to 30 of them where it is small, 100 epochs and then 2 for
  each lambda, in steps of 1.05 from 0.1; with more than 10,000 rows or features 10 epochs and then 1, with more than
  10,000 features from 10. By default it has all rows in one batch, 1,000 epochs and then 100, in steps of 1.02 from an
  estimate: that had not ended after 14 minutes on one core with BASEHOCK.
- Of LassoNet's path and of that of *L1 logistic* the set is taken whose size is nearest to the count that is asked for.
- *Mutual information* and *L1 logistic* look at 5,000 rows at most.
- Fewer rows of MNIST than 60,000, or fewer trials than eight, are a scaled-down protocol: the table says which."""


class Results:
    """Of one data set: accuracy by method, trial and count, and what the selections say of themselves."""

    def __init__(self, name: str, trials: dict[str, dict[str, Any]]) -> None:
        """From what result.json holds, by the folder of each. All must be of the same settings and counts."""
        self.name = name
        self.trials = sorted(trials.values(), key=lambda content: f"{content['method']}-{content['trial']}")
        (first, one), *rest = trials.items()
        for folder, other in rest:
            if different := differences(_conditions(one), _conditions(other)):
                raise SystemExit(f"{first} and {folder} are of different settings for {name}: {different}; keep one")
        seen: dict[tuple[str, int], str] = {}
        for folder, content in trials.items():
            same = seen.setdefault((content["method"], content["trial"]), folder)
            if same != folder:
                raise SystemExit(f"{same} and {folder} are the same trial of {name}; keep one")
        self.settings: dict[str, Any] = one["settings"]
        self.counts = _conditions(one)["counts"]
        self.by_method: dict[str, list[dict[str, Any]]] = {}
        for content in self.trials:
            self.by_method.setdefault(content["method"], []).append(content)

    def means(self, method: str) -> np.ndarray:
        """Mean accuracy over the counts, for each trial."""
        return np.mean([self.at(method, count) for count in self.counts], axis=0)

    def at(self, method: str, count: int) -> np.ndarray:
        return np.array([content["accuracies"][str(count)] for content in self.by_method[method]])

    def seconds(self, method: str, key: str = "seconds") -> float:
        """Mean wall time of selecting for all counts."""
        return float(np.mean([content[key] for content in self.by_method[method]]))

    def chosen(self, method: str) -> float:
        """How many, over how many were asked for."""
        every = [item for content in self.by_method[method] for item in content["selections"].items()]
        return float(np.mean([len(chosen["columns"]) / int(count) for count, chosen in every]))

    @property
    def best(self) -> str:
        """The method with the highest mean."""
        return max(self.methods, key=lambda method: self.means(method).mean())

    def behind(self) -> float:
        """By how much BinMask's mean is below the best one."""
        return float(self.means(self.best).mean() - self.means(OURS).mean())

    def is_best(self) -> bool:
        """BinMask's mean is the best one, or within the interval of it."""
        room = interval(self.means(self.best))
        return bool(self.behind() <= (room if np.isfinite(room) else 0.0))

    def searches(self, method: str) -> list[dict[str, Any]]:
        every = (one for content in self.by_method.get(method, []) for one in content["selections"].values())
        return [one for one in every if "steps" in one]

    @property
    def rivals_in_time(self) -> list[str]:
        return [method for method in RIVALS_IN_TIME if method in self.methods]

    @property
    def methods(self) -> list[str]:
        return sorted(self.by_method, key=lambda method: method != OURS)


def _conditions(content: dict[str, Any]) -> dict[str, Any]:
    return {**content["settings"], "counts": sorted(map(int, content["accuracies"]))}


def read(results: Path) -> list[Results]:
    """Of each data set with a finished trial."""
    sets: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for path in sorted(results.glob("trials/*/result.json")):
        content = json.loads(path.read_text())
        sets[content["data"]][str(path.parent)] = content
    return [Results(name, sets[name]) for name in sorted(sets)]


def interval(values: np.ndarray) -> float:
    """Half of the 95% interval of the mean; not known from one value."""
    if len(values) < 2:
        return float("nan")
    return float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def write(results: Path, document: Path) -> None:
    """Write the document and its figure, and print the document."""
    sets = read(results)
    if not sets:
        print(f"there are no finished trials in {results}")
        return
    document.parent.mkdir(parents=True, exist_ok=True)
    figure = document.with_suffix(".png")
    with replacing(figure) as path:
        draw(sets).savefig(path, dpi=130)
    text = "\n".join(
        [
            "# Feature selection",
            "",
            "Made by `benchmarks/feature_selection.py`: the protocol of section 3.1 of the paper. Mean accuracy (%)",
            "over all counts, with 95% intervals over trials; the best mean is bold. The seed of a trial is its",
            "number, from 0 on.",
            "",
            *scale_table(sets),
            "",
            *accuracy_table(sets),
            "",
            f"![Accuracy by number of features]({figure.name})",
            "",
            "Above each plot are BinMask's lam for these counts, mean and standard deviation over trials.",
            "",
            "Seconds to select, all counts together, mean over trials; in brackets those of the processor, which are",
            "fewer where other work was in the way. BinMask and STG share fits between counts.",
            "",
            *seconds_table(sets),
            "",
            "Features that were chosen over features that were asked for, mean over counts and trials: not all methods",
            "can give any number, and a search may end without a cut.",
            "",
            *chosen_table(sets),
            "",
            "## What was done to run the methods",
            "",
            NOTES,
            "",
            "## Bars",
            "",
            *bars(sets),
            "",
        ]
    )
    write_atomically(document, text)
    print(text)


def _methods(sets: list[Results]) -> list[str]:
    return list(dict.fromkeys(method for one in sets for method in one.methods))


def accuracy_table(sets: list[Results]) -> list[str]:
    methods = _methods(sets)
    lines = [f"| data | counts | trials | {' | '.join(methods)} |", "| --- " * (len(methods) + 3) + "|"]
    for one in sets:
        means = {method: one.means(method) for method in one.methods}
        cells = []
        for method in methods:
            if method not in means:
                cells.append("-")
                continue
            mean, half = 100 * means[method].mean(), 100 * interval(means[method])
            text = f"{mean:.2f}" + (f" ± {half:.2f}" if np.isfinite(half) else "")
            cells.append(f"**{text}**" if method == one.best else text)
        trials = sorted({len(values) for values in means.values()})
        shown = f"{trials[0]}" if len(trials) == 1 else f"{trials[0]} to {trials[-1]}"
        lines.append(f"| {one.name} | {one.counts[0]} to {one.counts[-1]} | {shown} | {' | '.join(cells)} |")
    return lines


def scale_table(sets: list[Results]) -> list[str]:
    """On what the selections were made; trials may be of different machines and commits."""
    settings = ("rows", "features", "classes", "epochs", "max_steps", "count_lam")
    heads = ("training rows", "features", "classes", "epochs", "most steps", "lam for the first count")
    places = ("machine", "torch", "commit")
    lines = [f"| data | {' | '.join((*heads, *places))} | trials |", "| --- " * (len(heads) + len(places) + 2) + "|"]
    for one in sets:
        found = [dict.fromkeys(_short(str(content[key])) for content in one.trials) for key in places]
        counts = dict.fromkeys(str(len(one.by_method[method])) for method in one.methods)
        values = [f"{one.settings[key]:g}" if key == "count_lam" else f"{one.settings[key]:,}" for key in settings]
        lines.append(f"| {one.name} | {' | '.join([*values, *('; '.join(each) for each in (*found, counts))])} |")
    return lines


def _short(text: str) -> str:
    """A commit by its first digits; all else as it is."""
    return re.sub(r"^([0-9a-f]{7})[0-9a-f]{33}", r"\1", text)


def seconds_table(sets: list[Results]) -> list[str]:
    def cell(one: Results, method: str) -> str:
        return f"{one.seconds(method):.1f} ({one.seconds(method, 'processor_seconds'):.1f})"

    return _by_method(sets, cell)


def chosen_table(sets: list[Results]) -> list[str]:
    return _by_method(sets, lambda one, method: f"{one.chosen(method):.3f}")


def _by_method(sets: list[Results], cell: Callable[[Results, str], str]) -> list[str]:
    """A row for each data set, a column for each method."""
    methods = _methods(sets)
    lines = [f"| data | {' | '.join(methods)} |", "| --- " * (len(methods) + 1) + "|"]
    for one in sets:
        cells = [cell(one, method) if method in one.methods else "-" for method in methods]
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return lines


def bars(sets: list[Results]) -> list[str]:
    sets = [one for one in sets if OURS in one.methods]
    lines = [
        "- best mean accuracy, or within the interval of the best: "
        f"{sum(one.is_best() for one in sets)} of {len(sets)} (bar: 5 of 6)",
        *(f"  - {one.name}: {_distance(one)}" for one in sets),
        *(_faster(sets, rival) for rival in RIVALS_IN_TIME if any(rival in one.methods for one in sets)),
        *(f"  - {one.name}: {_slower(one)}" for one in sets if one.rivals_in_time),
    ]
    others = len(lines)
    told = {OURS: (" (bar: 75%; the paper 75.00%)", " (bar: 1.7)"), "STG": ("", ""), "STG packaged": ("", "")}
    for method, (converged_bar, steps_bar) in told.items():
        searches = [search for one in sets for search in one.searches(method)]
        if searches:
            mean = {k: np.mean([one[k] for one in searches]) for k in ("converged", "steps", "fits", "exact")}
            lines += [
                f"- {method}: {mean['converged']:.2%} of {len(searches)} masks converged{converged_bar}: "
                + ", ".join(_converged(one, method) for one in sets if one.searches(method)),
                f"- {method}: {mean['steps']:.2f} search steps on average{steps_bar}, {mean['fits']:.2f} of them new "
                f"fits; exactly the count that was asked for in {mean['exact']:.1%}",
                f"- {method}: {steps_alone(searches)}{steps_bar}",
            ]
    if lines[others:]:
        lines += [
            "",
            "A step is a new fit, or the first look at all that the counts before have left. A count that is searched",
            "for alone has nothing to look at: each of its steps is a fit, the first one with the lam that the search",
            "starts at. The paper does not say which of these its 1.7 steps are.",
            "",
            "Gates that stay undecided have a cut for any count: a method whose masks do not converge needs one fit",
            "for all counts, and BinMask, whose masks have decided, needs more. That is where STG takes less time.",
        ]
    return lines


def _distance(one: Results) -> str:
    if one.best == OURS:
        rivals = [method for method in one.methods if method != OURS]
        if not rivals:
            return "nothing to compare with"
        second = max(rivals, key=lambda method: one.means(method).mean())
        ahead = one.means(OURS).mean() - one.means(second).mean()
        return f"best, {100 * ahead:.2f} points above {second}"
    half = 100 * interval(one.means(one.best))
    verdict = "within" if one.is_best() else "outside"
    return f"{100 * one.behind():.2f} points below {one.best}, {verdict} its interval of ± {half:.2f}"


def _faster(sets: list[Results], rival: str) -> str:
    both = [one for one in sets if rival in one.methods]
    faster = sum(one.seconds(OURS) < one.seconds(rival) for one in both)
    return f"- selects in less time than {rival}: on {faster} of {len(both)} (bar: all)"


def _slower(one: Results) -> str:
    """How many times as long as BinMask the others take, and from how many fits."""
    times = [f"{rival} {one.seconds(rival) / one.seconds(OURS):.2f}{_fits(one, rival)}" for rival in one.rivals_in_time]
    return f"{', '.join(times)} times BinMask's time{_fits(one, OURS)}"


def _fits(one: Results, method: str) -> str:
    searches = one.searches(method)
    trials = len(one.by_method[method])
    return f" ({sum(each['fits'] for each in searches) / trials:.1f} fits)" if searches else ""


def _converged(one: Results, method: str) -> str:
    searches = one.searches(method)
    return f"{one.name} {sum(each['converged'] for each in searches)} of {len(searches)}"


def steps_alone(searches: list[dict[str, Any]]) -> str:
    """What a user with one count pays, as far as the fits that were made tell."""
    replayed = [one.get("alone") or _alone_unless_shared(one) for one in searches]
    known = sum(one["known"] for one in replayed)
    least = "" if known == len(replayed) else "at least "
    mean = np.mean([one["steps"] for one in replayed])
    return f"{least}{mean:.2f} steps if each count is searched for alone ({known} of {len(replayed)} known exactly)"


def _alone_unless_shared(search: dict[str, Any]) -> dict[str, Any]:
    known = search["steps"] == search["fits"]
    return {"steps": search["steps"] if known else 1, "known": known}


def draw(sets: list[Results]) -> Figure:
    rows = -(-len(sets) // 3)
    figure = Figure(figsize=(13, 4 * rows), layout="constrained")
    colors = {method: f"C{number}" for number, method in enumerate(_methods(sets))}
    for axes, one in zip(figure.subplots(rows, 3, squeeze=False).flat, sets, strict=False):
        for method in one.methods:
            values = [one.at(method, count) for count in one.counts]
            halves = np.nan_to_num([interval(value) for value in values])
            label = f"{method} ({100 * one.means(method).mean():.2f})"
            means = np.array([value.mean() for value in values])
            axes.errorbar(
                one.counts, 100 * means, 100 * halves, label=label, color=colors[method], capsize=2, marker="."
            )
        size = "n {rows:,}, d {features:,}, c {classes}".format(**one.settings)
        axes.set(title=f"{one.name}: {size}", xlabel="features", ylabel="test accuracy (%)")
        _show_lams(axes, one)
        axes.legend(fontsize=7, frameon=False)
        axes.grid(alpha=0.3)
    for axes in figure.axes[len(sets) :]:
        axes.remove()
    return figure


def _show_lams(axes: Axes, one: Results) -> None:
    """Above the plot: the lam of BinMask for each count."""
    lams = [[trial["selections"][str(count)]["lam"] for trial in one.by_method.get(OURS, [])] for count in one.counts]
    if lams and all(lams):
        top = axes.secondary_xaxis("top")
        labels = [f"{np.mean(values):.1e}\n±{np.std(values):.0e}" for values in lams]
        top.set_xticks(one.counts, labels, fontsize=6)
        top.tick_params(length=2)
