"""Section 3.2 of the paper, scaled down: the document on accuracy against sparsity, from finished runs alone.

    .venv/bin/python benchmarks/sparsification.py runs/sweeps/small_sparsify --times methods.json

docs/methods.md has the commands that make the runs. What they showed is worked out anew each time. Without runs,
--times alone are put into the document that is there.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sparsification_findings as findings
from matplotlib.figure import Figure
from result_documents import (
    ROOT,
    SIGNIFICANCE,
    Finding,
    difference,
    few_seeds,
    finished,
    label,
    left_out,
    name,
    paragraph,
    run,
    table,
    where,
)
from sparsification_findings import AFTER, BATCH, BEFORE, Study

from binmask_dist.report.analysis import analyse
from binmask_dist.report.configurations import Configuration
from binmask_dist.report.figures import draw_before_and_after
from binmask_dist.report.statistics import compare
from binmask_dist.report.tables import markdown_text, ranges, setting_text, value_text
from binmask_dist.report.trials import Trials
from binmask_dist.training.tasks.base import RunError

EXPECTED = ("dense", "binmask", "probmask", "magnitude", "rigl")
METRICS = (BEFORE, BATCH, AFTER)
IMAGES = 50_000  # of CIFAR's training part: the paper counts in epochs
VERDICTS = {True: "shown", False: "not shown", None: "cannot say"}
TIMES_HEAD, BARS_HEAD = "## Training time", "## Bars"
CLAIM_HEADS = ("the paper", "here", "numbers")
MASK_BEFORE_FINETUNING = (
    "ProbMask is evaluated here with its most probable weights, as many as the target says, and not with a mask that "
    "is drawn, as its authors do; the paper ascribes the drop to resampled masks. So the two need not be equal in size."
)
PAPER_TIMES = {"binmask": "1.034 and 1.110 times dense"}
PAPER_TIMES |= dict.fromkeys(("probmask, 1 mask", "probmask, 2 masks"), "1.4 and 1.9 times BinMask")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="folders that hold run folders, at any depth, or archives of them")
    parser.add_argument("--times", type=Path, nargs="+", default=[], help="what benchmarks/methods.py --out wrote")
    parser.add_argument("--tuning", default="", help="folder of the runs by which rates of masks were chosen")
    parser.add_argument("--seeds", type=int, default=3, help="of a whole configuration; one with fewer is marked")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "results" / "sparsification.md")
    options = parser.parse_args(arguments)
    run(lambda: make(options) if options.runs else (with_times(options), None), options.document)


def with_times(options: argparse.Namespace) -> str:
    """The document that is there, with other times: nothing else in it comes from them."""
    times = [read_times(path) for path in options.times]
    if not times:
        raise RunError("give the folders of finished runs, or --times to put into the document that is there")
    start, times_head, rest = options.document.read_text().partition(f"\n\n{TIMES_HEAD}\n\n")
    _, bars_head, end = rest.partition(f"\n\n{BARS_HEAD}\n\n")
    if not (times_head and bars_head):
        raise RunError(f"{options.document} is no document of this command; make it from runs first")
    for claim in findings.time_claims(times):
        row = table(CLAIM_HEADS, [claim_row(claim)]).splitlines()[-1]
        end = re.sub(rf"^\| {re.escape(claim.question)} \|.*$", lambda _, row=row: row, end, flags=re.MULTILINE)
    return "\n\n".join([start, TIMES_HEAD, *times_section(times), BARS_HEAD, end])


def claim_row(claim: Finding) -> tuple[str, str, str]:
    return claim.question, VERDICTS[claim.holds], claim.evidence


def make(options: argparse.Namespace) -> tuple[str, Figure]:
    trials = finished(options.runs)
    times = [read_times(path) for path in options.times]
    study = Study.of(analyse(trials, AFTER).problems)
    parts = [
        paragraph(
            "Made by `benchmarks/sparsification.py` from finished runs: section 3.2 of the paper, **scaled down**. It "
            "shows how the methods compare on a small network that is trained for a short time, and says nothing about "
            "full training."
        ),
        *partial_notes(study, options.seeds, trials),
        *scale_tables(study),
        paragraph(where(trials.used)),
        *(tuning_table(options.tuning) if options.tuning else []),
        *accuracy_section(study, options.document.with_suffix(".png").name),
        *before_section(study),
        TIMES_HEAD,
        *times_section(times),
        BARS_HEAD,
        bar_list(findings.bars(study)),
        "## The paper's claims",
        table(CLAIM_HEADS, [claim_row(claim) for claim in findings.claims(study, times)]),
        paragraph(
            f"{SIGNIFICANCE} With so few seeds ({study.most_seeds}) only large differences are significant: that one "
            "is not is no proof that there is none."
        ),
    ]
    for curve in study.analysis.curves:
        curve.label = name(curve.configurations[0].method)
    for each in study.of_method("dense"):
        each.label = name(each.method)
    return "\n\n".join(["# Network sparsification", *parts]) + "\n", draw_before_and_after(study.analysis)


def partial_notes(study: Study, seeds: int, trials: Trials) -> list[str]:
    missing = [name(method) for method in EXPECTED if not study.of_method(method)]
    notes = [f"**Partial results.** There is no run of {', '.join(missing)}."] if missing else []
    return [*notes, *few_seeds(study.configurations, seeds), *left_out(trials)]


# what was run


def scale_tables(study: Study) -> list[str]:
    first = study.configurations[0].trials[0]
    config, result = first.config, first.result
    trained = max((record["step"] for record in first.epochs if record["phase"] == "train"), default=0)
    tuned = first.epochs[-1]["step"] - trained
    batch = config["batch_size"]
    seen, tuned_on, full = trained * batch, tuned * batch, 300 * IMAGES
    lams = [setting_text(each.config["lam"]) for each in study.binmask]
    seeds = sorted({seed for each in study.configurations for seed in each.seeds})
    rate = f"{config['mask_lr']:g} to {config['mask_lr_final']:g}" if not study.binmask else mask_rate(study.binmask[0])
    test = Path(config["test_split"]).stem or "a part of it"
    rows = [
        ("network", f"{config['model']}, {result['masked_weights']:,} masked weights", "ResNet32 and VGG19"),
        (
            "data",
            f"{Path(config['dataset']).stem}; tested on {test}, {result['test_examples']:,} images",
            "CIFAR-10 and CIFAR-100",
        ),
        (
            "training",
            f"{trained:,} steps of {batch}: {seen:,} images, {seen / full:.2%} of the paper's",
            f"300 epochs: {full:,} images",
        ),
        ("fine-tuning", f"{tuned:,} steps: {tuned_on:,} images", f"20 epochs: {20 * IMAGES:,} images"),
        ("augmentation", config.get("augment") or "none", "as in ProbMask's code"),
        ("lam", ", ".join(lams) or "-", "1.6e-5, 8e-6, 4e-6, 2e-6, 1e-6, 1e-7, 0"),
        ("rate of BinMask's masks", rate, "0.001 to 1e-05"),
        ("seeds", f"{len(seeds)}: {ranges(seeds)}", "4"),
    ]
    own = "\n".join(f"- {markdown_text(curve.label)}" for curve in study.analysis.curves)
    settings = ["Settings in which the methods differ:", own] if len(study.analysis.curves) > 1 else []
    return [table(("", "here", "the paper"), rows), *settings]


def mask_rate(configuration: Configuration) -> str:
    return f"{configuration.config['mask_lr']:g} to {configuration.config['mask_lr_final']:g}"


def tuning_table(folder: str) -> list[str]:
    """The runs by which rates were chosen: of each method, the best after fine-tuning first."""
    trials = finished([folder]).used
    tried = sorted(trials, key=lambda trial: (trial.method, -trial.metrics[AFTER]))
    rows = [
        (
            name(trial.method),
            mask_rate(Configuration([trial])),
            f"{100 * trial.metrics['sparsity']:.2f}",
            *(f"{100 * trial.metrics[metric]:.2f}" for metric in (BEFORE, AFTER)),
        )
        for trial in tried
    ]
    part = f"{tried[0].config['test_fraction']:.0%} of the training images, held out"
    if tried[0].config["test_split"]:
        part = f"the images of {Path(tried[0].config['test_split']).stem}"
    head = ("method", "rate of its masks", "sparsity (%)", "before fine-tuning", "after fine-tuning")
    told = f"Runs by which rates were chosen, accuracy (%) on {part}: {where(trials)}"
    return [paragraph(told), table(head, rows)]


# accuracy


def accuracy_section(study: Study, figure: str) -> list[str]:
    head = ["method", "set", "sparsity (%)", "before fine-tuning", "per batch", "after fine-tuning", "seeds"]
    return [
        "## Accuracy",
        paragraph(
            "Test accuracy (%), mean ± half of the 95% t-interval over seeds. *Per batch*: before fine-tuning, with "
            "each batch's own statistics in batch normalisation. The other methods were run at sparsities that BinMask "
            "reached."
        ),
        table(head, [_accuracy_row(each) for each in study.configurations]),
        f"![Accuracy against sparsity, before and after fine-tuning]({figure})",
        "Error bars and the grey band (dense) are 95% t-intervals over seeds; each side has its own scale.",
    ]


def _accuracy_row(each: Configuration) -> list[str]:
    setting = label(each).partition(", ")[2] or "-"
    sparsity = value_text("sparsity", each.summaries["sparsity"])
    accuracies = [value_text(metric, each.summaries.get(metric)) for metric in METRICS]
    return [name(each.method), setting, sparsity, *accuracies, str(len(each.trials))]


def before_section(study: Study) -> list[str]:
    rows = []
    for each in study.configurations:
        before = each.sample(BEFORE)
        gains = [compare(before, each.sample(metric)) for metric in (AFTER, BATCH)]
        texts = [difference(gain) if min(gain.trials) else "-" for gain in gains]
        rows.append([name(each.method), f"{100 * each.sparsity:.2f}", *texts])
    return [
        "## Before fine-tuning",
        paragraph(
            "Points of accuracy that fine-tuning adds, and that per-batch statistics add without it, with 95% "
            "intervals of the difference within trials."
        ),
        table(["method", "sparsity (%)", "fine-tuning adds", "per-batch statistics add"], rows),
        paragraph(probmask_drop(study)),
        paragraph(MASK_BEFORE_FINETUNING),
    ]


def probmask_drop(study: Study) -> str:
    own = [each for each in study.of_method("probmask") if each.sample(BEFORE) and each.sample(BATCH)]
    if not own:
        return "There is no run of ProbMask that was measured before fine-tuning with per-batch statistics."
    before, batch, after = (np.array([100 * np.mean(list(e.sample(m).values())) for e in own]) for m in METRICS)
    drops, gains = after - before, batch - before
    low, high = findings.PAPER_GAIN
    place = "below" if gains.mean() < low else "above" if gains.mean() > high else "within"
    return (
        f"Before fine-tuning ProbMask's mean is {drops.min():.2f} to {drops.max():.2f} points below that of its "
        f"fine-tuned self. Per-batch statistics change it by {gains.min():+.2f} to {gains.max():+.2f} points, "
        f"{gains.mean():+.2f} in the mean over its sparsities, which is {place} the paper's {low:g} to {high:g}."
    )


# time, and the bars


def read_times(path: Path) -> dict:
    try:
        times = json.loads(path.read_text())
        return {"where": times["where"], "model": times["model"], "rows": {row["method"]: row for row in times["rows"]}}
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{path} is no file that benchmarks/methods.py --out writes; make it with that") from None


def times_section(times: Sequence[dict]) -> list[str]:
    if not times:
        return ["Not measured: `benchmarks/methods.py --out FILE` measures it, and `--times FILE` shows it here."]
    told = (
        "Seconds per epoch of each method, in one run of `benchmarks/methods.py`; ratios are medians over rounds, from"
    )
    head = ["method", "seconds per epoch", "over dense", "over BinMask", "the paper, ResNet32 and VGG19"]
    return [
        part
        for one in times
        for part in (paragraph(f"{told} least to most. {one['where']}."), table(head, _times_rows(one["rows"])))
    ]


def _times_rows(methods: dict[str, dict]) -> list[list[str]]:
    rows = []
    for method, row in methods.items():
        least, median, most = row["over_dense"]
        over = f"{row['over_binmask'][1]:.3f}" if "over_binmask" in row else "-"
        ratio = f"{median:.3f} ({least:.3f} to {most:.3f})"
        rows.append([method, f"{row['seconds_per_epoch']:.2f}", ratio, over, PAPER_TIMES.get(method, "-")])
    return rows


def bar_list(bars: Sequence[findings.Bar]) -> str:
    lines = []
    for number, bar in enumerate(bars, 1):
        lines += [f"{number}. {bar.question}: **{bar.verdict}**", *(f"   - {text}" for text in bar.numbers)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
