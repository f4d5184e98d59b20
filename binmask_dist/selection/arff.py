"""ARFF files, as OpenML has them: numbers, nominal values and words, dense rows or sparse ones."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

ATTRIBUTE = re.compile(r"""@attribute\s+(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|(\S+))\s+(.+)""", re.IGNORECASE)
NUMBERS = ("numeric", "real", "integer")
VALUE = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,]*)"""  # in quotes of either kind, or plain
CELL = re.compile(rf"\s*({VALUE})\s*,")
SPARSE_CELL = re.compile(rf"(\d+)\s+({VALUE})")


def read_arff(path: Path) -> dict[str, np.ndarray]:
    """Name -> column: fp64 with NaN for what is missing, or words."""
    names: list[str] = []
    numeric: list[bool] = []
    defaults: list[str] = []  # what a sparse row leaves out
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for line in file:
            text = line.strip()
            if text.lower().startswith("@data"):
                break
            if text.lower().startswith("@attribute"):
                found = ATTRIBUTE.match(text)
                if found is None:
                    raise ValueError(f"the line {text[:60]!r} is no attribute")
                names.append(next(name for name in found.groups()[:3] if name is not None))
                kind = found[4].strip()
                numeric.append(kind.lower().split()[0] in NUMBERS)
                defaults.append("0" if numeric[-1] else next(iter(_cells(kind.strip("{} "))), ""))
        rows = [row for row in _rows(file, defaults) if row]
    for row in rows:
        if len(row) != len(names):
            raise ValueError(f"a row has {len(row)} values, but there are {len(names)} attributes")
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * len(names)
    return {
        name: np.array([float("nan") if value == "?" else float(value) for value in column])
        if is_number
        else np.array([value.strip() for value in column])
        for name, is_number, column in zip(names, numeric, columns, strict=True)
    }


def _rows(lines: Iterable[str], defaults: list[str]) -> Iterable[list[str]]:
    for line in lines:
        text = line.strip()
        if not text or text.startswith("%"):
            continue
        sparse = text.startswith("{")
        if not sparse:
            yield _cells(text)
            continue
        row = defaults.copy()
        for place, value in SPARSE_CELL.findall(text.strip("{}")):
            row[int(place)] = _unquoted(value)
        yield row


def _cells(text: str) -> list[str]:
    """What commas part that are not in quotes."""
    return [_unquoted(cell) for cell in CELL.findall(f"{text},")]


def _unquoted(value: str) -> str:
    value = value.strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value
