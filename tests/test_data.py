"""Data sets of every origin, opened and checked before any training."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from PIL import Image
from torch.utils.data import DataLoader

from binmask_dist.training.columns import find_image, find_label, find_table, find_texts
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.data import Data, Stream, digits, load_data
from binmask_dist.training.tasks.base import RunError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # five seconds at the end of each pass


def table(rows: int = 20, kinds: int = 2) -> Dataset:
    return Dataset.from_dict({"text": [f"row {i}" for i in range(rows)], "label": [i % kinds for i in range(rows)]})


def load(dataset: object, **options: Any) -> Data:
    return load_data(TrainConfig(dataset=str(dataset), **options))


def write(suffix: str) -> Callable[[Dataset, Path], Any]:
    return {
        ".csv": lambda data, path: data.to_csv(path),
        ".tsv": lambda data, path: data.to_csv(path, sep="\t"),
        ".json": lambda data, path: data.to_json(path, lines=False),
        ".jsonl": lambda data, path: data.to_json(path),
        ".parquet": lambda data, path: data.to_parquet(path),
        ".arrow": lambda data, path: (
            Path(data.save_to_disk(path.parent / "saved") or path.parent / "saved")
            .joinpath("data-00000-of-00001.arrow")
            .rename(path)
        ),
    }[suffix]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow"])
@pytest.mark.parametrize("streaming", [False, True])
def test_files(suffix: str, streaming: bool, tmp_path: Path) -> None:
    train, test = tmp_path / f"one{suffix}", tmp_path / f"two{suffix}"
    write(suffix)(table(20), train)
    write(suffix)(table(6), test)
    options: dict[str, Any] = {"streaming": True, "steps_per_epoch": 1} if streaming else {}
    data = load(train, test_split=str(test), **options)
    assert data.test["text"][:] == table(6)["text"][:]
    assert [row["text"] for row in data.train] == table(20)["text"][:]
    assert (data.label, data.classes) == ("label", load(train).classes)
    assert data.classes is not None and data.classes.names == ["0", "1"]


def test_lines_of_a_plain_file_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i}\n" for i in range(10)))
    data = load_data(TrainConfig(dataset=str(path)), labelled=False)
    assert data.train["text"][:] == [f"line {i}\n" for i in range(8)]
    assert data.test["text"][:] == ["line 8\n", "line 9\n"]


def test_folders(tmp_path: Path) -> None:
    table(20).save_to_disk(tmp_path / "one")
    assert (len(load(tmp_path / "one").train), len(load(tmp_path / "one").test)) == (16, 4)
    DatasetDict(train=table(12), validation=table(5)).save_to_disk(tmp_path / "both")
    assert (len(load(tmp_path / "both").train), len(load(tmp_path / "both").test)) == (12, 5)
    stream = load(tmp_path / "both", streaming=True, steps_per_epoch=1)
    assert sorted(row["text"] for row in stream.train) == sorted(table(12)["text"][:])
    (tmp_path / "files").mkdir()
    table(9).to_csv(tmp_path / "files" / "train.csv")
    table(4).to_csv(tmp_path / "files" / "test.csv")
    assert (len(load(tmp_path / "files").train), len(load(tmp_path / "files").test)) == (9, 4)


def test_a_saved_format_does_not_matter(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "kind": ClassLabel(names=["a", "b"])})
    part = Dataset.from_dict({"text": ["one", "two"], "kind": [0, 1]}, features)
    splits = DatasetDict(train=part, test=part.with_format("torch", columns=["kind"]))
    splits.save_to_disk(tmp_path / "data")
    for options in ({}, {"streaming": True, "steps_per_epoch": 1}):
        data = load(tmp_path / "data", **options)
        assert data.test[:] == {"text": ["one", "two"], "kind": [0, 1]}


def test_a_folder_of_images(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        for kind in ("cat", "dog"):
            for index in range(count):
                path = tmp_path / "pets" / split / kind / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (5, 4), (index, 0, 0)).save(path)
    data = load(tmp_path / "pets")
    assert (len(data.train), len(data.test)) == (6, 4)
    assert data.classes is not None and data.classes.names == ["cat", "dog"]
    assert find_image(data.features, ()) == "image"
    assert data.test[0]["image"].size == (5, 4)


def test_the_test_split_is_found_or_given(tmp_path: Path) -> None:
    splits = DatasetDict({"train": table(12), "dev": table(5), "validation": table(6), "extra": table(7)})
    splits.save_to_disk(tmp_path / "data")
    assert len(load(tmp_path / "data").test) == 6
    data = load(tmp_path / "data", train_split="extra", test_split="dev")
    assert (len(data.train), len(data.test)) == (7, 5)


def test_what_is_held_out_is_stratified_and_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    Dataset.from_dict({"x": list(range(100)), "y": ["rare"] * 10 + ["often"] * 90}).to_parquet(tmp_path / "a.parquet")
    parts = [load(tmp_path / "a.parquet", test_fraction=0.3, seed=seed) for seed in (0, 1)]
    assert parts[0].test["x"][:] == parts[1].test["x"][:]
    assert Counter(parts[0].test["y"][:]) == {"rare": 3, "often": 27}
    assert sorted(parts[0].train["x"][:] + parts[0].test["x"][:]) == list(range(100))


def test_classes_too_rare_to_be_stratified(tmp_path: Path) -> None:
    Dataset.from_dict({"x": list(range(10)), "y": [0, 0, 0, 0, 0, 0, 0, 1, 1, 2]}).to_csv(tmp_path / "a.csv")
    assert len(load(tmp_path / "a.csv").test) == 2


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        ([3, 7, 7, 5], ["3", "5", "7"], [0, 2, 2, 1]),
        (["dog", "cat", "dog", "cat"], ["cat", "dog"], [1, 0, 1, 0]),
        ([True, False, True, True], ["False", "True"], [1, 0, 1, 1]),
        ([2.0, 1.0, 2.0, 1.0], ["1.0", "2.0"], [1, 0, 1, 0]),
    ],
)
def test_labels_become_class_numbers(labels: list, names: list[str], numbers: list[int], tmp_path: Path) -> None:
    part = Dataset.from_dict({"x": [0.0] * 4, "y": labels})
    DatasetDict(train=part, test=part).save_to_disk(tmp_path / "data")
    classes = load(tmp_path / "data").classes
    assert classes is not None and classes.names == names
    assert [classes.number(label) for label in labels] == numbers


def test_declared_classes_count_even_if_none_of_them_is_there(tmp_path: Path) -> None:
    features = Features({"x": Value("int64"), "kind": ClassLabel(names=["a", "b", "c"])})
    Dataset.from_dict({"x": list(range(8)), "kind": [0, 2] * 4}, features).save_to_disk(tmp_path / "data")
    data = load(tmp_path / "data")
    assert data.label == "kind"
    assert data.classes is not None and data.classes.names == ["a", "b", "c"]


CATS_FIRST, DOGS_FIRST = ClassLabel(names=["cat", "dog"]), ClassLabel(names=["dog", "cat"])
WORDS, NUMBERS = Value("string"), Value("int64")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("train", "test", "labels", "names"),
    [
        (CATS_FIRST, DOGS_FIRST, ([0, 1, 1], [1, 0, 0]), ["cat", "dog"]),
        (CATS_FIRST, ClassLabel(names=["bird", "dog", "cat"]), ([0, 1, 1], [2, 1, 1]), ["cat", "dog"]),
        (CATS_FIRST, WORDS, ([0, 1, 1], ["cat", "dog", "dog"]), ["cat", "dog"]),
        (CATS_FIRST, NUMBERS, ([0, 1, 1], [0, 1, 1]), ["cat", "dog"]),
        (WORDS, DOGS_FIRST, (["cat", "dog", "dog"], [1, 0, 0]), None),
        (NUMBERS, CATS_FIRST, ([0, 1, 1], [0, 1, 1]), None),
        (ClassLabel(names=["1", "10", "2"]), NUMBERS, ([0, 1, 2], [1, 10, 2]), ["1", "10", "2"]),
    ],
)
def test_classes_are_matched_by_name(
    train: Any, test: Any, labels: tuple, names: list[str] | None, streaming: bool, tmp_path: Path
) -> None:
    parts = [
        Dataset.from_dict({"label": values, "x": [0, 1, 1]}, Features({"label": kind, "x": NUMBERS}))
        for kind, values in zip((train, test), labels, strict=True)
    ]
    DatasetDict(train=parts[0], test=parts[1]).save_to_disk(tmp_path / "data")
    options: dict[str, Any] = {"streaming": True, "steps_per_epoch": 1} if streaming else {}
    data = load(tmp_path / "data", **options)
    assert data.classes is not None and data.classes.names == (names or data.classes.names)
    in_train, in_test = ([data.classes.number(row["label"]) for row in part] for part in (data.train, data.test))
    assert in_train == in_test
    assert len(set(in_train)) == len(set(labels[0]))
    assert [row["x"] for row in data.test] == [0, 1, 1]


def test_classes_of_other_names_are_refused(tmp_path: Path) -> None:
    parts = [
        Dataset.from_dict({"label": [0, 1], "x": [0, 1]}, Features({"label": ClassLabel(names=names), "x": NUMBERS}))
        for names in (["cat", "dog"], ["cat", "bird"])
    ]
    DatasetDict(train=parts[0], test=parts[1]).save_to_disk(tmp_path / "data")
    with pytest.raises(RunError, match="the label 'bird' in the split 'test' is none of the 2 classes"):
        load(tmp_path / "data")


def test_a_path_will_do_for_an_image() -> None:
    image = Dataset.from_dict({"image": ["a.png"]}, Features({"image": datasets.Image()}))
    Data(image, Dataset.from_dict({"image": ["a.png"]})).check_columns(["image"])


def columns(**kinds: Any) -> Features:
    return Features({name: Value(kind) if isinstance(kind, str) else kind for name, kind in kinds.items()})


def test_columns_are_found() -> None:
    label = ClassLabel(names=["a", "b"])
    assert find_label(columns(text="string", kind=label, label="string"), "") == "kind"
    assert find_label(columns(text="string", Label="string"), "") == "Label"
    assert find_label(columns(fine=label, label=label), "") == "label"
    assert find_texts(columns(id="int64", s="string", label="string"), (), "label", most=2) == ["s"]
    assert find_texts(columns(a="string", b="string"), ("b", "a"), "", most=2) == ["b", "a"]
    kinds = columns(a="float32", b="string", c=datasets.List(Value("uint8"), length=3), d=datasets.Image(), y="int64")
    assert find_table(kinds, (), "y") == ["a", "b", "c"]
    assert find_table(kinds, ("c",), "y") == ["c"]


LABEL = ClassLabel(names=["a", "b"])


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (lambda: find_label(columns(a="string"), ""), "none of the columns a may be the label; give label_column"),
        (lambda: find_label(columns(a=LABEL, b=LABEL), ""), r"more than one \(a, b\) of the columns a, b"),
        (lambda: find_label(columns(label="int64"), "lable"), "no column 'lable' among label; did you mean 'label'?"),
        (lambda: find_label(columns(y=List(Value("int64"))), ""), "label column 'y' must hold a class in each row"),
        (lambda: find_label(columns(y={"a": Value("int64")}), "y"), "label column 'y' must hold a class in each row"),
        (lambda: find_label(columns(label=datasets.Image()), ""), "lists, dicts or files; give another label_column"),
        (lambda: find_image(columns(a="string"), ()), "no column with images among a; give input_columns"),
        (lambda: find_image(columns(a="string"), ("a", "b")), "takes 1 with images"),
        (lambda: find_texts(columns(a="string", b="string"), (), "", 2), r"more than one column with texts \(a, b\)"),
        (lambda: find_table(columns(y="int64"), (), "y"), "none of the columns y holds numbers or words"),
        (lambda: find_table(columns(y="int64", x="int8"), ("y",), "y"), "the column 'y' cannot be an input"),
    ],
)
def test_columns_that_cannot_be_found(find: Callable[[], object], message: str) -> None:
    with pytest.raises(RunError, match=message):
        find()


def saved(folder: Path, train: dict[str, list], test: dict[str, list] | None = None) -> Path:
    parts = {"train": Dataset.from_dict(train)} | ({"test": Dataset.from_dict(test)} if test else {})
    DatasetDict(parts).save_to_disk(folder)
    return folder


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ({"x": [1, 2], "y": [0, 0]}, None, r"at least two classes, but the label column 'y' has 1 \(0\)"),
        ({"x": [1, 2], "y": [0.5, 0.1]}, None, "holds fractions such as 0.[15]: it must hold classes"),
        ({"x": [1, 2], "y": [0, 1]}, {"x": [1], "y": [2]}, "the label 2 in the split 'test' is none of the 2 classes"),
        ({"x": [1, 2], "y": [0, 1]}, {"x": [1], "y": [-1]}, "the split 'test' has rows without a label"),
        ({"x": [1, 2], "y": [0, 1]}, {"x": [1]}, "the split 'test' has no column 'y'"),
        ({"x": [1, 2, 3], "y": [0, 1, None]}, None, "the split 'train' has rows without a label"),
        ({"x": [1], "y": [0]}, None, "at least two classes"),
    ],
)
def test_data_that_cannot_be_used(train: dict, test: dict | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=message):
        load(saved(tmp_path / "data", train, test))


def test_columns_of_one_part_only_do_not_count(tmp_path: Path) -> None:
    data = load(saved(tmp_path / "data", {"a": [1, 2], "b": [1, 2], "y": [0, 1]}, {"b": [1], "c": [1], "y": [0]}))
    assert list(data.features) == ["b", "y"]


def test_empty_splits(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty.parquet", tmp_path / "full.parquet"
    table(0).to_parquet(empty)
    table(4).to_parquet(full)
    for options in ({"dataset": empty}, {"dataset": full, "test_split": str(empty)}):
        with pytest.raises(RunError, match=r"cannot open the data set .*empty.parquet: .* no data"):
            load(**options)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"the split '.*empty.parquet' is empty"):
        load(full, test_split=str(empty), streaming=True, steps_per_epoch=1)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    data = saved(tmp_path / "data", {"x": [1, 2, 3, 4], "y": [0, 1, 0, 1]})
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    (tmp_path / "data.xyz").touch()
    for options, message in (
        ({"dataset": tmp_path / "no.csv"}, "there is no file or folder .*no.csv"),
        ({"dataset": tmp_path / "no"}, "there is no file or folder .*no"),
        ({"dataset": tmp_path / "data.xyz"}, "data.xyz is of no known kind; the ending must be one of .csv"),
        ({"dataset": tmp_path / "empty"}, "cannot open the data set .*empty: .*data files"),
        ({"dataset": tmp_path / "broken.parquet"}, "cannot open the data set .*broken.parquet: .*[Pp]arquet"),
        ({"dataset": "someone/something"}, "someone/something, which is no file or folder here and not to be had"),
        ({"dataset": "digits", "dataset_config": "large"}, "digits has no configurations; leave out dataset_config"),
        ({"dataset": data, "dataset_config": "large"}, "data has no configurations; leave out dataset_config"),
        ({"dataset": data, "train_split": "trian"}, "train_split: there is no split 'trian'; there is train"),
        ({"dataset": data, "test_split": "test"}, "test_split: there is no split 'test'; there is train"),
        ({"dataset": data, "test_split": "train"}, "'train' cannot be both for training and for testing"),
        ({"dataset": data, "test_fraction": 0.9}, "4 examples are too few to hold out 90%"),
        ({"dataset": data, "streaming": True, "steps_per_epoch": 1}, "nothing can be held out of a stream"),
    ):
        with pytest.raises(RunError, match=message) as raised:
            load(**options)  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_paths_that_look_like_patterns(streaming: bool, tmp_path: Path) -> None:
    folder = tmp_path / "my [data] dir"
    folder.mkdir()
    table(6).to_csv(folder / "one[1].csv")
    table(4).to_csv(folder / "two?.csv")
    options: dict[str, Any] = {"streaming": True, "steps_per_epoch": 1} if streaming else {}
    data = load(folder / "one[1].csv", test_split=str(folder / "two?.csv"), **options)
    assert [row["text"] for row in data.train] == table(6)["text"][:]
    assert data.test["text"][:] == table(4)["text"][:]
    with pytest.raises(RunError, match=r"has one of \* \? \[ in it; rename the folder: .*data files"):
        load(folder, **options)


def test_the_digits_as_a_stream() -> None:
    data = load("digits", streaming=True, steps_per_epoch=1)
    assert data.test["label"][:] == digits()["test"]["label"][:]
    expected = np.asarray(digits()["test"][5]["image"])
    np.testing.assert_array_equal(np.asarray(data.test[5]["image"]), expected)


# -- streams


def make_stream(folder: Path, seed: int = 0, steps: int = 5, batch: int = 4, shards: int = 3) -> Stream:
    for shard in range(shards):
        path = folder / "shards" / f"{shard}.parquet"
        Dataset.from_dict({"x": list(range(shard * 10, shard * 10 + 10))}).to_parquet(path)
    source = datasets.load_dataset(str(folder / "shards"), streaming=True)["train"]
    config = TrainConfig(seed=seed, batch_size=batch, steps_per_epoch=steps, streaming=True, shuffle_buffer=7)
    return Stream(source, config)


def numbers(rows: Any) -> list[int]:
    return [row.values["x"] for row in rows]


def test_the_order_of_a_stream_depends_on_the_seed_and_the_epoch(tmp_path: Path) -> None:
    stream, twin, other = make_stream(tmp_path), make_stream(tmp_path), make_stream(tmp_path, seed=1)
    first = numbers(stream)
    assert len(first) == len(stream) == 20
    assert len(set(first)) == 20
    assert numbers(stream) == numbers(twin) == first != numbers(other)
    stream.set_epoch(1)
    assert numbers(stream) != first
    twin.set_epoch(1)
    assert numbers(stream) == numbers(twin)
    assert [(row.epoch, row.position) for row in stream] == [(1, position) for position in range(20)]


def test_a_short_stream_goes_round_in_another_order(tmp_path: Path) -> None:
    order = numbers(make_stream(tmp_path, steps=15))
    assert Counter(order) == {number: 2 for number in range(30)}
    assert order[:30] != order[30:]


@pytest.mark.parametrize(("workers", "shards"), [(1, 3), (2, 3), (2, 1)])
def test_workers_share_a_stream(workers: int, shards: int, tmp_path: Path) -> None:
    """Two workers and one shard: one of them has nothing to do."""
    stream = make_stream(tmp_path, steps=5, shards=shards)
    loader = DataLoader(stream, batch_size=4, num_workers=workers, collate_fn=list, drop_last=True)
    batches = [list(batch) for batch in loader]
    assert len(batches) == len(loader) == 5
    rows = [row for batch in batches for row in batch]
    assert len(set(numbers(rows))) == min(20, shards * 10)
    assert len({row.position for row in rows}) == 20


def test_processes_share_a_stream(tmp_path: Path) -> None:
    """As `accelerator.prepare` does with dispatch_batches=False: together they see what one process sees."""
    alone = numbers(make_stream(tmp_path))
    shares = []
    for index in range(2):
        loader = DataLoader(make_stream(tmp_path), batch_size=2, collate_fn=list, drop_last=True)
        prepared = prepare_data_loader(
            loader, torch.device("cpu"), num_processes=2, process_index=index, dispatch_batches=False
        )
        assert len(prepared) == 5
        shares.append([numbers(batch) for batch in prepared])
    assert [number for pair in zip(*shares, strict=True) for half in pair for number in half] == alone


def test_an_empty_stream_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("x,y\n")
    source = datasets.load_dataset("csv", data_files=str(tmp_path / "empty.csv"), streaming=True)["train"]
    stream = Stream(source, TrainConfig(streaming=True, steps_per_epoch=1))
    with pytest.raises(RunError, match="the training split is empty"):
        next(iter(stream))
