"""Which nodes' neurons are too long to be merged with those of the others.

`oversized_layers` refuses neurons so long that no node could train the layer above: longer than
`MAX_NEURON_RATIO` times the longest that the server sent out, or that most nodes have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_NEURON_RATIO
from gems_flwr.neurons.balls import NeuronBalls
from gems_flwr.typing import Float


def oversized_layers(layers: Sequence[NeuronBalls], sent: NDArray) -> dict[int, str]:
    """Return which nodes, by position, have neurons too long beside those sent out, and why."""
    if not layers:
        return {}
    longest = [float(_lengths(layer.centers).max()) for layer in layers]
    usual = sorted(longest)[(len(longest) - 1) // 2]
    limit = MAX_NEURON_RATIO * max(usual, float(_lengths(sent).max()))
    return {
        position: f"neurons: expected lengths up to {limit:.4g}, {MAX_NEURON_RATIO:g} times what "
        f"the server or most nodes have, got {length:.4g}"
        for position, length in enumerate(longest)
        if length > limit
    }


def _lengths(rows: NDArray) -> Float:
    return np.asarray(np.linalg.norm(rows.astype(np.float64), axis=1))
