"""The files of a checkpoint: an index in JSON, and safetensors files of bounded size under names of their own."""

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "checkpoint.json"
FORMAT = "binmask_dist checkpoint 2"
BYTES_PER_FILE = 2 * 2**30


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the sentence says why, and nothing was changed."""


def write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
    """Write files of bounded size, under names that no checkpoint has yet."""
    token, size = uuid.uuid4().hex[:8], 0
    files: list[str] = []
    batch: dict[str, Tensor] = {}
    for name, tensor in tensors:
        batch[name] = tensor
        size += tensor.numel() * tensor.element_size()
        if size >= BYTES_PER_FILE:
            files.append(_write_file(folder / f"{token}-{len(files):05}.safetensors", batch))
            batch, size = {}, 0
    files.append(_write_file(folder / f"{token}-{len(files):05}.safetensors", batch))
    return files


def _write_file(path: Path, batch: dict[str, Tensor]) -> str:
    save_file(batch, path)
    with open(path, "rb") as written:
        os.fsync(written.fileno())
    return path.name


def remove_other_files(folder: Path, keep: set[str]) -> None:
    for path in folder.glob("????????-?????.safetensors"):
        if path.name not in keep:
            path.unlink()


class StoredTensors:
    """The tensors of a checkpoint, by entry name, read when asked for."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self.files: dict[str, Any] = {}
        for file in index["files"]:
            try:
                opened = safe_open(folder / file, framework="pt")
            except (OSError, SafetensorError) as failure:
                raise CheckpointError(f"{folder / file} is missing or cut off ({failure}); use an older one") from None
            self.files.update(dict.fromkeys(opened.keys(), opened))

    def shape(self, entry: str) -> list[int]:
        return self.files[entry].get_slice(entry).get_shape()

    def dtype(self, entry: str) -> str:
        return self.files[entry].get_slice(entry).get_dtype()

    def __getitem__(self, entry: str) -> Tensor:
        return self.files[entry].get_tensor(entry)


def read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint in {folder}: it has no {INDEX}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as failure:
        raise CheckpointError(f"{folder / INDEX} is not readable JSON ({failure})") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise CheckpointError(f"{folder / INDEX} is not a {FORMAT!r}; it was written by something else")
    return index
