"""What a node's gradient and losses may be, seen from its own moments.

For softmax losses ``l_i`` with residuals ``r_i = p - e_y``: ``|r_i|^2 <= 2 (1 - p_y)^2 <= 2 l_i``,
since ``(1 - p)^2 <= 1 - p <= -log p``. By Cauchy and Schwarz a node's gradient, the sum of
``a_i r_i x_i^T`` over its samples, has::

    |gradient| <= sqrt(2 * sum_i a_i l_i * sum_i a_i |x_i|^2)

whose second sum is in its moments. The loss of a sample changes by at most ``sqrt(2) |D x_i|`` if
the layer is moved by D, so::

    |loss(V + D) - loss(V)| <= sqrt(2) |D| sum_i a_i |x_i|

Both hold for every honest node, whatever its data; who breaks them lies about its loss, its
gradient or its moments. What remains: a node that lies within them, about classes that it alone
holds, harms others no more than by its share of the samples, which `robust` caps as for cones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from gems_flwr.intersect.pooled_moments import PooledMoments, pool_moments
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.typing import Float

# Moments came rounded, and classes may have been withheld.
_ROOM = 1.5


class Sums(Protocol):
    """What a node says of its loss; see `gems_flwr.wire.gradient_replies`."""

    @property
    def count(self) -> float:
        """How many samples."""
        ...

    @property
    def weight(self) -> float:
        """The sum of their classes' weights."""
        ...

    @property
    def loss(self) -> float:
        """The weighted sum of their losses."""
        ...

    @property
    def gradient(self) -> Float:
        """Its gradient."""
        ...


def screen_gradients(
    sums: Mapping[str, Sums],
    cones: Mapping[str, ClassMomentCone],
    scale: Float,
    class_weights: Float,
) -> dict[str, str]:
    """Return by node why its gradient cannot be what it says.

    Parameters
    ----------
    sums : mapping from str to Sums
        What the nodes sent.
    cones : mapping from str to ClassMomentCone
        Their moments.
    scale : array of shape (D,)
        What inputs are divided by.
    class_weights : array of shape (C,)
        How much a sample of each class counts.
    """
    reasons = {}
    for node, told in sums.items():
        length = input_length(pool_moments([cones[node]]), scale)
        heaviest = float(class_weights.max())
        most = _ROOM * np.sqrt(2 * told.loss * heaviest * told.count) * length
        found = float(np.linalg.norm(told.gradient))
        if found > most:
            reasons[node] = f"its gradient has length {found:.4g}, its loss allows {most:.4g}"
        elif told.weight > _ROOM * heaviest * told.count:
            reasons[node] = f"its samples weigh {told.weight:.4g}, more than {told.count:g} can"
    return reasons


def screen_losses(
    losses: Mapping[str, Float],
    cones: Mapping[str, ClassMomentCone],
    layers: Sequence[Float],
    scale: Float,
    class_weights: Float,
) -> dict[str, str]:
    """Return by node why its losses cannot be what it says.

    Parameters
    ----------
    losses : mapping from str to array of shape (M,)
        At each of the layers, the first of which is the one that all begin with.
    cones, scale, class_weights
        As in `screen_gradients`.
    layers : sequence of arrays of shape (C, D + 1)
        Where.
    """
    moved = np.array([float(np.linalg.norm(layer - layers[0])) for layer in layers])
    reasons = {}
    for node, told in losses.items():
        cone = cones[node]
        length = input_length(pool_moments([cone]), scale)
        count = cone.total_count * float(class_weights.max())
        most = _ROOM * np.sqrt(2) * length * count * moved
        if (np.abs(told - told[0]) > most + 1e-9 * told[0]).any():
            reasons[node] = "its losses change by more than the step can change them"
    return reasons


def input_length(moments: PooledMoments, scale: Float) -> float:
    """Return the root mean square length of scaled inputs with a one appended."""
    squares = np.zeros(len(moments.shares))
    first = len(moments.matrices)
    for entry, matrix in enumerate(moments.matrices):
        within = np.diag(matrix) + moments.means[entry] ** 2
        squares[entry] = (within / scale**2).sum()
    for block in moments.low.blocks():
        rows = slice(first + block.components.start, first + block.components.stop)
        owner = np.repeat(np.arange(len(block.means)), block.present.sum(axis=1))
        squares[rows] = ((block.means**2 + block.variances) / scale**2).sum(axis=1)
        squares[rows] += np.bincount(
            owner, ((block.factors / scale) ** 2).sum(axis=1), minlength=len(block.means)
        )
    return float(np.sqrt(moments.shares @ squares + 1))
