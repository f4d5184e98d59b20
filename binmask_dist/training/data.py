"""Data sets of any origin, opened with Hugging Face `datasets`, in a training and a test part."""

import glob
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow
import torch.utils.data
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from binmask_dist.training.columns import Classes, find_label, is_number, kind
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.tasks.base import RunError, seed_transforms

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".txt": ("text", {"keep_linebreaks": True}),
}
TEST_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
Splits = dict[str, Any]  # name: a Dataset or, with streaming, an IterableDataset


@dataclass(frozen=True)
class Data:
    """A training part, which may be a stream, and a test part; with labels that have been checked."""

    train: Any  # a Dataset or an IterableDataset
    test: Dataset
    label: str = ""
    classes: Classes | None = None

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise if one of these is not alike in both parts. A stream may know its own only when it is read."""
        in_train, in_test = self.train.features, self.test.features
        for name in names if in_train is not None else ():
            if (name in in_train) != (name in in_test):
                has, lacks = ("training", "test") if name in in_train else ("test", "training")
                raise RunError(
                    f"the column '{name}' is in the {has} data and not in the {lacks} data; add it there, "
                    "or give input_columns without it"
                )
            if name not in in_train or name == self.label:
                continue
            one, other = in_train[name], in_test[name]
            # an image may be a path in one of them
            if kind(one) != kind(other) and not isinstance(one, Image) and not isinstance(other, Image):
                raise RunError(
                    f"the column '{name}' holds {kind(one)} in the training data and {kind(other)} in the test data; "
                    "make them alike, or give input_columns without it"
                )

    @property
    def features(self) -> Features:
        """Of the columns that both parts have. A stream may know its own only when it is read."""
        known = self.train.column_names or self.test.column_names
        return Features({name: feature for name, feature in self.test.features.items() if name in known})


def load_data(config: TrainConfig, labelled: bool = True) -> Data:
    """Open the data set that was asked for and check that it can be used."""
    splits = open_splits(config.dataset, config.dataset_config, config.streaming)
    train = _split(splits, config.train_split, "train_split")
    test_name = config.test_split or next((name for name in TEST_SPLITS if name in splits), "")
    if test_name == config.train_split:
        raise RunError(f"the split '{test_name}' cannot be both for training and for testing; give train_split")
    if Path(test_name).suffix.lower() in FORMATS:
        test = _split(open_splits(test_name, "", config.streaming), "train", "test_split")
    else:
        test = _split(splits, test_name, "test_split") if test_name else None
    if config.streaming:
        if test is None:
            raise RunError("nothing can be held out of a stream; give test_split, a split or a file")
        test = _read(test, test_name)
    if not labelled:
        # rows may be lines of one text, which goes on from row to row
        train, test = (train, test) if test is not None else _hold_out(train, config.test_fraction, shuffle=False)
        return Data(train, test)
    return _with_labels(train, test, test_name, config)


def _with_labels(train: Any, test: Dataset | None, test_name: str, config: TrainConfig) -> Data:
    known = test if test is not None and config.streaming else train  # what can be looked into without reading it all
    label = find_label(known.features, config.label_column)
    declared = (train.features or {}).get(label)  # a stream may know its own only when it is read
    if not isinstance(declared, ClassLabel):
        declared = known.features[label]
    classes = Classes.of(declared, label, known[label][:])
    labels = [] if config.streaming else train[label][:]
    numbers = [classes.number(value, f"split '{config.train_split}'") for value in labels]
    if test is None:
        train, test = _hold_out(train, config.test_fraction, numbers)
    elif label not in test.features:
        raise RunError(f"the split '{test_name}' has no column '{label}'; give another test_split")
    else:
        test = _by_name(test, label, declared, classes)
        for value in test[label][:]:
            classes.number(value, f"split '{test_name}'")
    return Data(train, test, label, classes)


def _by_name(test: Dataset, label: str, declared: Any, classes: Classes) -> Dataset:
    """Names for labels where the parts do not declare the same classes, as a number may be another class in each.

    Where one of them declares none and has numbers that are no names, they are the numbers of the other's classes.
    """
    own = test.features[label]
    if own == declared or not any(isinstance(feature, ClassLabel) for feature in (own, declared)):
        return test
    values = test[label][:]
    names = dict(enumerate(own.names)) if isinstance(own, ClassLabel) else {v: str(v) for v in {*values} - {None}}
    found = [names.get(value) for value in values]
    if (is_number(own) or is_number(declared)) and not {*found} - {None} <= {*classes.names}:
        return test
    return test.remove_columns(label).add_column(label, found)


def _hold_out(data: Dataset, fraction: float, labels: list[int] | None = None, shuffle: bool = True) -> Any:
    """The same part in every run, whatever its seed. Classes keep their share where there are enough of each."""
    size = max(1, round(len(data) * fraction))
    if size >= len(data):
        raise RunError(f"{len(data)} examples are too few to hold out {fraction:.0%} for testing; give test_split")
    if labels is not None:
        counts = np.bincount(labels)
        counts = counts[counts > 0]
        if counts.min() < 2 or len(counts) > min(size, len(data) - size):
            labels = None
    rows = np.arange(len(data))
    seed = 0 if shuffle else None
    train, test = train_test_split(rows, test_size=size, stratify=labels, shuffle=shuffle, random_state=seed)
    return data.select(np.sort(train)), data.select(np.sort(test))


def open_splits(name: str, configuration: str = "", streaming: bool = False) -> Splits:
    """All splits of the built-in digits, a file, a folder, or a data set on the hub."""
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    path = Path(name).expanduser()
    suffix = path.suffix.lower()
    is_saved = path.is_dir() and any((path / file).exists() for file in ("dataset_dict.json", "state.json"))
    if configuration and (name == "digits" or path.is_file() or is_saved):
        raise RunError(f"{name} has no configurations; leave out dataset_config")
    if name == "digits":
        return _streams(digits()) if streaming else dict(digits())
    try:
        if is_saved:
            saved = datasets.load_from_disk(str(path)).with_format(None)  # not as tensors, nor some columns alone
            splits = saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
            return _streams(splits) if streaming else dict(splits)
        if path.is_file():
            if suffix not in FORMATS:
                raise RunError(f"the file {name} is of no known kind; the ending must be one of {', '.join(FORMATS)}")
            builder, options = FORMATS[suffix]
            file = glob.escape(str(path))  # `datasets` takes it for a pattern
            return dict(datasets.load_dataset(builder, data_files=file, streaming=streaming, **options))
        is_path = suffix in FORMATS or name.startswith((".", "/", "~")) or name.count("/") > 1
        if is_path and not path.exists():
            raise RunError(f"there is no file or folder {name}")
        return dict(datasets.load_dataset(str(path), configuration or None, streaming=streaming))
    except RunError:
        raise
    except Exception as error:  # of some twenty kinds: not found, no network, broken file, unknown configuration, ...
        where = "" if path.exists() else ", which is no file or folder here and not to be had from the hub"
        if path.is_dir() and glob.escape(str(path)) != str(path):
            where = ", whose path `datasets` takes for a pattern as it has one of * ? [ in it; rename the folder"
        raise RunError(f"cannot open the data set {name}{where}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Its first line, and the first line of what caused it: `datasets` puts the useful one there."""
    lines = [str(part).strip().split("\n")[0] for part in (error, error.__cause__) if part and str(part).strip()]
    return " - ".join(dict.fromkeys(lines)) or type(error).__name__


def _split(splits: Splits, name: str, key: str) -> Any:
    if name not in splits:
        raise RunError(f"{key}: there is no split '{name}'; there is {', '.join(splits)}")
    return splits[name]


def _streams(splits: DatasetDict) -> Splits:
    """What lies on the disk already, read as a stream."""
    return {name: part.to_iterable_dataset(num_shards=min(64, max(1, len(part)))) for name, part in splits.items()}


def _read(stream: datasets.IterableDataset, name: str) -> Dataset:
    """All of a stream, in memory; its images stay as they were encoded."""
    tables = list(stream.with_format("arrow").iter(batch_size=1000))
    if not tables:
        raise RunError(f"the split '{name}' is empty")
    data = Dataset(pyarrow.concat_tables(tables))
    return data.cast(stream.features) if stream.features else data


def map_batches(part: Any, function: Callable[..., Any], remove_columns: list[str]) -> Any:
    """`map` of `datasets`, which keeps its result in a file beside the data; in memory where it cannot write one."""
    options: dict[str, Any] = {"batched": True, "remove_columns": remove_columns}
    if isinstance(part, Dataset):
        folders = {Path(file["filename"]).parent for file in part.cache_files}
        options["keep_in_memory"] = not all(os.access(folder, os.W_OK) for folder in folders)
    return part.map(function, **options)


def digits() -> DatasetDict:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 grey. The same fifth of every digit is always the test set."""
    source = load_digits()
    names = [str(name) for name in source.target_names]
    data = Dataset.from_dict(
        {"image": list((source.images * 255 / 16).astype(np.uint8)), "label": source.target},
        features=Features({"image": Image(), "label": ClassLabel(names=names)}),
    )
    return data.train_test_split(test_size=0.2, stratify_by_column="label", seed=0)


class Row(NamedTuple):
    """A row of a stream as it was read, and the place of it, which seeds what is drawn for it."""

    values: dict[str, Any]
    epoch: int
    position: int


class Stream(torch.utils.data.IterableDataset):
    """The rows of a stream, shuffled anew each epoch in a way that depends on the seed and the epoch alone.

    An epoch is as long as `steps_per_epoch` says: it ends before the stream does, or goes through it again. Every
    process sees all rows and keeps its share of them (Accelerate's, with dispatch_batches=False), so `collate` is
    where a row is decoded: see `finish_rows`.
    """

    def __init__(self, source: datasets.IterableDataset, config: TrainConfig) -> None:
        self.source = source.reshard()  # row groups of parquet files become shards, whose order is shuffled too
        self.seed = config.seed
        self.buffer_size = config.shuffle_buffer
        self.rows_per_part = config.batch_size // config.accumulation
        self.parts = config.steps_per_epoch * config.accumulation
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.parts * self.rows_per_part

    def __iter__(self) -> Iterator[Row]:
        worker = torch.utils.data.get_worker_info()
        index, workers = (worker.id, min(worker.num_workers, self.source.num_shards)) if worker else (0, 1)
        if index >= workers:
            return  # `datasets` gives whole shards to workers, and there is none left for this one
        parts = self.parts // workers + (index < self.parts % workers)
        for count, row in enumerate(itertools.islice(self._rows(), parts * self.rows_per_part)):
            yield Row(row, self.epoch, count * workers + index)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for lap in itertools.count():
            # not by set_epoch of `datasets`: that number is shared by all workers, which are not in step
            seed = int(np.random.SeedSequence((self.seed, self.epoch, lap)).generate_state(1)[0])
            rows = iter(self.source.shuffle(seed=seed, buffer_size=self.buffer_size))
            first = next(rows, None)
            if first is None:
                raise RunError("the training split is empty")
            yield first
            yield from rows


def finish_rows(examples: list, transform: Callable[[dict[str, Any]], Any], seed: int) -> list:
    """What `collate` does first: rows of a stream become examples, all others are examples already."""
    if not isinstance(examples[0], Row):
        return examples
    finished = []
    for row in examples:
        seed_transforms(seed, row.epoch, row.position)
        finished.append(transform(row.values))
    return finished
