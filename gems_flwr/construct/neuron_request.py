"""What the server asks a node for about one hidden layer (2019, Section 3.2, step 2)."""

from __future__ import annotations

import dataclasses
from typing import get_args

from gems_flwr.construct.json_request import JsonRequest
from gems_flwr.construct.neuron_data import NeuronMeasure
from gems_flwr.spaces.errors import MAX_WEIGHT
from gems_flwr.spaces.radius import METHODS, Method


@dataclasses.dataclass(frozen=True)
class NeuronRequest(JsonRequest):
    """Which balls a node is to build for the neurons of a hidden layer.

    Parameters
    ----------
    layer : int
        Index of the hidden layer, from 0.
    epsilon : float
        Deviation of a neuron's output that is allowed (epsilon_j of Eq. 3), above 0.
    radius : {"sampled", "worst", "certified", "bisection", "growing"}
        How the radii are found; see `gems_flwr.spaces.Radius`.
    directions : int
        Random directions, for all radii but worst and certified; at least 1.
    measure : {"absolute", "relative"}
        Whether `epsilon` is in units of the outputs, or a share of each neuron's own output.
    outgoing : bool
        Whether the outgoing weights are part of the ball, as in the 2018 paper.
    max_rows : int
        Inputs of the layer (for a convolution: patches) used at most, drawn at random; at
        least 1.
    """

    layer: int
    epsilon: float
    radius: Method = "sampled"
    directions: int = 500
    measure: NeuronMeasure = "absolute"
    outgoing: bool = False
    max_rows: int = 20000

    def __post_init__(self) -> None:
        measures = list(get_args(NeuronMeasure))
        self.check(
            {
                "layer": (isinstance(self.layer, int) and self.layer >= 0, "an integer from 0"),
                "epsilon": (0 < self.epsilon <= MAX_WEIGHT, f"in (0, {MAX_WEIGHT:g}]"),
                "radius": (self.radius in METHODS, f"one of {list(METHODS)}"),
                "directions": (self.directions >= 1, "at least 1"),
                "measure": (self.measure in measures, f"one of {measures}"),
                "max_rows": (self.max_rows >= 1, "at least 1"),
            }
        )
