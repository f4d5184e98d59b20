"""Numbers of an optimizer's state and groups as JSON, from which they become what they were: some optimizers count in
tensors, some in numbers, and each fails on the other."""

from typing import Any

import torch
from torch import Tensor


def to_json(value: Any) -> Any:
    """Numbers as they are; a number in a tensor, or a dtype, so that `from_json` makes the same of it again."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return {"tensor": value.item(), "dtype": str(value.dtype), "beside_weight": value.device.type != "cpu"}
    return {"dtype": str(value)} if isinstance(value, torch.dtype) else value


def from_json(value: Any, device: torch.device) -> Any:
    """`device`: where the weight is."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict) or "dtype" not in value:
        return value
    dtype = getattr(torch, value["dtype"].removeprefix("torch."))
    if "tensor" not in value:
        return dtype
    return torch.tensor(value["tensor"], dtype=dtype, device=device if value["beside_weight"] else "cpu")
