"""L0 regularisation with BinMask: sparse networks in two lines of your own training loop."""

from typing import TYPE_CHECKING, Any

from binmask_dist.engines.accelerator import make_accelerator
from binmask_dist.engines.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from binmask_dist.method.input_mask import InputMask
from binmask_dist.method.optimizer import BinMask
from binmask_dist.method.patch import patch
from binmask_dist.method.targets import Plan
from binmask_dist.method.wrapper import Flips, MaskedOptimizer

if TYPE_CHECKING:
    from binmask_dist.selection.selector import BinMaskSelector

__version__ = "0.1.0"
__all__ = [
    "BinMask",
    "BinMaskSelector",
    "CheckpointError",
    "Flips",
    "InputMask",
    "MaskedOptimizer",
    "Plan",
    "load_checkpoint",
    "make_accelerator",
    "patch",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name == "BinMaskSelector":  # scikit-learn takes a second to import
        from binmask_dist.selection.selector import BinMaskSelector

        return BinMaskSelector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
