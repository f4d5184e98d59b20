"""Tables from files: what `datasets` opens (csv, parquet, json, ...), svmlight, npz, mat, arff. Nothing is unpickled.

Words become ones and zeros, one column for each, which form a group and are chosen together.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse as sp

from binmask_dist.selection.arff import read_arff
from binmask_dist.selection.rows import Matrix
from binmask_dist.training.columns import USUAL_LABELS, is_index
from binmask_dist.training.tasks.base import RunError, did_you_mean

USUAL_INPUTS = ("x", "data", "features", "inputs")
SVMLIGHT = (".svmlight", ".svm", ".libsvm")
MOST_WORDS = 1000  # in a column that is made into one column for each of its words
CSR_PARTS = {"data", "indices", "indptr", "shape"}
WITHOUT_TYPES = (".csv", ".tsv", ".txt")  # their first line is taken for names, whatever it holds


@dataclass(frozen=True)
class Table:
    """Inputs without missing cells, and what is to be predicted from them."""

    x: Matrix
    y: np.ndarray
    names: list[str]  # of the features
    groups: list[str] | None = None  # name of each feature's variable, if one of them has several features


def read_table(path: str | Path, target: str = "", ignore: Sequence[str] = ()) -> Table:
    """Open a file by its suffix. `target` is a name, or a place such as -1; empty: found by its usual names."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise RunError(f"there is no file {path}")
    suffix = path.suffix.lower()
    try:
        if suffix in SVMLIGHT:
            if target:
                raise RunError("svmlight files begin every row with its target; leave out --target")
            table = _without(_read_svmlight(path), ignore)
        elif suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                parts = CSR_PARTS if set(arrays.files) >= CSR_PARTS else set()
                others = dict(_readable(arrays, leave=parts))
                table = _without(_from_arrays(others, target, sp.load_npz(path) if parts else None), ignore)
        elif suffix == ".mat":
            loaded = {key: value for key, value in scipy.io.loadmat(path).items() if not key.startswith("__")}
            table = _without(_from_arrays({key: _words(value) for key, value in loaded.items()}, target), ignore)
        else:
            columns = read_arff(path) if suffix == ".arff" else _read_columns(path)
            table = _from_columns(columns, target, ignore)
    except (ValueError, NotImplementedError, OSError, scipy.io.matlab.MatReadError) as error:
        raise RunError(f"{path} cannot be read as {suffix.lstrip('.') or 'a table'}: {error}") from error
    _check_cells(table)
    return table


def _without(table: Table, ignore: Sequence[str]) -> Table:
    """The table less some features."""
    for name in ignore:
        _existing(table.names, name, "ignore_columns")
    kept = [place for place, name in enumerate(table.names) if name not in ignore]
    return replace(table, x=table.x[:, kept], names=[table.names[place] for place in kept]) if ignore else table


def _words(array: Any) -> Any:
    """MATLAB's cells of words, and its words of one length, filled up with blanks, as numpy has them."""
    if sp.issparse(array):
        return array
    if array.dtype == object and all(isinstance(cell, np.ndarray) and cell.size == 1 for cell in array.flat):
        array = np.array([cell.item() for cell in array.flat])
    return np.char.rstrip(array) if array.dtype.kind in "US" else array


def _read_svmlight(path: Path) -> Table:
    from sklearn.datasets import load_svmlight_file

    x, y = load_svmlight_file(str(path))
    return Table(x, y, _numbered("feature", x.shape[1]))


def _readable(arrays: Any, leave: set[str]) -> Any:
    """Without what would have to be unpickled."""
    for key in arrays.files:
        if key in leave:
            continue
        try:
            yield key, arrays[key]
        except ValueError:
            continue


def _from_arrays(arrays: dict[str, Any], target: str, x: Any = None) -> Table:
    if x is None:
        x = arrays[_one_of(arrays, USUAL_INPUTS, "inputs")]
    y = np.asarray(arrays[_target(list(arrays), target)]).ravel()
    x = x.tocsr() if sp.issparse(x) else np.asarray(x)
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise RunError(f"the inputs must be a matrix of numbers, and not of shape {x.shape} and type {x.dtype}")
    if x.dtype.kind == "b":
        x = x.astype(np.uint8)
    if x.ndim > 2:
        x = x.reshape(len(x), -1)
    if x.shape[0] != len(y):
        raise RunError(f"there are {x.shape[0]} rows of inputs and {len(y)} targets")
    names = arrays.get("names")
    if names is not None and len(names) == x.shape[1] and names.dtype.kind in "US":
        return Table(x, y, names.astype(str).tolist())
    return Table(x, y, _numbered("feature", x.shape[1]))


def _one_of(arrays: Mapping[str, Any], usual: Sequence[str], what: str) -> str:
    found = [key for key in arrays if key.lower() in usual]
    if len(found) != 1:
        raise RunError(f"there must be one array with {what}, called {usual[0]}, among {_listed(list(arrays))}")
    return found[0]


def _read_columns(path: Path) -> dict[str, np.ndarray]:
    """Whatever `datasets` opens. A column of lists of one length is a matrix."""
    from binmask_dist.training.data import open_splits

    splits = open_splits(str(path))
    table = next(iter(splits.values())).data.table
    if path.suffix.lower() in WITHOUT_TYPES and _are_values(table.column_names):
        raise RunError(f"the first line of {path} has numbers and no names; put a line of names before it")
    columns = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if hasattr(column, "flatten") and "list" in str(column.type):
            values = column.flatten().to_numpy(zero_copy_only=False)
            lengths = set(column.value_lengths().to_pylist()) if hasattr(column, "value_lengths") else {column.type}
            if len(lengths) > 1 or len(values) % max(len(column), 1):
                raise RunError(f"the lists in column '{name}' are not all of the same length")
            columns[name] = values.reshape(len(column), -1)
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    return columns


def _are_values(names: Sequence[str]) -> bool:
    """Whether all names are numbers, but not those of columns that are counted from 0 or 1."""
    try:
        numbers = [float(name) for name in names]
    except ValueError:
        return False
    return all(numbers != list(range(start, start + len(names))) for start in (0, 1))


def _from_columns(columns: dict[str, np.ndarray], target: str, ignore: Sequence[str]) -> Table:
    for name in ignore:
        _existing(list(columns), name, "ignore_columns")
    kept = {name: column for name, column in columns.items() if name not in ignore}
    goal = _target(list(kept), target)
    y = kept.pop(goal)
    if index := [name for name in kept if is_index(name)]:
        warnings.warn(f"the index of a pandas table, {', '.join(index)}, is no feature and is left out", stacklevel=2)
        kept = {name: column for name, column in kept.items() if name not in index}
    if y.ndim > 1:
        raise RunError(f"the target column '{goal}' holds lists; give another --target")
    if y.dtype == object and any(value is None for value in y):
        raise RunError(f"the target column '{goal}' has rows without a value; leave them out")
    if not kept:
        raise RunError(f"there is no column beside the target '{goal}'")
    parts, names, groups = [], [], []
    for name, column in kept.items():
        matrix, labels = _matrix(name, column)
        parts.append(matrix)
        names += labels
        # the numbers of a list are features of their own, the words of a variable are not
        groups += [name] * len(labels) if _holds_words(column) else labels
    x = parts[0] if len(parts) == 1 else np.hstack(parts)
    return Table(x, y.astype(str) if y.dtype == object else y, names, groups if len(set(groups)) < len(names) else None)


def _holds_words(column: np.ndarray) -> bool:
    return column.dtype.kind in "OUS"


def _matrix(name: str, column: np.ndarray) -> tuple[np.ndarray, list[str]]:
    if not _holds_words(column):
        if column.dtype.kind not in "biuf":
            raise RunError(f"the column '{name}' holds neither numbers nor words; name it in --ignore_columns")
        matrix = column.reshape(len(column), -1)
        kind = np.float64 if matrix.dtype == np.float64 else np.float32
        return matrix.astype(kind), [name] if column.ndim == 1 else _numbered(name, matrix.shape[1])
    if any(value is None for value in column):
        raise RunError(f"the column '{name}' has empty cells; fill them in, or name it in --ignore_columns")
    words, places = np.unique(column.astype(str), return_inverse=True)
    if len(words) > MOST_WORDS:
        raise RunError(f"the column '{name}' has {len(words)} different words; name it in --ignore_columns")
    return np.eye(len(words), dtype=np.float32)[places], [f"{name}={word}" for word in words]


def _check_cells(table: Table) -> None:
    x = table.x
    if x.shape[0] < 2 or x.shape[1] < 1:
        raise RunError(f"the table has {x.shape[0]} rows and {x.shape[1]} features: too few to select from")
    good = np.isfinite(x.data if sp.issparse(x) else x) if x.dtype.kind == "f" else np.ones(1, dtype=bool)
    if not good.all():
        bad = np.unique(x.indices[~good]) if sp.issparse(x) else np.flatnonzero(~good.all(axis=0))
        raise RunError(
            f"the column '{table.names[bad[0]]}' has empty, NaN or inf cells"
            + (f", and so have {len(bad) - 1} more" if len(bad) > 1 else "")
            + "; fill them in, or leave the columns out"
        )
    if table.y.dtype.kind == "f" and not np.isfinite(table.y).all():
        raise RunError("the target has NaN or inf values; leave these rows out")


def _target(names: list[str], asked: str) -> str:
    """The name, or the place if no column has it as a name."""
    if asked:
        if asked not in names and asked.lstrip("-").isdigit() and -len(names) <= int(asked) < len(names):
            return names[int(asked)]
        return _existing(names, asked, "target")
    found = [name for name in names if name.lower() in USUAL_LABELS]
    if len(found) != 1:
        problem = f"more than one column ({', '.join(found)})" if found else "no column has a usual name and"
        raise RunError(f"{problem} may be the target; give --target, a name or a place, among {_listed(names)}")
    return found[0]


def _existing(names: list[str], name: str, key: str) -> str:
    if name in names:
        return name
    raise RunError(f"{key}: there is no column '{name}' among {_listed(names)}{did_you_mean(name, names)}")


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}[{number}]" for number in range(count)]


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
