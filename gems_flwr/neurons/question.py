"""Asking for the balls of a hidden layer's neurons (Guha & Smith 2019, Section 3.2, step 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from gems_flwr.bounds import MAX_DIRECTIONS, MAX_WEIGHT
from gems_flwr.core.question import ON_SERVER, Disclosure, Question
from gems_flwr.core.records import checked_array, to_record
from gems_flwr.devices import exact_device
from gems_flwr.errors import BadReplyError, ModelError, OptionError, SpaceError
from gems_flwr.networks import outgoing_rows, read_neuron_inputs, weight_layers
from gems_flwr.neurons.balls import NeuronBalls, NeuronData, neuron_balls

if TYPE_CHECKING:
    from gems_flwr.node import Node

NEURONS = "neurons"
_SINGLE = np.dtype(np.float32)


@dataclass(frozen=True)
class Neurons(Question[NeuronBalls]):
    """How far may each neuron of a hidden layer move, as your validation data see it?

    The node trains first, with the layers below as they are.

    Parameters
    ----------
    epsilon : float or sequence of float, default 0.02
        Deviation of a neuron's output that is allowed (epsilon_j of Eq. 3), above 0; one for all
        hidden layers, or one for each. It allows more per sample the more samples there are.
    directions : int, default 500
        Random directions along which neurons are moved, at least 1.
    max_rows : int, default 20000
        Inputs of the layer (for a convolution: patches) used at most, drawn at random; at
        least 1.
    layer : int, default 0
        Which hidden layer, from 0; `LayerwiseGems` asks for one after the other.

    Examples
    --------
    >>> from gems_flwr import Neurons
    >>> Neurons(epsilon=[0.4, 0.6], directions=100).of_layer(1, (8, 5)).to_json()
    '{"epsilon": 0.6, "directions": 100, "layer": 1}'
    """

    kind: ClassVar[str] = NEURONS
    trains: ClassVar[bool] = True

    epsilon: float | Sequence[float] = 0.02
    directions: int = 500
    max_rows: int = 20000
    layer: int = field(default=0, kw_only=True)
    # Neurons of the layer that was sent out, and numbers that make up one of them.
    shape: tuple[int, int] | None = field(
        default=None, kw_only=True, repr=False, compare=False, metadata=ON_SERVER
    )

    def __post_init__(self) -> None:
        if isinstance(self.epsilon, list):
            object.__setattr__(self, "epsilon", tuple(self.epsilon))
        each = self.epsilon if isinstance(self.epsilon, Sequence) else (self.epsilon,)
        self.check(
            {
                "epsilon": (all(0 < e <= MAX_WEIGHT for e in each), f"in (0, {MAX_WEIGHT:g}]"),
                "directions": (
                    1 <= self.directions <= MAX_DIRECTIONS,
                    f"from 1 to {MAX_DIRECTIONS:,}",
                ),
                "max_rows": (self.max_rows >= 1, "at least 1"),
                "layer": (isinstance(self.layer, int) and self.layer >= 0, "an integer from 0"),
            }
        )

    def of_layer(self, layer: int, shape: tuple[int, int]) -> Self:
        """Return the question about one hidden layer, and what shape its answer must have."""
        own = self.epsilon[layer] if isinstance(self.epsilon, Sequence) else self.epsilon
        return dataclasses.replace(self, epsilon=float(own), layer=layer, shape=shape)

    def discloses(self, node: Node) -> Disclosure:
        """Return that the answer is trained weights, and how far they may move."""
        return Disclosure("radius")

    def answer(self, node: Node) -> RecordDict:
        """Let the handler train; return a row per neuron (`NeuronBalls.to_array`)."""
        if not isinstance(self.epsilon, int | float):
            raise OptionError(f"epsilon must be one for the layer, got {self.epsilon}")
        module, layers = node.module(), weight_layers(node.model)
        if self.layer >= len(layers) - 1:
            raise ModelError(
                f"the server asks for hidden layer {self.layer}, the model has {len(layers) - 1}"
            )
        layer, above = layers[self.layer], layers[self.layer + 1]
        arrays = node.train([key for each in layers[: self.layer] for key in each.keys])
        seed, where = node.seed(NEURONS), exact_device(node.device)
        seen = read_neuron_inputs(
            module,
            arrays,
            self.layer,
            node.data("validation"),
            max_rows=self.max_rows,
            seed=seed,
            activation=node.options.activation,
            device=node.device,
        )
        neurons = NeuronData(
            weight=_tensor(arrays[layer.weight].reshape(layer.width, -1), where),
            bias=None if layer.bias is None else _tensor(arrays[layer.bias], where),
            inputs=seen.rows,
            activation=seen.activation,
        )
        balls = neuron_balls(
            neurons,
            self.epsilon,
            directions=self.directions,
            seed=seed,
            outgoing_norms=_tensor(outgoing_rows(arrays, layer, above), where).norm(dim=1),
        )
        return RecordDict({NEURONS: to_record({NEURONS: balls.to_array()})})

    def read(self, content: RecordDict) -> NeuronBalls:
        """Return the balls of as many neurons as were sent out."""
        assert self.shape is not None, "ask with of_layer, which says what shape to expect"
        record = content.get(NEURONS)
        if not isinstance(record, ArrayRecord) or record.keys() != {NEURONS}:
            raise BadReplyError(f"expected an ArrayRecord '{NEURONS}' with one array '{NEURONS}'")
        width, dimension = self.shape
        array = checked_array(record[NEURONS], NEURONS, (width, dimension + 2), _SINGLE)
        try:
            return NeuronBalls.from_array(array)
        except SpaceError as error:
            raise BadReplyError(str(error)) from error


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(array)).float().to(device)
