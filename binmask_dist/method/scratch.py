"""Memory for what a step holds for a moment: to take it anew from the system costs more than small arithmetic."""

import threading

import torch
from torch import Tensor

LARGEST = 2**18  # elements

_buffers = threading.local()  # two threads may each train a model


def scratch(name: str, size: int, like: Tensor) -> Tensor:
    """A flat, uninitialised tensor with the dtype and device of `like`; on a CPU the same one at every call."""
    if like.device.type != "cpu" or size > LARGEST:  # other devices keep what they have freed themselves
        return torch.empty(size, dtype=like.dtype, device=like.device)
    key = f"{name} {like.dtype}"
    if not hasattr(_buffers, key):
        setattr(_buffers, key, torch.empty(LARGEST, dtype=like.dtype))
    return getattr(_buffers, key)[:size]


def scratch_like(name: str, tensor: Tensor) -> Tensor:
    """The same in the shape and memory order of a tensor."""
    return scratch(name, tensor.numel(), tensor) if tensor.ndim == 1 else torch.empty_like(tensor)
