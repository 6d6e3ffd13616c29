"""Steps from the cone's layer towards the optimum of the pooled loss, safe by construction.

Round 1 has left class moments, hence a curvature everywhere. Every further round brings the exact
gradient of the true loss at the current layer; the step is that of a quasi-Newton method whose
first matrix is the curvature by moments (`gems_flwr.intersect.loss_curvature`), corrected by the
pairs of steps and differences of gradients that earlier rounds have shown (Nocedal's two-loop
recursion). It is the idea of Jordan, Lee and Yang (2018, *Communication-Efficient Distributed
Statistical Inference*), with moments in place of one node's data: nodes with other labels would
mislead it otherwise.

Nothing is assumed of how good the curvature is. Nodes tell their losses at several points, and the
best is taken only if it is better than where we are; so the loss cannot rise. Points are
``(1 + u) V + t d``: lengths t along the step d, and multiples of the layer V itself, which cost no
bytes and mend a cone that is too sure of itself, or not sure enough.

All arrays are of scaled features, with the bias as the last column: shape (C, D + 1). The ridge is
on the bias, too: then the loss is strongly convex, which `gems_flwr.intersect.loss_bound` needs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from gems_flwr.intersect.loss_curvature import Product, solve
from gems_flwr.typing import Float

RIDGE = 1e-4
DAMPING = 1e-6
# After a round in which no step was any good.
MORE_DAMPING = 100.0
LENGTHS = (4.0, 2.0, 1.5, 1.0, 0.75, 0.5, 0.25)
MULTIPLES = (0.0, -0.2, -0.1, 0.1, 0.2)
# Where the curvature is far off.
SHORT = (1 / 8, 1 / 16, 1 / 64)
# A smaller share of the loss is rounding, also that of storing the layer in single precision.
LEAST_GAIN = 1e-6
# Of deviations of the rounding in a gradient: a pair that bends less may be nothing else.
_NOISE = 4.0


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """What the nodes have said of the loss at one layer.

    Parameters
    ----------
    layer : array of shape (C, D + 1)
        Where.
    loss : float
        Mean loss of the samples, without the ridge.
    gradient : array of shape (C, D + 1)
        Of that.
    errors : array of shape (C,)
        By how much any entry of a row of the gradient may be off, at most.
    nodes : tuple of str
        Whose samples these are. Other nodes' are another loss: neither pairs nor bounds mix them.
    """

    layer: Float
    loss: float
    gradient: Float
    errors: Float
    nodes: tuple[str, ...] = ()

    def full_loss(self, ridge: float) -> float:
        """Return the loss with the ridge."""
        return self.loss + ridge * squared_length(self.layer)

    def full_gradient(self, ridge: float) -> Float:
        """Return the gradient with that of the ridge."""
        return np.asarray(self.gradient + 2 * ridge * self.layer)

    @property
    def error_length(self) -> float:
        """By how much the whole gradient may be off, in length."""
        return float(np.sqrt(self.layer.shape[1] * (self.errors**2).sum()))


@dataclasses.dataclass(frozen=True, eq=False)
class Proposal:
    """A step to be tried.

    Parameters
    ----------
    direction : array of shape (C, D + 1)
        The step of length 1.
    gain : float
        By how much the loss is expected to fall.
    """

    direction: Float
    gain: float


def candidates() -> Float:
    """Return which points are tried: (points, 2), changes of the multiple and lengths.

    The first is where we are. All are compared by the same reply.
    """
    short = ((0.0, length) for length in SHORT)
    return np.array([(0.0, 0.0), *itertools.product(MULTIPLES, LENGTHS), *short])


def points_at(layer: Float, direction: Float, tried: Float) -> list[Float]:
    """Return the layers of some candidates."""
    return [(1 + multiple) * layer + length * direction for multiple, length in tried]


def propose(
    history: Sequence[Evaluation], curvature: Product, ridge: float, damping: float
) -> Proposal:
    """Return the step from where the last evaluation was.

    Parameters
    ----------
    history : sequence of Evaluation
        Of all rounds, in order.
    curvature : callable
        Product with a positive definite estimate of the Hessian there, ridge included.
    ridge : float
        Of the loss.
    damping : float
        Added to the curvature.
    """
    now = history[-1]
    pairs = secant_pairs(history, ridge)
    strength = 1.0
    if pairs:
        step, change = pairs[-1]
        # Where the moments think the loss flatter than the last step has shown.
        strength = max(1.0, dot(step, change) / dot(step, curvature(step)))
    rest, weights = now.full_gradient(ridge), []
    target = rest
    for step, change in reversed(pairs):
        weights.append(dot(step, rest) / dot(step, change))
        rest = rest - weights[-1] * change
    found = solve(lambda v: strength * curvature(v), rest, damping)
    for (step, change), weight in zip(pairs, reversed(weights), strict=True):
        found = found + (weight - dot(change, found) / dot(step, change)) * step
    return Proposal(-found, dot(target, found) / 2)


def secant_pairs(history: Sequence[Evaluation], ridge: float) -> list[tuple[Float, Float]]:
    """Return steps and the differences of gradients that they made, where these say anything."""
    pairs = []
    for before, after in itertools.pairwise(history):
        step = after.layer - before.layer
        change = after.full_gradient(ridge) - before.full_gradient(ridge)
        # Rounding is even over an entry's error, so its deviation is a root of 3 below that.
        rounding = np.hypot(before.errors, after.errors) / np.sqrt(3)
        noise = float(np.sqrt((rounding**2 * (step**2).sum(axis=1)).sum()))
        if before.nodes == after.nodes and dot(step, change) > _NOISE * noise:
            pairs.append((step, change))
    return pairs


def choose(losses: Sequence[float]) -> int:
    """Return which candidate to take; 0, where we are, unless another is better.

    Parameters
    ----------
    losses : sequence of float
        With the ridge; the first is that of where we are.
    """
    best = int(np.argmin(losses))
    return best if losses[0] - losses[best] > LEAST_GAIN * abs(losses[0]) else 0


def damping_after(damping: float, taken: int) -> float:
    """Return the damping of the next round."""
    return max(DAMPING, damping / MORE_DAMPING) if taken else max(1e-4, damping * MORE_DAMPING)


def dot(a: Float, b: Float) -> float:
    """Return the inner product of two layers."""
    return float((a * b).sum())


def squared_length(a: Float) -> float:
    """Return the sum of squares."""
    return float((a * a).sum())
