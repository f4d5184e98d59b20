"""No mask and no penalty: the user's own optimizer.

W = U(W, g)
"""

from typing import ClassVar

from binmask_dist.baselines.base import Method
from binmask_dist.method.gradients import scale


class Dense(Method):
    sharded: ClassVar[bool] = True

    def take_step(self) -> None:
        clip = self.clip_coefficient()
        if clip is None:
            return
        scale([param.grad for param in self.params_with_grad()], clip)
        self.penalise()
        self.inner.step()

    def penalise(self) -> None:
        """Add a penalty's gradient to those of the loss."""
