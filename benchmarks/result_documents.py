"""What the documents of benchmarks/sparsification.py and benchmarks/regularisation.py share."""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from binmask_dist.files import write_atomically
from binmask_dist.report.configurations import Configuration
from binmask_dist.report.statistics import Comparison
from binmask_dist.report.tables import METHODS, Entry, Table, markdown_rows
from binmask_dist.report.trials import WITHOUT_EPOCHS, Trial, Trials, read_trials
from binmask_dist.training.plots import save
from binmask_dist.training.tasks.base import RunError

ROOT = Path(__file__).parent.parent
SIGNIFICANT = 0.05
SIGNIFICANCE = (
    f"Significant is p < {SIGNIFICANT}, two-sided, without correction, by a t-test that is paired by seed where seeds "
    "are shared, and Welch's otherwise."
)
WIDTH = 120


@dataclass
class Finding:
    """Something that was to be found out: `holds` is None where these trials cannot say."""

    question: str
    holds: bool | None
    evidence: str


def finished(paths: Sequence[str]) -> Trials:
    trials = read_trials(paths)
    if not trials.used:
        raise RunError(f"there is no finished run in {', '.join(paths)}; run its sweep first, with launch/sweep.py")
    return trials


def run(make: Callable[[], tuple[str, Figure | None]], document: Path) -> None:
    """Write the document and its figure, and print it; or say in a sentence why there is none."""
    try:
        text, figure = make()
        document.parent.mkdir(parents=True, exist_ok=True)
        if figure:
            save(figure, document.with_suffix(".png"))
        write_atomically(document, text)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    print(text)


def name(method: str) -> str:
    return METHODS.get(method, method)


def label(configuration: Configuration) -> str:
    """The method and what was set for its sparsity or strength."""
    config, method = configuration.config, name(configuration.method)
    if configuration.method in ("dense", *WITHOUT_EPOCHS):
        return method
    target = config["target_sparsity"]
    return f"{method}, lam {config['lam']:g}" if target is None else f"{method}, target {100 * target:g}%"


def paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown_rows(Table("", "", list(head), [[Entry(text) for text in row] for row in rows]))


def hours(trials: Sequence[Trial]) -> str:
    seconds = sum(trial.metrics.get("seconds", 0.0) for trial in trials)
    return f"{len(trials)} trials, {seconds / 3600:.2f} hours one after the other"


def where(trials: Sequence[Trial]) -> str:
    """Number of trials, their time, and the machines and versions that they wrote down."""
    starts = [start for trial in trials for start in _environment(trial)]
    machines, versions, commits = (dict.fromkeys(map(told, starts)) for told in (_machine, _versions, _commit))
    told = [" or ".join(filter(None, found)) for found in (machines, versions, commits)]
    return "; ".join([hours(trials), *(filter(None, told) if starts else ["no record of the machine"])]) + "."


def _environment(trial: Trial) -> list[dict]:
    try:
        starts = json.loads((Path(trial.source) / "environment.json").read_text())
    except (OSError, ValueError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def _machine(start: dict) -> str:
    architecture = re.search(r"x86_64|AMD64|aarch64|arm64", start.get("platform", ""))
    gpus = ", ".join(start.get("gpus") or []) or "no GPU"
    return f"{architecture[0] if architecture else 'unknown processor'} with {start.get('cpus')} cores, {gpus}"


def _versions(start: dict) -> str:
    return f"Python {start.get('python')}, torch {start.get('versions', {}).get('torch')}"


def _commit(start: dict) -> str:
    commit = start.get("git_commit") or ""
    return f"commit {commit[:7]}{' with changes' if commit.endswith('+') else ''}" if commit else ""


def few_seeds(configurations: Sequence[Configuration], seeds: int) -> list[str]:
    """Which configurations have fewer, or nothing."""
    few = [f"{label(each)}: {len(each.trials)}" for each in configurations if len(each.trials) < seeds]
    return [paragraph(f"**Partial results.** Fewer than {seeds} seeds: {'; '.join(few)}.")] if few else []


def left_out(trials: Trials) -> list[str]:
    """How many, or nothing; where they lie is of no interest to readers."""
    unfinished = sum("not finished" in reason for _, reason in trials.left_out)
    others = len(trials.left_out) - unfinished
    parts = [f"{unfinished} runs are not finished"] if unfinished else []
    parts += [f"{others} runs could not be used"] if others else []
    return [f"**Partial results.** {', '.join(parts)}."] if parts else []


def difference(comparison: Comparison, scale: float = 100, digits: int = 2) -> str:
    """With its interval, and the test if it is not the paired one."""
    text = f"{scale * comparison.difference:+.{digits}f}"
    if comparison.low is None or comparison.high is None:
        return f"{text} (no interval)"
    kind = ", Welch" if comparison.test.startswith("Welch") else ""
    return f"{text} ({scale * comparison.low:+.{digits}f} to {scale * comparison.high:+.{digits}f}{kind})"


def is_better(comparison: Comparison) -> bool | None:
    """Whether the second is significantly better than the first; None if that was not tested."""
    return None if comparison.p is None else comparison.difference > 0 and comparison.p < SIGNIFICANT


def all_of(verdicts: Iterable[bool | None]) -> bool | None:
    """False if one is, else None if one is or there are none."""
    found = list(verdicts)
    if False in found:
        return False
    return None if None in found or not found else True
