"""The method around the weights' optimizer, as the training command makes it."""

import pytest
from accelerate import Accelerator
from torch import nn

from binmask_dist.training.config import TrainConfig
from binmask_dist.training.masking import LONG_RUN, attach_method


@pytest.mark.parametrize(("steps", "compiled"), [(LONG_RUN, True), (LONG_RUN - 1, False)])
def test_a_small_network_is_compiled_in_a_long_run_only(steps: int, compiled: bool) -> None:
    method = attach_method(nn.Linear(8, 4), TrainConfig(), Accelerator(cpu=True), steps)
    assert [group["compile"] for group in method.masked_groups] == [compiled]
