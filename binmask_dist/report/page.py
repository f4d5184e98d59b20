"""One HTML page with everything in it: it opens from a disk, a mail or a web server, and asks nobody for anything."""

import base64
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from binmask_dist.report.analysis import Analysis, ProblemAnalysis
from binmask_dist.report.configurations import Configuration, settings
from binmask_dist.report.figures import Drawing
from binmask_dist.report.statistics import summarise
from binmask_dist.report.tables import problem_tables, ranges, setting_text, title, value_text
from binmask_dist.report.trials import Trial


def make_page(analysis: Analysis, drawings: list[list[tuple[Drawing, bytes]]], heading: str) -> str:
    """`drawings`: those of each problem, with the bytes of their SVG files."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # all texts come from files
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    problems = [_problem(each, own) for each, own in zip(analysis.problems, drawings, strict=True)]
    configurations = [each for problem in analysis.problems for each in problem.columns]
    return environment.get_template("page.html.jinja").render(
        heading=heading,
        problems=problems,
        trial_count=len(analysis.trials.used),
        configuration_count=len(configurations),
        single_count=sum(len(each.trials) == 1 for each in configurations),
        left_out=analysis.trials.left_out,
    )


def _problem(analysis: ProblemAnalysis, drawings: list[tuple[Drawing, bytes]]) -> dict[str, Any]:
    return {
        "name": analysis.problem.name,
        "tables": problem_tables(analysis),
        "figures": [
            {"caption": each.caption, "width": each.figure.get_figwidth(), "address": _as_address(content)}
            for each, content in drawings
        ],
        "configurations": [_configuration(each, analysis.metric) for each in analysis.columns],
    }


def _configuration(configuration: Configuration, metric: str) -> dict[str, Any]:
    shared = settings(configuration.config)
    trials = [
        {
            "seed": trial.seed,
            "source": trial.source,
            "outcome": ", ".join(_figure(trial, name) for name in (metric, "sparsity") if name in trial.metrics),
            "own": json.dumps({key: value for key, value in trial.config.items() if key not in shared}, indent=1),
        }
        for trial in configuration.trials
    ]
    return {
        "label": configuration.label,
        "name": configuration.name,
        "outcome": value_text(metric, configuration.summaries.get(metric)),
        "seeds": ranges(configuration.seeds),
        "settings": [(key, setting_text(value)) for key, value in sorted(shared.items())],
        "trials": trials,
    }


def _figure(trial: Trial, metric: str) -> str:
    return f"{title(metric)} {value_text(metric, summarise([trial.metrics[metric]]))}"


def _as_address(svg: bytes) -> str:
    """As an image: names within one figure then do not meet those of another."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
