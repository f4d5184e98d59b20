"""Dropout (Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 2014).

    h = h * m / (1 - lam), m ~ Bernoulli(1 - lam), in training; h itself in evaluation

h is what a hidden layer of an MLP answers, or where the network's own `drop_rate` acts: before the last layer of most.
The model does it (`model_arguments`); the step is that of dense training.
"""

from typing import Any

from binmask_dist.baselines.dense import Dense


class Dropout(Dense):
    @staticmethod
    def model_arguments(probability: float) -> dict[str, Any]:
        """What timm.create_model is given."""
        return {"drop_rate": probability}
