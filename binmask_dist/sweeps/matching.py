"""A sweep of another method at the sparsities that BinMask reached.

    python launch/match_sparsity.py runs/sweep_binmask configs/paper/small/sweep_probmask.yaml --out probmask.yaml

reads the finished BinMask runs below a folder, takes the mean sparsity of every lam over its seeds, and writes a copy
of the sweep file with these as the values of target_sparsity.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from binmask_dist.files import write_atomically
from binmask_dist.training.identity import configuration_id

DIGITS = 4  # of a sparsity


class MatchError(Exception):
    """The text is one sentence that says what to do."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder below which the BinMask runs are")
    parser.add_argument("sweep", type=Path, help="sweep file with target_sparsity among its parameters")
    parser.add_argument("--most", type=int, default=0, help="take only so many, the highest; 0: all")
    parser.add_argument("--out", type=Path, required=True, help="sweep file to be written")
    options = parser.parse_args(arguments)
    if options.most < 0:
        parser.error(f"--most must be 0 or more, not {options.most}")
    try:
        sparsities = reached(options.runs)[-options.most :]
        write_atomically(options.out, matched(options.sweep, sparsities))
    except MatchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"{options.out}: target_sparsity {', '.join(map(str, sparsities))}")


def reached(folder: Path) -> list[float]:
    """Mean sparsity of each configuration of BinMask, ascending; without those that are all on or all off."""
    found: dict[str, list[float]] = {}
    for file in sorted(folder.rglob("result.json")):
        config, result = json.loads((file.parent / "config.json").read_text()), json.loads(file.read_text())
        if config.get("method", "binmask") == "binmask":
            found.setdefault(configuration_id(config), []).append(result["sparsity"])
    means = {round(statistics.mean(values), DIGITS) for values in found.values()}
    usable = sorted(mean for mean in means if 0 < mean < 1)
    if not usable:
        raise MatchError(f"{folder} holds no finished run of BinMask with some of its weights off; run its sweep first")
    return usable


def matched(sweep: Path, sparsities: list[float]) -> str:
    try:
        content: dict[str, Any] = yaml.safe_load(sweep.read_text())
        content["parameters"]["target_sparsity"] = {"values": sparsities}
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise MatchError(f"{sweep} is no sweep file with parameters: {error}") from None
    return yaml.safe_dump(content, sort_keys=False)
