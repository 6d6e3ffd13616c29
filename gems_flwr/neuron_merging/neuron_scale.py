"""Neurons too long to be anybody's: refused before they are merged with the others'.

A hidden layer's merged neurons compute the inputs of the next layer on every node. One neuron with
weights of a million makes those inputs so large that no node can train, or describe, the layer
above: a single sender would end the run for all.

Decided here: a neuron's length counts in units of the longest that the server sent out for this
layer, or of what most nodes have (the lower median over the nodes of each one's longest), whichever
is larger. So neither a model that is large by itself nor a layer that grows in training is refused,
and no minority of nodes can have the others refused. Radii and importance are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_NEURON_RATIO
from gems_flwr.spaces.neuron_balls import NeuronBalls


def oversized_layers(layers: Sequence[NeuronBalls], sent: NDArray) -> dict[int, str]:
    """Return which nodes have a neuron that is too long, by position, and how long it is.

    Parameters
    ----------
    layers : sequence of NeuronBalls
        Every node's neurons of one layer.
    sent : array of shape (L, d)
        The neurons that the server sent out, as rows like the centres.
    """
    if not layers:
        return {}
    longest = [_longest(layer.centers) for layer in layers]
    usual = sorted(longest)[(len(longest) - 1) // 2]
    limit = MAX_NEURON_RATIO * max(usual, _longest(sent))
    return {
        position: f"neurons: expected lengths up to {limit:.4g}, {MAX_NEURON_RATIO:g} times what "
        f"the server or most nodes have, got {length:.4g}"
        for position, length in enumerate(longest)
        if length > limit
    }


def _longest(rows: NDArray) -> float:
    return float(np.linalg.norm(rows.astype(np.float64), axis=1).max())
