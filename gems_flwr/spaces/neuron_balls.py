"""One ball for every neuron of a hidden layer, stacked.

Model Aggregation via Good-Enough Model Spaces (2019), Section 3.2: a node's space for hidden
layer j is a list of balls, one per neuron, over the neuron's incoming weights and bias. The 2018
paper adds the outgoing weights. A convolution's filters are neurons whose incoming weights are
the kernel.

Decided here: all balls of a layer travel as one array, a row per neuron: incoming weights, bias
(if the layer has one), outgoing weights (if asked for), radius, importance. The importance
(how much the neuron adds to the layer above, in that layer's units) lets a server with a size
budget drop the right ones; the papers have no such number. Radii are rounded down to float32,
so that what was proved for the radius holds for what arrives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_DIRECTIONS, MAX_WEIGHT
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.checks import check_array, check_integer, check_number, shown, take
from gems_flwr.spaces.radius import METHODS, Method


@dataclasses.dataclass(frozen=True, eq=False)
class NeuronBalls:
    """The balls of all L neurons of one layer.

    Parameters
    ----------
    centers : array of shape (L, d)
        One neuron per row: incoming weights, bias if there is one, outgoing weights if asked for.
    radii : array of shape (L,)
        How far each neuron may move, at least 0.
    importance : array of shape (L,)
        What each neuron adds to the layer above, at least 0; ones if left out.
    method : {"sampled", "worst", "certified", "bisection", "growing"}
        How the radii were found; see `Radius`.
    epsilon : float
        Deviation of a neuron's output that was allowed (epsilon_j of Eq. 3).
    directions : int
        Directions looked at per neuron; 0 if all.
    outgoing : int
        How many of the d columns, at the end, are outgoing weights.
    bias_above : array of shape (O,), optional
        Bias of the layer that the neurons feed, where an output layer is made of them.

    Raises
    ------
    SpaceError
        If an array or a number is malformed.
    """

    centers: NDArray[np.float32]
    radii: NDArray[np.float32]
    method: Method
    epsilon: float = 0.0
    directions: int = 0
    outgoing: int = 0
    importance: NDArray[np.float32] | None = None
    bias_above: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "centers", check_array("centers", self.centers, (None, None)))
        count, width = self.centers.shape
        radii = check_array("radii", self.radii, (count,), dtype=np.float64)
        if radii.min() < 0:
            raise SpaceError("radii", "at least 0", float(radii.min()))
        set_(self, "radii", check_array("radii", _rounded_down(radii), (count,)))
        given = np.ones(count) if self.importance is None else self.importance
        set_(self, "importance", check_array("importance", given, (count,)))
        if self.importance.min() < 0:  # type: ignore[union-attr]
            raise SpaceError("importance", "at least 0", float(self.importance.min()))  # type: ignore[union-attr]
        if self.method not in METHODS:
            raise SpaceError("method", f"one of {METHODS}", shown(self.method))
        set_(self, "epsilon", check_number("epsilon", self.epsilon, 0.0, MAX_WEIGHT))
        set_(self, "directions", check_integer("directions", self.directions, 0, MAX_DIRECTIONS))
        set_(self, "outgoing", check_integer("outgoing", self.outgoing, 0, width - 1))
        if self.bias_above is not None:
            set_(self, "bias_above", check_array("bias_above", self.bias_above, (None,)))

    def __len__(self) -> int:
        return len(self.centers)

    @property
    def dimension(self) -> int:
        """Numbers that make up one neuron."""
        return int(self.centers.shape[1])

    def contains(self, neuron: int, w: NDArray[Any], tolerance: float = 1e-6) -> bool:
        """Return whether a point lies in one neuron's ball, up to single-precision rounding."""
        center = self.centers[neuron].astype(np.float64)
        slack = tolerance * (float(self.radii[neuron]) + float(np.abs(center).max()))
        distance = float(np.linalg.norm(np.asarray(w, dtype=np.float64) - center))
        return distance <= float(self.radii[neuron]) + slack

    def to_array(self) -> NDArray[np.float32]:
        """Return all balls as one array of shape (L, d + 2): centres, radii, importance."""
        assert self.importance is not None
        return np.column_stack([self.centers, self.radii, self.importance])

    def to_meta(self) -> dict[str, Any]:
        """Return the rest as plain numbers and text."""
        names = ("method", "epsilon", "directions", "outgoing")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_array(
        cls,
        array: NDArray[Any],
        meta: Mapping[str, Any],
        bias_above: NDArray[Any] | None = None,
    ) -> NeuronBalls:
        """Build the balls from what `to_array` and `to_meta` returned, checking them again."""
        if array.ndim != 2 or array.shape[1] < 3:
            raise SpaceError("neurons", "shape (neurons, weights + 2)", f"shape {array.shape}")
        return cls(
            centers=array[:, :-2],
            radii=array[:, -2],
            importance=array[:, -1],
            method=take(meta, "method", "neurons"),
            epsilon=take(meta, "epsilon", "neurons"),
            directions=meta.get("directions", 0),
            outgoing=meta.get("outgoing", 0),
            bias_above=bias_above,
        )


def _rounded_down(radii: NDArray[np.float64]) -> NDArray[np.float32]:
    single = radii.astype(np.float32)
    below = np.nextafter(single, np.float32(0))
    return np.where(single.astype(np.float64) > radii, below, single)
