"""GEMS layer by layer for neural networks (Guha & Smith 2019, Section 3.2).

Round j: the nodes train the network, the layers below j common and frozen, and send a ball for
every neuron of layer j. The server merges the neurons of all nodes and sends the new layer back.
After the last hidden layer `Gems` plays the output layer: as many rounds as there are layers.

Decided here: nodes keep nothing between rounds. Every message carries the whole network, with
the layers above j at their initial weights (the papers' nodes go on from their own), so a node
that missed a round takes part in the next, and one seed repeats a run. The layer right above a
merged one has other inputs than before and starts again: see `gems_flwr.networks.replace_layer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gems_flwr.carriers import KnownLayers
from gems_flwr.core.round import Carrier, Round
from gems_flwr.core.run import RoundOutcome, ServerState, derive_seed
from gems_flwr.devices import check_device
from gems_flwr.errors import OptionError
from gems_flwr.networks import WeightLayer, neuron_rows, replace_layer, weight_layers
from gems_flwr.neurons import (
    MergedLayer,
    NeuronBalls,
    merge_neurons,
    oversized_layers,
)
from gems_flwr.neurons.question import Neurons
from gems_flwr.spaces.cone.question import Cone
from gems_flwr.spaces.question import SpaceQuestion
from gems_flwr.stages.stage import as_head
from gems_flwr.strategies.averaging import mean_reports
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.loop import RoundLoop
from gems_flwr.typing import Arrays

# ReLU features want less of it than pixels do (chosen on MNIST validation data).
HEAD_RIDGE = 1e-5


@dataclass(kw_only=True, eq=False)
class LayerwiseGems(RoundLoop):
    """Merge the nodes' neurons layer by layer, then intersect their output layers.

    Parameters
    ----------
    neurons : Neurons
        What nodes are asked for of a hidden layer: how much a neuron's output may deviate.
    clusters : int, optional
        m_epsilon: how many clusters k-means looks for before it is verified that a merged neuron
        lies in the balls of those that it stands for; at least 1. A merged layer is then as wide
        as that takes, so handlers, `forward` and ``evaluate_fn`` must take other widths
        (`resize_model`). Left out, a merged layer keeps the width that it has in the initial
        arrays: the app need not know, and the nearest neurons are merged although they do not lie
        in each other's balls.
    head : Gems, Cone, Means, Ball or Ellipsoid, or a word such as "cone"
        How the output layer is found. Of a `Gems` all but the options that this strategy has
        itself count: its space, `head` (the ridge is 1e-5 by default), `refine`, `tune`, `verify`,
        and `robust`, which is about output layers alone.
    device : str, default "cpu"
        Where the server computes; see `gems_flwr.good_enough_mod`.
    **loop
        See `RoundLoop`.

    Examples
    --------
    >>> from gems_flwr import Ball, Gems, LayerwiseGems, Neurons
    >>> head = Gems(space=Ball(epsilon=0.7))
    >>> strategy = LayerwiseGems(neurons=Neurons(epsilon=0.5), clusters=100, head=head)
    """

    needs_classes: ClassVar[bool] = True
    mod_needed: ClassVar[str] = "good_enough_mod(data, model=Net)"

    neurons: Neurons = field(default_factory=Neurons)
    clusters: int | None = None
    head: Gems | SpaceQuestion | str = "cone"
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)
        if not isinstance(self.neurons, Neurons):
            raise OptionError(f"neurons must be Neurons(…), got {self.neurons!r}")
        if self.clusters is not None and self.clusters < 1:
            raise OptionError(f"clusters must be at least 1, or none, got {self.clusters}")
        self._hidden = 0
        self._output = self._gems()

    @property
    def rounds_needed(self) -> int:  # type: ignore[override]
        """As many as the network has layers, and those that refine the last one."""
        return self._hidden + self._output.rounds_needed

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Count the layers of the network."""
        self._hidden = len(weight_layers(initial)) - 1
        given = self.neurons.epsilon
        if isinstance(given, Sequence) and len(given) != self._hidden:
            raise OptionError(
                f"neurons.epsilon has {len(given)} values for {self._hidden} hidden layers"
            )
        self._output = self._gems()
        self._output.take_over(self._hidden + 1)

    def needs_names(self) -> bool:
        """Whether the output layer needs names."""
        return self._output.needs_names()

    def carriers(self) -> Sequence[Carrier]:
        """Return the carrier that sends no node what it has below the output layer."""
        return (KnownLayers(),)

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Merge one hidden layer, or intersect or refine the output layer."""
        if round.number <= self._hidden:
            return self._merge_layer(round, state)
        outcome = self._output.play_round(round, state)
        widths = [layer.width for layer in weight_layers(outcome.arrays)[:-1]]
        return dataclasses.replace(outcome, details={**outcome.details, "hidden": widths})

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Stop when refining the output layer further would not help."""
        return self._output.reason_to_stop(state) if state.round > self._hidden else None

    def _gems(self) -> Gems:
        """Return the strategy of the output layer, with this strategy's own options."""
        given = self.head if isinstance(self.head, Gems) else Gems(space=self.head)
        head = as_head(given.head)
        solves_cones = isinstance(given.question, Cone) and head.name in ("cone", "auto")
        if self._hidden and solves_cones and head.ridge is None:
            head = dataclasses.replace(head, ridge=HEAD_RIDGE)
        shared = {each.name: getattr(self, each.name) for each in dataclasses.fields(RoundLoop)}
        return dataclasses.replace(given, **shared, head=head, device=self.device)

    def _merge_layer(self, round: Round, state: ServerState) -> RoundOutcome:
        index = round.number - 1
        layer = weight_layers(state.arrays)[index]
        balls = self._collect(round, state.arrays, layer)
        merged = merge_neurons(
            list(balls.values()),
            clusters=self.clusters or layer.width,
            width=layer.width if self.clusters is None else None,
            seed=derive_seed(self.seed, "merge", index),
            device=self.device,
        )
        above = derive_seed(self.seed, "above", index)
        arrays = replace_layer(state.arrays, index, merged.weights, seed=above)
        found = [*state.details.get("layers", []), _described(layer, merged, balls)]
        widths = [*state.details.get("hidden", []), len(merged)]
        details: dict[str, Any] = {"layers": found, "hidden": widths}
        reports = [round.reports[node] for node in balls if node in round.reports]
        return RoundOutcome(
            arrays, train_metrics=mean_reports(reports), details=details, memory=state.memory
        )

    def _collect(self, round: Round, arrays: Arrays, layer: WeightLayer) -> dict[str, NeuronBalls]:
        """Ask for the neurons of a layer; leave out those that none could train further."""
        question = self.neurons.of_layer(round.number - 1, (layer.width, layer.dimension))
        balls = round.ask(question, round.sample(self.fraction_train))
        oversized = oversized_layers(list(balls.values()), neuron_rows(arrays, layer))
        names = list(balls)
        reasons = {names[position]: reason for position, reason in oversized.items()}
        return round.leave_out(balls, reasons, at_least=self.min_nodes)


def _described(
    layer: WeightLayer, merged: MergedLayer, balls: Mapping[str, NeuronBalls]
) -> dict[str, Any]:
    """Return what a result reports of one merged layer."""
    names, layers = list(balls), list(balls.values())

    def known(members: Sequence[tuple[int, int]]) -> list[str]:
        return [f"{names[node]}:{neuron}" for node, neuron in members]

    return {
        "layer": layer.name,
        "received": sum(map(len, layers)),
        "merged": len(merged),
        "shared": merged.groups,
        "origins": [known(members) for members in merged.origins],
        "dropped": known(merged.dropped),
        "median_radius": {name: float(np.median(b.radii)) for name, b in balls.items()},
    }
