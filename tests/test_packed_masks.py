"""Masks come back from a file as they went in, at one bit each."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from binmask_dist.packed_masks import load_masks, save_masks


def test_masks_of_all_shapes_come_back(tmp_path: Path) -> None:
    shapes = {"a.weight": (7, 5), "b.weight": (1, 7), "conv": (3, 2, 3, 3), "empty": (0, 4), "one": (), "flat": (8,)}
    masks = {name: torch.rand(shape) > 0.5 for name, shape in shapes.items()}
    masks["turned"] = masks["a.weight"].T  # not contiguous
    save_masks(tmp_path / "masks.safetensors", masks)
    loaded = load_masks(tmp_path / "masks.safetensors")
    assert list(loaded) == list(masks)
    for name, mask in masks.items():
        assert loaded[name].dtype == torch.bool
        assert torch.equal(loaded[name], mask)


def test_a_weight_takes_one_bit(tmp_path: Path) -> None:
    save_masks(tmp_path / "masks.safetensors", {"weight": torch.ones(1000, 800, dtype=torch.bool)})
    assert (tmp_path / "masks.safetensors").stat().st_size < 1000 * 800 / 8 + 500
    assert [path.name for path in tmp_path.iterdir()] == ["masks.safetensors"]


def test_what_is_no_mask_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"mask weight has dtype torch.float32; masks are torch.bool"):
        save_masks(tmp_path / "masks.safetensors", {"weight": torch.ones(3)})
    assert list(tmp_path.iterdir()) == []


def test_foreign_and_cut_files_are_refused(tmp_path: Path) -> None:
    model, cut = tmp_path / "model.safetensors", tmp_path / "cut.safetensors"
    save_file({"weight": torch.ones(3)}, model)
    with pytest.raises(ValueError, match="holds no packed masks; give a file that save_masks wrote"):
        load_masks(model)
    save_masks(cut, {"weight": torch.ones(1000, dtype=torch.bool)})
    cut.write_bytes(cut.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load_masks(cut)
    with pytest.raises(FileNotFoundError):
        load_masks(tmp_path / "nowhere.safetensors")
