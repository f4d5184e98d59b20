"""Which columns of a data set hold what, and labels as class numbers."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import ClassLabel, Features, Image, LargeList, List, Value

from binmask_dist.training.tasks.base import RunError, did_you_mean

USUAL_LABELS = ("label", "labels", "class", "target", "y")
NUMBERS = ("int", "uint", "float", "double", "bool")
PANDAS_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0")  # in parquet files and in csv


@dataclass(frozen=True)
class Classes:
    """The classes of a data set: what each is called, and the number of each value in the label column, or name."""

    names: list[str]
    numbers: dict[Any, int]

    @classmethod
    def of(cls, feature: Any, column: str, values: Iterable[Any]) -> "Classes":
        """Those that the data set declares or, if it does not, the sorted values of the training split."""
        if isinstance(feature, ClassLabel):
            values = range(feature.num_classes)
            names = list(feature.names)
        else:
            found = set(values) - {None}
            fraction = next((value for value in found if isinstance(value, float) and not value.is_integer()), None)
            if fraction is not None:
                raise RunError(f"the label column '{column}' holds fractions such as {fraction}: it must hold classes")
            values = sorted(found)
            names = [str(value) for value in values]
        classes = cls(names, {value: number for known in (names, values) for number, value in enumerate(known)})
        if len(classes.names) < 2:
            raise RunError(
                f"there must be at least two classes, but the label column '{column}' has {len(classes.names)} "
                f"({', '.join(classes.names) or 'no value'}); give another label_column"
            )
        return classes

    def number(self, value: Any, origin: str = "training data") -> int:
        """Of the class of a label that was found in `origin`."""
        number = self.numbers.get(value)
        if number is not None:
            return number
        if value in (None, -1):
            raise RunError(f"the {origin} has rows without a label; give another split")
        raise RunError(f"the label {value!r} in the {origin} is none of the {len(self.names)} classes known by then")


def find_label(features: Features, asked: str) -> str:
    """The column that was asked for, the only one that declares classes, or one with a usual name."""
    label = existing(features, asked, "label_column") if asked else _likely_label(features)
    if not isinstance(features[label], ClassLabel | Value):
        raise RunError(
            f"the label column '{label}' must hold a class in each row, a number or a word, but it holds "
            "lists, dicts or files; give another label_column"
        )
    return label


def _likely_label(features: Features) -> str:
    declared = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    usual = [name for name in features if name.lower() in USUAL_LABELS]
    for candidates in (declared, usual):
        if len(candidates) == 1:
            return candidates[0]
    both = [name for name in declared if name in usual]
    if len(both) == 1:
        return both[0]
    problem = f"more than one ({', '.join(declared or usual)})" if declared or usual else "none"
    raise RunError(f"{problem} of the columns {_listed(features)} may be the label; give label_column")


def find_image(features: Features, asked: Sequence[str]) -> str:
    found = [name for name, feature in features.items() if isinstance(feature, Image)]
    return _choose(features, asked, found, "images", most=1)[0]


def find_texts(features: Features, asked: Sequence[str], label: str, most: int) -> list[str]:
    """One column, or as many as `most` if they are asked for."""
    found = [name for name, feature in features.items() if is_text(feature) and name != label]
    chosen = _choose(features, asked, found, "texts", most)
    for name in chosen:
        if name not in found:
            raise RunError(f"the column '{name}' cannot be an input: it must hold texts, and not the label")
    return chosen


def find_table(features: Features, asked: Sequence[str], label: str) -> list[str]:
    """All columns of numbers, lists of numbers, or words, apart from the label and an index, which tells rows apart."""
    usable = [
        name
        for name, feature in features.items()
        if name != label and (is_text(feature) or is_number(feature) or is_number_list(feature))
    ]
    for name in asked:
        if existing(features, name, "input_columns") not in usable:
            raise RunError(f"the column '{name}' cannot be an input: it must hold numbers or words, and not the label")
    if not usable:
        raise RunError(f"none of the columns {_listed(features)} holds numbers or words, apart from the label")
    return list(asked) or [name for name in usable if not is_index(name)]


def is_index(name: str) -> bool:
    """Whether it is where pandas has written the index of a table, most often the numbers of its rows."""
    return PANDAS_INDEX.fullmatch(name) is not None


def is_text(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string")


def is_number(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype.startswith(NUMBERS)


def is_number_list(feature: Any) -> bool:
    return isinstance(feature, List | LargeList) and is_number(feature.feature)


def kind(feature: Any) -> str:
    """What a column holds, in the words of an error."""
    if is_text(feature):
        return "words"
    if is_number(feature):
        return "numbers"
    return "lists of numbers" if is_number_list(feature) else "neither numbers nor words"


def existing(features: Features, name: str, key: str) -> str:
    """The name, or an error that names the nearest column."""
    if name in features:
        return name
    raise RunError(f"{key}: there is no column '{name}' among {_listed(features)}{did_you_mean(name, features)}")


def _choose(features: Features, asked: Sequence[str], found: Sequence[str], what: str, most: int) -> list[str]:
    if len(asked) > most:
        raise RunError(f"input_columns has {len(asked)} columns, but this task takes {most} with {what}")
    if asked:
        return [existing(features, name, "input_columns") for name in asked]
    if len(found) == 1:
        return list(found)
    problem = f"more than one column with {what} ({', '.join(found)})" if found else f"no column with {what}"
    raise RunError(f"{problem} among {_listed(features)}; give input_columns")


def _listed(features: Features) -> str:
    return ", ".join(features)
