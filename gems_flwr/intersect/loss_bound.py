"""How far a layer can be from the optimum of the pooled loss, at most.

The loss ``f(V) = L(V) + ridge |V|^2`` is a mean L of softmax losses, which is convex and at least
0, and a ridge on all of V, bias included. So every gradient that was ever evaluated gives a
plane below L::

    L(V) >= L_t + <a_t, V - V_t>,       and L(V) >= 0

and any mean of planes, with weights theta, is one as well. With the ridge its minimum is known, so
for the layer W that was reached::

    f(W) - min f <= sum_t theta_t (L(W) - L_t - <a_t, W - V_t>)
                    + |2 ridge W + sum_t theta_t a_t|^2 / (4 ridge)

For a single plane at W itself that is ``|grad f(W)|^2 / (2 mu)`` with the strong convexity
mu = 2 ridge; several planes and the best weights can only be better, and the plane 0 keeps it from
ever being more than the loss itself. The weights are found by a quadratic program on the simplex.

Gradients came rounded: an entry of row c of a_t is off by at most ``errors[c]``. The bound holds
for the worst such errors: each inner product grows by ``errors . |W - V_t|``, the length by theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gems_flwr.intersect.refinement import Evaluation, dot
from gems_flwr.intersect.simplex import maximise_on_simplex
from gems_flwr.typing import Float

# Sums in double precision, of the nodes' losses and here.
_ROUNDING = 1e-9


def loss_bound(
    layer: Float, loss: float, history: Sequence[Evaluation], ridge: float, slack: float = 0.0
) -> float:
    """Return an upper bound on how much lower the loss, ridge included, is at the optimum.

    Parameters
    ----------
    layer : array of shape (C, D + 1)
        The layer that was reached.
    loss : float
        Mean loss of the samples there, without the ridge.
    history : sequence of Evaluation
        Where gradients of the same loss, of the same nodes, are known.
    ridge : float
        Above 0.
    slack : float
        By how much `loss` may be too small, at most.
    """
    rise = [
        loss - seen.loss - dot(seen.gradient, layer - seen.layer) + _worst(seen, layer)
        for seen in history
    ]
    linear = np.array([loss, *rise])
    planes = np.array([np.zeros(layer.size), *(seen.gradient.reshape(-1) for seen in history)])
    lengths = np.array([0.0, *(seen.error_length for seen in history)])
    own = 2 * ridge * layer.reshape(-1)

    def value(weights: Float) -> float:
        length = float(np.linalg.norm(own + weights @ planes) + weights @ lengths)
        return float(weights @ linear) + length**2 / (4 * ridge)

    gram = planes @ planes.T / (4 * ridge)
    best, _ = maximise_on_simplex(-linear - planes @ own / (2 * ridge), gram)
    # Any weights give a bound; these ones do not know of the rounding.
    corners = np.eye(len(linear))
    found = min(value(weights) for weights in (best, *corners))
    return float((found + slack) * (1 + _ROUNDING) + _ROUNDING * loss)


def _worst(seen: Evaluation, layer: Float) -> float:
    return float(seen.errors @ np.abs(layer - seen.layer).sum(axis=1))
