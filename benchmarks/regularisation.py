"""Section 3.3 of the paper on public data: the document with Table 1, from finished runs alone.

    .venv/bin/python benchmarks/regularisation.py runs/sweeps/regularise

docs/methods.md has the commands that make the runs. What they showed is worked out anew each time.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from regularisation_findings import COEFFICIENTS, NETWORKS, REFERENCE, Chosen, findings
from result_documents import (
    ROOT,
    SIGNIFICANCE,
    Finding,
    difference,
    few_seeds,
    finished,
    hours,
    left_out,
    name,
    paragraph,
    run,
    table,
    where,
)

from binmask_dist.report.analysis import ProblemAnalysis, analyse
from binmask_dist.report.statistics import BOLD_ABOVE, compare
from binmask_dist.report.tables import coefficient_table, markdown_rows, sentence, setting_text, value_text

VERDICTS = {True: "holds", False: "does not hold", None: "cannot say"}
# by its Table 1, in which the first column of each method is the best by test AUC
IN_THE_PAPER = ("holds: 0.834, L1 0.836", "does not hold: 0.024, L1 0.023", "holds: 0.018, L1 0.071", *["claimed"] * 3)
ROWS = 3_604_863 + 63_884  # of the paper's data
NOTES = f"""\
- Columns are sorted by the test AUC of each method.
- Numbers in brackets are half of the 95% t-interval over trials.
- LR is logistic regression.
- Mean weight L0 is the part of the weights whose absolute value is at least 1e-4.
- Mean weight Lp is (sum of |w|^p / n)^(1/p) over the n weights.
- **Bold**: AUCs than which the best training or test AUC is not significantly better (p > {BOLD_ABOVE}).
- L2 at {REFERENCE:g} is the network with nothing but the weight decay that the other methods have, too."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders that hold run folders, at any depth, or archives of them")
    parser.add_argument("--seeds", type=int, default=8, help="of a whole configuration; one with fewer is marked")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "results" / "regularisation.md")
    options = parser.parse_args(arguments)
    run(lambda: (make(options), None), options.document)


def make(options: argparse.Namespace) -> str:
    trials = finished(options.runs)
    problems = analyse(trials, "auc").problems
    found = [findings(each) for each in problems]
    sections = [part for each, own in zip(problems, found, strict=True) for part in section(each, own, options.seeds)]
    parts = [
        paragraph(
            "Made by `benchmarks/regularisation.py` from finished runs: the protocol of section 3.3 of the paper on "
            f"public data. The paper's own, {ROWS:,} rows of more than five thousand features, are not public. It does "
            "not say how large a batch is."
        ),
        *left_out(trials),
        paragraph(where(trials.used)),
        "## What holds",
        summary(problems, found),
        paragraph(
            "Of each method these sentences take the coefficient with the highest mean AUC on the validation part; no "
            f"test row has a part in that choice. {SIGNIFICANCE}"
        ),
        "In the tables, as in the paper's Table 1:",
        NOTES,
        *sections,
    ]
    return "\n\n".join(["# Model regularisation", *parts]) + "\n"


def summary(problems: Sequence[ProblemAnalysis], found: Sequence[Sequence[Finding]]) -> str:
    """A row for each question, a column for each data set."""
    rows = [
        [same[0].question, paper, *(VERDICTS[finding.holds] for finding in same)]
        for paper, *same in zip(IN_THE_PAPER, *found, strict=True)
    ]
    return table(["", "the paper", *map(data_name, problems)], rows)


def data_name(analysis: ProblemAnalysis) -> str:
    return Path(analysis.columns[0].config["dataset"]).stem


def section(analysis: ProblemAnalysis, found: Sequence[Finding], seeds: int) -> list[str]:
    """Of one data set."""
    answers = "\n".join(f"- {sentence(each.question)}: **{VERDICTS[each.holds]}**. {each.evidence}" for each in found)
    return [
        f"## {data_name(analysis)}",
        paragraph(protocol(analysis)),
        *partial_notes(analysis, seeds),
        markdown_rows(coefficient_table(analysis, (*NETWORKS, "logistic"))),
        *before_masks_learnt(analysis),
        "With the coefficients that the validation part chooses:",
        chosen_table(analysis),
        answers,
    ]


def before_masks_learnt(analysis: ProblemAnalysis) -> list[str]:
    """Early stopping may take an epoch of the warm-up, or soon after it."""
    trials = [trial for each in analysis.columns if each.method == "binmask" for trial in each.trials]
    early = sum(trial.result["sparsity"] == 0 for trial in trials)
    told = (
        f"In {early} of the {len(trials)} trials of BinMask the epoch with the best validation AUC is one in which all "
        "masks were still on: their L0 is that of a dense network."
    )
    return [paragraph(told)] if early else []


def protocol(analysis: ProblemAnalysis) -> str:
    trials = [trial for each in analysis.columns for trial in each.trials]
    network = next((trial for trial in trials if trial.epochs), trials[0])
    config, parts = network.config, [network.result.get(f"{part}_examples") for part in ("train", "validation", "test")]
    rows = "an unknown number of rows"
    if all(parts):
        shares = "/".join(f"{100 * part / sum(parts):.0f}" for part in parts)
        rows = f"{sum(parts):,} rows split {shares}"
    split = "anew for each seed" if config["split_by_seed"] else "once"
    return (
        f"{rows[0].upper()}{rows[1:]}, {split}; {config['model']} with {network.result.get('masked_weights', 0):,} "
        f"weights, {config['epochs']} epochs of batches of {config['batch_size']}, {config['optimizer']}, "
        f"{config['schedule']} from {config['lr']:g} to {config['lr_final']:g}, weight decay "
        f"{config['weight_decay']:g} but for L2; {hours(trials)}."
    )


def partial_notes(analysis: ProblemAnalysis, seeds: int) -> list[str]:
    """Seeds, coefficients and methods that are missing."""
    counts = {method: sum(each.method == method for each in analysis.columns) for method in (*NETWORKS, "logistic")}
    wanted = {**dict.fromkeys(NETWORKS, COEFFICIENTS), "logistic": 1}
    few = [
        f"{name(method)} {counts[method]} of {wanted[method]}" for method in counts if counts[method] < wanted[method]
    ]
    return [
        *([f"**Partial results.** Coefficients that were run: {', '.join(few)}."] if few else []),
        *few_seeds(analysis.columns, seeds),
    ]


def chosen_table(analysis: ProblemAnalysis) -> str:
    rows = []
    for each in Chosen(analysis).by_test_auc:
        aucs = [
            value_text(metric, each.summaries.get(metric)) for metric in ("validation_auc", "train_auc", "test_auc")
        ]
        gap = compare(each.sample("test_auc"), each.sample("train_auc"))
        norm = value_text("weight_l0", each.summaries.get("weight_l0"))
        coefficient = "-" if each.method == "logistic" else setting_text(each.config["lam"])
        rows.append([name(each.method), coefficient, *aucs, difference(gap, 1, 4), norm, str(len(each.trials))])
    head = ["method", "coefficient", "validation AUC", "training AUC", "test AUC", "training less test", "L0", "trials"]
    return table(head, rows)


if __name__ == "__main__":
    main()
