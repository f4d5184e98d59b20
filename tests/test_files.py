"""Files are the old one or the new one, never half of it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from binmask_dist.files import replacing, write_atomically


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "older and longer")
    write_atomically(path, "größer")
    assert path.read_text(encoding="utf-8") == "größer"
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_keeps_the_suffix(tmp_path: Path) -> None:
    with replacing(tmp_path / "plot.png") as temporary:
        assert temporary.suffix == ".png"
        assert temporary.parent == tmp_path
        temporary.touch()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "nowhere" / "x.json", "{}")


def test_the_file_is_as_readable_as_any_other(tmp_path: Path) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "other"
    other.touch()
    with replacing(path) as temporary:
        save_file({"weight": torch.zeros(2)}, temporary)
    assert path.stat().st_mode == other.stat().st_mode
