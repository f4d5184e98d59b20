"""L1 regularisation, or Lasso (Tibshirani, "Regression Shrinkage and Selection via the Lasso", 1996).

    grad_W = g + lam * sign(W)          # of L + lam * sum |W|
    W      = U(W, grad_W)

The penalty is part of the loss, so U scales it as it scales the loss: Adam makes much of a small one. No weight becomes
exactly zero: weights with |w| < 1e-4 are what counts as gone. While fine-tuning there is no penalty.
"""

from binmask_dist.baselines.dense import Dense
from binmask_dist.method.layout import local_part


class L1(Dense):
    def penalise(self) -> None:
        for param, group in self.weights():
            if not group["frozen"]:
                local_part(param.grad).add_(local_part(param.detach()).sign(), alpha=group["lam"])
