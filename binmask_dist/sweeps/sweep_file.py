"""A sweep file is W&B's: its schema, its grid and its distributions are those of W&B's own package `sweeps`."""

import json
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BAYES = (
    "method {method} chooses trials by earlier results, which W&B's server does and this command does not: "
    "start it there with `wandb sweep {path}`, and run `wandb agent` with the address that it prints"
)


class SweepError(Exception):
    """A sweep cannot start or go on; the text is one sentence that says what to do."""


@dataclass(frozen=True)
class SweepFile:
    path: Path
    text: str
    content: dict[str, Any]
    run_cap: int | None

    @property
    def name(self) -> str:
        return self.content.get("name", self.path.stem)


def read(path: Path) -> SweepFile:
    """Refuses what W&B's schema refuses, and what only W&B's server can run."""
    try:
        text = path.read_text()
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError(f"the sweep file {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    except yaml.YAMLError as error:
        raise SweepError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SweepError(f"{path} is no sweep file: it must hold program, method and parameters")
    run_cap = content.pop("run_cap", None)  # W&B's server knows it, the schema does not yet
    if run_cap is not None and (type(run_cap) is not int or run_cap < 1):
        raise SweepError(f"{path}: run_cap must be a whole number above zero, not {run_cap!r}")
    if "program" not in content:
        raise SweepError(f"{path} names no program; add `program: launch/train.py`")
    if violation := _violation(content):
        raise SweepError(f"{path} is no valid sweep file of W&B: {violation}")
    if content["method"] not in ("grid", "random"):
        raise SweepError(BAYES.format(method=content["method"], path=path))
    return SweepFile(path, text, content, run_cap)


def settings(sweep: SweepFile, count: int | None, seed: int) -> list[dict[str, Any]]:
    """What each trial is told: all combinations of a grid, or the first `count`; so many draws, if random."""
    count = count or sweep.run_cap
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is written for an older pydantic
        from sweeps.grid_search import grid_search_next_runs
        from sweeps.random_search import random_search_next_runs

    if sweep.content["method"] == "grid":
        try:
            # not more than fits in memory; the list that it returns ends with None when the grid does
            found = grid_search_next_runs([], sweep.content, n=count or 10**6)
        except ValueError as error:
            raise SweepError(f"{sweep.path}: {error}") from None
    elif count is None:
        raise SweepError("a random sweep has no end of its own: give --count, the number of trials")
    else:
        state = random.getstate()
        random.seed(seed)  # the generator that `sweeps` draws from
        try:
            found = random_search_next_runs(sweep.content, n=count)
        finally:
            random.setstate(state)
    plain = [{key: entry["value"] for key, entry in run.config.items()} for run in found if run]
    return json.loads(json.dumps(plain, default=lambda number: number.item()))  # numpy's numbers among them


def _violation(content: dict[str, Any]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jsonschema import ValidationError
        from sweeps import schema_violations_from_proposed_config

    try:
        violations = schema_violations_from_proposed_config(content)
    except ValidationError as error:
        return error.message
    except (ValueError, AttributeError, TypeError) as error:  # what it does with a list where it wants a mapping
        return str(error)
    return "; ".join(" ".join(text.split()) for text in violations)
