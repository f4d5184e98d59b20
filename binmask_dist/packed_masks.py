"""Masks in a file, one bit per weight: safetensors, whose metadata holds the shapes."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from binmask_dist.files import replacing

FORMAT = "binmask_dist packed masks 1"


def save_masks(path: Path, masks: dict[str, Tensor]) -> None:
    """Write what `BinMask.masks` returns; a kill leaves the old file or the new one."""
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise TypeError(f"mask {name} has dtype {mask.dtype}; masks are torch.bool")
    packed = {name: np.packbits(mask.cpu().numpy()) for name, mask in masks.items()}
    shapes = {name: list(mask.shape) for name, mask in masks.items()}
    with replacing(path) as temporary:
        save_file(packed, temporary, metadata={"format": FORMAT, "shapes": json.dumps(shapes)})


def load_masks(path: str | Path) -> dict[str, Tensor]:
    """Name -> bool tensor, as they were saved."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} holds no packed masks; give a file that save_masks wrote")
            shapes = json.loads(metadata["shapes"])
            return {name: _unpack(file.get_tensor(name), shape) for name, shape in shapes.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); give one that save_masks wrote") from error


def _unpack(packed: np.ndarray, shape: list[int]) -> Tensor:
    bits = np.unpackbits(packed, count=math.prod(shape))  # the last byte may have bits to spare
    return torch.from_numpy(bits.astype(bool)).reshape(shape)
