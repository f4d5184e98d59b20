"""`InputMask`: x * s in front of any network, for feature selection.

s is a parameter of ones whose W stays one: `patch` gives it a group of its own in which the masks learn and U does
nothing, so that s is b, the mask itself. A feature that is off is zero, and inputs keep their shape.

    InputMask(617)                      one mask for each of 617 features
    InputMask((28, 28))                 for each pixel, shared by the channels of (batch, 1, 28, 28)
    InputMask((3, 1, 1))                for each channel
    InputMask((128, 1))                 for each token of (batch, 128, width)
    InputMask(groups=[0, 1, 1, 1, 2])   columns 1 to 3, the one-hot columns of one variable, share a mask
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn


class InputMask(nn.Module):
    """Multiplies every example by the same masks: `shape`, or the shape of `groups`, must broadcast to an example's.

    groups   for each place of the input the number of its mask, from 0 on with no number left out
    """

    groups: Tensor | None

    def __init__(self, shape: int | Sequence[int] | None = None, *, groups: Any = None) -> None:
        super().__init__()
        if (shape is None) == (groups is None):
            raise ValueError("give InputMask either a shape or groups")
        if groups is None:
            assert shape is not None
            self.groups = None
            lengths: tuple[Any, ...] = tuple(shape) if isinstance(shape, Sequence) else (shape,)
            if not lengths or not all(isinstance(length, Integral) and int(length) > 0 for length in lengths):
                raise ValueError(f"the shape of an InputMask must be positive whole numbers, not {shape!r}")
            size = tuple(int(length) for length in lengths)
        else:
            numbers = torch.as_tensor(groups)
            if numbers.is_floating_point() or numbers.dtype == torch.bool or numbers.dim() == 0 or not numbers.numel():
                raise ValueError("groups must be a list of the numbers of masks, such as [0, 0, 1, 2]")
            size = (int(numbers.max()) + 1,)
            if not torch.equal(numbers.unique(), torch.arange(size[0])):
                raise ValueError("groups must use every number from 0 to the largest one")
            self.register_buffer("groups", numbers.long())
        self.scale = nn.Parameter(torch.ones(size))

    @property
    def mask(self) -> Tensor:
        """s, with one value for each place of the input."""
        return self.scale if self.groups is None else self.scale[self.groups]

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask
        if mask.dim() >= x.dim():
            raise ValueError(f"a mask of shape {tuple(mask.shape)} leaves no batch dimension in {tuple(x.shape)}")
        masked = x * mask
        if masked.shape != x.shape:
            raise ValueError(f"a mask of shape {tuple(mask.shape)} does not fit inputs of shape {tuple(x.shape)}")
        return masked

    def extra_repr(self) -> str:
        shape = self.scale.shape if self.groups is None else self.groups.shape
        return f"{tuple(shape)}, masks={self.scale.numel()}"
