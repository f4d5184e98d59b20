"""The methods that BinMask is compared with, each in a small file that opens with its equations and its paper.

    method = make_method("rigl", model, optimizer, Settings(epochs=30, steps=3000, target_sparsity=0.9))

in the place of `binmask_dist.patch`: the result goes to `accelerator.prepare` instead of the optimizer.
"""

from torch import nn
from torch.optim import Optimizer

from binmask_dist.baselines.base import Method, Settings
from binmask_dist.baselines.dense import Dense
from binmask_dist.baselines.dropout import Dropout
from binmask_dist.baselines.hard_concrete import HardConcrete
from binmask_dist.baselines.l1 import L1
from binmask_dist.baselines.l2 import L2
from binmask_dist.baselines.magnitude import Magnitude
from binmask_dist.baselines.probmask import ProbMask
from binmask_dist.baselines.rigl import RigL

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "probmask": ProbMask,
    "hard_concrete": HardConcrete,
    "l1": L1,
    "l2": L2,
    "dropout": Dropout,
    "magnitude": Magnitude,
    "rigl": RigL,
}


def make_method(name: str, model: nn.Module, optimizer: Optimizer, settings: Settings) -> Method:
    return METHODS[name].around(model, optimizer, settings)
