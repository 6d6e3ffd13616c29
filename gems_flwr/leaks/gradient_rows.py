"""How many samples stand behind each row of a gradient that a node would send.

In a round of refinement a node answers with the gradient of its loss (`moments.loss_sums`). The row
of a class is a sum of inputs, weighed by how wrong the layer is on each: a row to which one sample
contributes nearly all *is* that sample. The effective number of samples behind a row with residuals
r is ``(sum |r|)^2 / sum r^2``, Kish's; the node's limits refuse a gradient by the smallest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from gems_flwr.typing import Float


def row_samples(
    inputs: Float, labels: NDArray[np.int64], weight: Float, bias: Float
) -> NDArray[np.float64]:
    """Return the effective number of samples behind each row of the gradient.

    Parameters
    ----------
    inputs, labels : arrays of shapes (n, D) and (n,)
        The node's samples.
    weight, bias : arrays of shapes (C, D) and (C,)
        The layer at which the gradient is taken.

    Returns
    -------
    array of shape (C,)
        From 1 to n; infinite where a row is zero.
    """
    residuals = softmax(inputs @ weight.T + bias, axis=1)
    residuals[np.arange(len(labels)), labels] -= 1
    first, second = np.abs(residuals).sum(axis=0), (residuals**2).sum(axis=0)
    return np.asarray(np.divide(first**2, second, out=np.full(len(bias), np.inf), where=second > 0))
