"""An output layer made of the merged neurons' outgoing weights.

Guha 2018, Section 5.2: "the hypothesis space for a neuron consists of both the incoming and
outgoing weights". A merged neuron of the last hidden layer then carries merged outgoing weights,
an unmatched one its own, and together they are the output layer: no further round. Side by side,
with nothing merged, the logits are the sum of the nodes' logits.

Decided here, where the paper is silent: the output layer's bias is the mean of the nodes'. A bias
is the outgoing weight of a neuron that is 1 on every input, and that one all nodes have in common.
(The sum is an option: then layers side by side give the sum of the nodes' logits exactly.)
Among nodes that may lie the median takes the mean's place, class by class, and a bias far longer
than any neuron that the server or most nodes have is refused with the neurons it came with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_NEURON_RATIO
from gems_flwr.errors import OptionError
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.typing import Float

Bias = Literal["mean", "sum"]


@dataclass(frozen=True)
class Outgoing:
    """The output layer is what the last hidden layer's merged neurons feed to it.

    Parameters
    ----------
    bias : {"mean", "sum"}
        What becomes of the nodes' output biases.

    Examples
    --------
    >>> from gems_flwr import LayerwiseGems, Neurons, Outgoing
    >>> strategy = LayerwiseGems(neurons=Neurons(measure="loss", epsilon=0.4), head=Outgoing())
    >>> strategy.neurons.outgoing
    True
    """

    bias: Bias = "mean"

    def __post_init__(self) -> None:
        if self.bias not in get_args(Bias):
            raise OptionError(f"bias must be one of {list(get_args(Bias))}, got {self.bias!r}")


def merged_bias(
    layers: Sequence[NeuronBalls], bias: Bias = "mean", *, robust: bool = False
) -> Float:
    """Return the output layer's bias.

    Parameters
    ----------
    layers : sequence of NeuronBalls
        Every node's neurons, with the bias of the layer above.
    bias : {"mean", "sum"}
        Which of the two.
    robust : bool
        Whether the median of the nodes' stands for the mean.

    Raises
    ------
    ValueError
        If a node's is not there.
    """
    biases = []
    for node, layer in enumerate(layers):
        if layer.bias_above is None:
            raise ValueError(f"node {node}: has no bias of the layer above")
        biases.append(layer.bias_above.astype(np.float64))
    every = np.stack(biases)
    middle = np.median(every, axis=0) if robust else every.mean(axis=0)
    return np.asarray(middle * len(every) if bias == "sum" else middle)


def oversized_biases(layers: Sequence[NeuronBalls], sent: NDArray) -> dict[int, str]:
    """Return which nodes have a bias that is too long, by position, and how long it is.

    Parameters
    ----------
    layers : sequence of NeuronBalls
        Every node's neurons, with or without the bias of the layer above.
    sent : array of shape (L, d)
        The neurons that the server sent out, the unit as in `oversized_layers`.
    """
    lengths = [
        0.0 if layer.bias_above is None else float(np.linalg.norm(layer.bias_above))
        for layer in layers
    ]
    if not lengths:
        return {}
    longest = float(np.linalg.norm(sent.astype(np.float64), axis=1).max())
    limit = MAX_NEURON_RATIO * max(sorted(lengths)[(len(lengths) - 1) // 2], longest)
    return {
        position: f"bias-above: expected a length up to {limit:.4g}, {MAX_NEURON_RATIO:g} times "
        f"what the server or most nodes have, got {length:.4g}"
        for position, length in enumerate(lengths)
        if length > limit
    }
