"""The report command, top to bottom."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jsonargparse
import matplotlib

from binmask_dist.files import write_atomically
from binmask_dist.report import tables
from binmask_dist.report.analysis import Analysis, analyse, as_json
from binmask_dist.report.archive import pack
from binmask_dist.report.figures import Drawing, draw
from binmask_dist.report.page import make_page
from binmask_dist.report.trials import Trials, read_trials
from binmask_dist.training import plots
from binmask_dist.training.tasks.base import RunError

_NAMED = 10  # of what is left out; the report has all
_TEX_HEAD = "% needs \\usepackage{booktabs} and \\usepackage{threeparttable}\n\n"


@dataclass(frozen=True)
class ReportOptions:
    paths: list[str]
    output: str = ""
    metric: str = ""
    sparsities: tuple[float, ...] = ()
    title: str = ""
    archive: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        print(make_report(parse_options(arguments)), flush=True)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def parse_options(arguments: Sequence[str] | None = None) -> ReportOptions:
    parser = jsonargparse.ArgumentParser(
        prog="python -m binmask_dist.report",
        description="Tables, figures and one page from trials of the training command.",
    )
    parser.add_argument("paths", nargs="+", help="run folders, sweep folders, archives, or wandb:entity/project")
    parser.add_argument("--output", default="", help="folder for the report; empty: report in the first of the paths")
    parser.add_argument("--metric", default="", help="what to compare; empty: accuracy, AUC, perplexity or loss")
    parser.add_argument(
        "--sparsities",
        type=tuple[float, ...],
        default=(),
        help="where to compare methods, such as [0.9,0.95]; empty: usual ones that the trials enclose",
    )
    parser.add_argument("--title", default="", help="of the page; empty: named after the first of the paths")
    parser.add_argument("--archive", default="", help="write the trials to this .zip, and make no report")
    return ReportOptions(**parser.parse_args(arguments).as_dict())


def make_report(options: ReportOptions) -> str:
    """Write all files; returns what to tell the user."""
    trials = read_trials(options.paths)
    if not trials.used:
        raise RunError(f"there is no finished trial in {', '.join(options.paths)}; {_named(trials)}")
    if options.archive:
        count = pack(trials, options.paths, Path(options.archive))
        return f"{count:,} trials: {options.archive}"
    analysis = analyse(trials, options.metric, options.sparsities)
    first = options.paths[0]
    name = Path(first.removeprefix("wandb:")).resolve().name
    folder = Path(
        options.output or (Path(first) / "report" if Path(first).is_dir() else f"report-{name.removesuffix('.zip')}")
    )
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    drawings = [
        write_figures(folder / "figures", draw(each), _prefix(analysis, i)) for i, each in enumerate(analysis.problems)
    ]
    every = [table for problem in analysis.problems for table in tables.problem_tables(problem)]
    write_atomically(folder / "tables.md", "\n".join(map(tables.markdown, every)) + _left_out_markdown(trials))
    write_atomically(folder / "tables.tex", _TEX_HEAD + "\n".join(map(tables.latex, every)))
    write_atomically(folder / "report.html", make_page(analysis, drawings, options.title or f"Report on {name}"))
    write_atomically(folder / "summary.json", json.dumps(as_json(analysis), indent=1) + "\n")
    return _closing_text(analysis, folder)


def write_figures(folder: Path, drawings: list[Drawing], prefix: str) -> list[tuple[Drawing, bytes]]:
    written = []
    for drawing in drawings:
        path = folder / f"{prefix}{drawing.name}.svg"
        plots.save(drawing.figure, path.with_suffix(".png"))
        with matplotlib.rc_context({"svg.hashsalt": path.name}):  # the same trials give the same file
            plots.save(drawing.figure, path, metadata={"Date": None})
        written.append((drawing, path.read_bytes()))
    return written


def _prefix(analysis: Analysis, index: int) -> str:
    """Of file names; problems may have names that are alike once a file system can hold them."""
    if len(analysis.problems) == 1:
        return ""
    return f"{index + 1}-{re.sub(r'[^A-Za-z0-9.]+', '-', analysis.problems[index].problem.name)[:60].strip('-.')}-"


def _left_out_markdown(trials: Trials) -> str:
    lines = [f"- {tables.markdown_text(source)}: {tables.markdown_text(reason)}" for source, reason in trials.left_out]
    return "\n## Left out\n\n" + "\n".join(lines) + "\n" if lines else ""


def _closing_text(analysis: Analysis, folder: Path) -> str:
    configurations = [each for problem in analysis.problems for each in problem.columns]
    single = sum(len(each.trials) == 1 for each in configurations)
    counts = f"{_counted(len(analysis.trials.used), 'trial')} of {_counted(len(configurations), 'configuration')}"
    lines = [f"{counts}: {folder / 'report.html'}"]
    lines.append("tables.md, tables.tex, figures/*.png and *.svg, and all numbers in summary.json lie beside it")
    if single:
        lines.append(f"{_counted(single, 'configuration')} with one trial: no interval, and no test")
    if analysis.trials.left_out:
        lines.append(_named(analysis.trials))
    return "\n".join(lines)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _named(trials: Trials) -> str:
    count = len(trials.left_out)
    lines = [f"  {source} {reason}" for source, reason in trials.left_out[:_NAMED]]
    if count > _NAMED:
        lines.append(f"  ... and {count - _NAMED:,} more")
    return "\n".join([f"{count:,} left out:", *lines])
