"""GEMS layer by layer for neural networks (Guha & Smith 2019, Section 3.2; Guha 2018, 4.2).

Round j: the nodes train the network, the layers below j common and frozen, and send a ball for
every neuron of layer j. The server merges the neurons of all nodes and sends the new layer, of
another width, back. After the last hidden layer the output layer is aggregated as in the
one-round case: as many rounds as there are layers.

Decided here: nodes keep nothing between rounds. Every message carries the whole network, with
the layers above j at their initial weights (the papers' nodes go on from their own), so a node
that missed a round, or lost its memory, takes part in the next as if nothing had happened, and
one seed repeats a run. The layer right above a merged one has other inputs than before and
starts anew: see `gems_flwr.networks.layers.replace_layer`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from gems_flwr.averaging.robust_rules import HEAVY
from gems_flwr.errors import OptionError
from gems_flwr.keyword_hints import with_hints
from gems_flwr.networks.backbone import SplitModel
from gems_flwr.networks.inputs import LayerReader
from gems_flwr.networks.layers import (
    WeightLayer,
    neuron_rows,
    outgoing_rows,
    replace_layer,
    weight_layers,
)
from gems_flwr.neuron_merging.budget import Budget
from gems_flwr.neuron_merging.merge_neurons import merge_neurons
from gems_flwr.neuron_merging.merged_layer import MergedLayer, MergeMethod
from gems_flwr.neuron_merging.neuron_scale import oversized_layers
from gems_flwr.neuron_merging.outgoing_head import Outgoing, merged_bias, oversized_biases
from gems_flwr.neuron_merging.screen_neurons import screen_neurons
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.server.client_metrics import mean_reports
from gems_flwr.server.gems_options import NEURON_OPTIONS, moved_options
from gems_flwr.server.public_tuning import TunesOnPublicData
from gems_flwr.server.refine_memory import renamed_state
from gems_flwr.server.refining import reason_to_stop as refined_enough
from gems_flwr.server.round_methods import EvaluateFn
from gems_flwr.server.screening import UNCHECKED_NEURONS, joined, plausible
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.server.width_trial import try_evaluation, try_nodes
from gems_flwr.server.withdrawing import Forgotten, rounds_again
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.strategies.gems import Gems
from gems_flwr.typing import Arrays, Metrics
from gems_flwr.wire.asking import ask_for_neurons
from gems_flwr.wire.handler_metrics import unpack_told
from gems_flwr.wire.keys import TRAIN
from gems_flwr.wire.neuron_replies import unpack_neurons_reply
from gems_flwr.wire.records import to_record
from gems_flwr.wire.requests import NeuronRequest, Neurons
from gems_flwr.wire.space_requests import Centered, Cone, SpaceRequest, as_space_request

# The papers' epsilon for the last layer of a network on MNIST, where the head is but a word.
HEAD_EPSILON = 0.7
# ReLU features want less of it than pixels do (chosen on MNIST validation data).
HEAD_RIDGE = 1e-5
# m_epsilon, where merged layers may have any width.
CLUSTERS = 100
# Where all nodes start from one model, as in Flower's apps, it does a little better at the model's
# own widths than dropping does (chosen on digits validation data).
SAME_BUDGET: Budget = "cluster"
OUTGOING = "outgoing"


@with_hints(moved_options(NEURON_OPTIONS))
@dataclass(kw_only=True, eq=False)
class LayerwiseGems(TunesOnPublicData):
    """Merge the nodes' neurons layer by layer, then intersect their output layers.

    Parameters
    ----------
    merge : {"kmeans", "verified", "pairs", "concat"}
        How neurons are merged: the papers' k-means with intersections inside clusters; one pass
        over all neurons with inner balls; every pair of neurons whose balls meet, as in 2018,
        which can be more than there were; or not at all, all side by side. In every case a
        merged neuron lies in the balls of those that it stands for.
    clusters : int, optional
        m_epsilon: how many clusters `kmeans` looks for, at least 1. By default as many as the
        layer has neurons; 100 where `max_hidden` allows other widths.
    neurons : Neurons
        What nodes are asked for of a hidden layer: how much a neuron's output may deviate, and
        how radii are found.
    max_hidden : "same", int, sequence of int, or None, default "same"
        Size of merged layers. ``"same"``: exactly that of the initial arrays, so that the app's
        module, its `forward` and its ``evaluate_fn`` need not know. Otherwise the most neurons, for
        all hidden layers or for each, or None for no limit: then handlers, `forward` and
        ``evaluate_fn`` must take other widths (`resize_model`), which is tried before round 1.
    budget : {"drop", "cluster"}, optional
        What happens to neurons beyond `max_hidden`: the least important are dropped (the default
        for numbers), or the nearest are merged although they do not lie in each other's balls
        (the default for ``"same"``).
    head : Cone, Ball or Ellipsoid, a Gems, Outgoing, or "cone", "ball", "ellipsoid" or "outgoing"
        Space of the output layer. The words ``"ball"`` and ``"ellipsoid"`` stand for an epsilon
        of 0.7. A `Gems` says, too, what the server does with the spaces: its `epsilon`,
        `select`, `ridge` (by default 1e-5 on hidden layers), `class_weight`, `on_empty`,
        `robust`, `audit`, `layer` and `refine` count; everything else is as in
        this strategy. `Outgoing` is no space: the output layer is made of the outgoing weights of
        the last hidden layer's merged neurons, as in 2018. That saves a round, and asks for
        ``Neurons(outgoing=True)`` in any case.
    verify : bool, default False
        Whether every node is asked how accurate the result is on its own held-out data.
    robust : bool, default False
        Whether each node's neurons are held against those of the others before they are merged
        (see `screen_neurons`), none takes more than twice its share of `max_hidden` for
        itself, and the output layer is `robust` as in `Gems`, unless `head` says otherwise.
    check_widths : bool, default True
        Whether nodes and ``evaluate_fn`` are tried at other widths before round 1, where those can
        come: some bytes for each node.
    **tuning
        See `TunesOnPublicData`. The last layer is tuned as in `Gems`, so a cone's has no rate.

    Examples
    --------
    >>> from gems_flwr import Ball, Gems, LayerwiseGems, Neurons
    >>> strategy = LayerwiseGems(
    ...     merge="verified",
    ...     neurons=Neurons(epsilon=0.5, radius="worst"),
    ...     head=Gems(space=Ball(epsilon=0.6), on_empty="fail"),
    ... )
    >>> strategy.request(0).to_json()
    '{"layer": 0, "epsilon": 0.5, "radius": "worst"}'
    """

    needs_classes: ClassVar[bool] = True
    mod_needed: ClassVar[str] = "good_enough_mod(data, model=Net)"
    sends_models: ClassVar[bool] = False

    merge: MergeMethod = "kmeans"
    clusters: int | None = None
    neurons: Neurons = field(default_factory=Neurons)
    max_hidden: int | Sequence[int] | Literal["same"] | None = "same"
    budget: Budget | None = None
    head: SpaceRequest | Gems | Outgoing | str = "cone"
    verify: bool = False
    robust: bool = False
    check_widths: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.neurons, Neurons):
            raise OptionError(f"neurons must be Neurons(…), got {self.neurons!r}")
        rules = {
            "merge": (self.merge in get_args(MergeMethod), f"one of {get_args(MergeMethod)}"),
            "budget": (self.budget in (None, *get_args(Budget)), f"one of {get_args(Budget)}"),
            "clusters": (self.clusters is None or self.clusters >= 1, "at least 1, or none"),
            "max_hidden": (_is_limit(self.max_hidden), "at least 1, or 'same', or none"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise OptionError(f"{name} must be {allowed}, got {getattr(self, name)!r}")
        # What takes the place of a round for the output layer, if anything does.
        head = Outgoing() if self.head == OUTGOING else self.head
        self._outgoing = head if isinstance(head, Outgoing) else None
        if self._outgoing:
            self._output = Gems()
            self.neurons = dataclasses.replace(self.neurons, outgoing=True)
        else:
            self._output = _as_gems(self.head)
        if self._output.on_empty == "retrain":
            raise OptionError("head.on_empty must not be retrain: the layers below are done")
        if self._output.refine_rounds and self.tune and self.tune_layers == "all":
            raise OptionError(
                "head.refine goes with tune_layers='last': tuning all layers undoes it"
            )
        if self._output.publish_every:
            raise OptionError("head.publish_every must be 0: models of layers are made in rounds")
        if self._output.tune:
            raise OptionError("head.tune must be 0: set tune of LayerwiseGems")
        self._hidden = 0
        self._output_bias = False
        # By id, who cannot take other widths; None until the nodes were asked.
        self._unfit: dict[int, str] | None = None
        self.keep_replies = self.keep_replies and self._head().keep_replies

    @property
    def rounds_needed(self) -> int:  # type: ignore[override]
        """As many as the network has layers, and those that refine the last one.

        Without a round for the output layer one less.
        """
        if self._outgoing:
            return self._hidden
        return self._hidden + 1 + self._output.refine_rounds

    def prepare(self, initial: Arrays, num_rounds: int) -> None:
        """Count the layers of the network."""
        layers = weight_layers(initial)
        self._hidden, self._unfit = len(layers) - 1, None
        self._output_bias = layers[-1].bias is not None
        if self._outgoing and not self._hidden:
            raise OptionError(
                "head='outgoing' makes the output layer of hidden neurons, and the model has none: "
                "use Gems"
            )
        for name, given in (
            ("neurons.epsilon", self.neurons.epsilon),
            ("max_hidden", self.max_hidden),
        ):
            if not isinstance(given, Sequence) or given == "same":
                continue
            if len(given) != self._hidden:
                raise OptionError(
                    f"{name} has {len(given)} values for {self._hidden} hidden layers"
                )

    def request(self, layer: int) -> NeuronRequest:
        """Return what nodes are asked for in the round of a hidden layer."""
        request = self.neurons.in_layer(layer)
        last = self._outgoing is not None and layer == self._hidden - 1
        return dataclasses.replace(request, bias_above=last and self._output_bias)

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Merge one hidden layer, or aggregate or refine the output layer."""
        if server_round == 1 and self._tries_widths:
            self._leave_out_unfit(grid, train_config)
        if server_round <= self._hidden:
            outcome = self._merge_layer(server_round, state, grid, train_config)
            if self._outgoing and server_round == self._hidden:
                return self._finished(server_round, outcome, grid, evaluate_config)
            return outcome
        head = self._head(state.arrays)
        head.take_over(self, self._hidden + 1)
        outcome = head.play_round(server_round, state, grid, train_config, evaluate_config)
        arrays = outcome.arrays
        if self.tune and self.tune_layers == "all":
            arrays = self.tuned(arrays)
        widths = [layer.width for layer in weight_layers(arrays)[:-1]]
        tuned_on = self.tune or outcome.details.get("tuned_on", 0)
        details = {**outcome.details, "hidden": widths, "tuned_on": tuned_on}
        details |= {
            key: joined(state.details.get(key, {}), outcome.details[key])
            for key in ("left_out", "adjusted")
            if key in outcome.details
        }
        return RoundOutcome(
            arrays=arrays,
            train_metrics=outcome.train_metrics,
            details=details,
            memory=outcome.memory,
        )

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Stop when refining the output layer further would not help."""
        if self._output.refine_rounds and (reason := refined_enough(state.details)):
            return reason
        return super().reason_to_stop(state)

    def forget_nodes(self, state: ServerState, names: Sequence[str]) -> Forgotten:
        """Forget the spaces of nodes that have left; merged neurons stay in the layers below."""
        found = super().forget_nodes(state, names)
        if self._exchange.server_round <= self._hidden:
            return found
        head = self._head()
        head.take_over(self, self._hidden + 1)
        of_head = head.forget_nodes(state, names)
        merged = {n for record in state.history[: self._hidden + 1] for n in record.nodes_answered}
        if not merged & set(names):
            return of_head
        note = f"of the layers below the output layer: {found.note}"
        return dataclasses.replace(of_head, complete=False, note=note)

    def rounds_in_all(self, state: ServerState, rounds: int) -> int:
        """Refinement that began anew has all its rounds again."""
        return rounds + rounds_again(state.details)

    def rename_nodes(self, state: ServerState, names: Mapping[str, str]) -> ServerState:
        """Let nodes keep the moments that are refined with under new names."""
        return renamed_state(super().rename_nodes(state, names), names)

    # --- other widths ---------------------------------------------------------------------------

    @property
    def _tries_widths(self) -> bool:
        return self.check_widths and self.max_hidden != "same" and self._hidden > 0

    def check_evaluation(self, initial: Arrays, evaluate_fn: EvaluateFn) -> None:
        """Try the server's own evaluation on arrays of other widths, if those can come."""
        if self._tries_widths:
            try_evaluation(initial, evaluate_fn)

    def _leave_out_unfit(self, grid: Grid, config: ConfigRecord) -> None:
        """Send no network to nodes where it does not run at other widths, if those can come."""
        if self._unfit is None:
            nodes = self.choose_nodes(1, grid, self.fraction_train, TRAIN)
            messages = self.messages(1, nodes, TRAIN, None, config, step="widths")
            self._unfit = try_nodes(self._exchange, messages, self.min_nodes)
        self._exchange.barred = {**self._exchange.barred, **self._unfit}

    # --- a hidden layer -----------------------------------------------------------------------

    def _merge_layer(
        self, server_round: int, state: ServerState, grid: Grid, config: ConfigRecord
    ) -> RoundOutcome:
        index = server_round - 1
        layers = weight_layers(state.arrays)
        layer, above = layers[index], layers[index + 1]
        collected = self._collect_neurons(server_round, grid, state.arrays, layer, above, config)
        balls, reported = collected
        balls, notes = self._screened(balls)
        same, alone = self.max_hidden == "same", None
        budget = layer.width if same else _of_layer(self.max_hidden, index)
        if self.robust and budget is not None:
            alone = math.ceil(HEAVY * budget / len(balls))
        merged = merge_neurons(
            list(balls.values()),
            self.merge,
            clusters=self.clusters or (layer.width if same else CLUSTERS),
            max_neurons=budget,
            exact=same,
            max_alone=alone,
            budget=self.budget or (SAME_BUDGET if same else "drop"),
            seed=derive_seed(self.seed, "merge", index),
            device=self.device,
        )
        merged.verify(list(balls.values()))
        arrays = replace_layer(
            state.arrays,
            index,
            merged.weights[:, : layer.dimension],
            outgoing=merged.weights[:, layer.dimension :] if self.neurons.outgoing else None,
            seed=derive_seed(self.seed, "above", index),
        )
        if self._outgoing and self.request(index).bias_above:
            assert above.bias is not None
            bias = merged_bias(list(balls.values()), self._outgoing.bias, robust=self.robust)
            arrays[above.bias] = bias.astype(arrays[above.bias].dtype)
        told = [*state.details.get("layers", []), _told(layer, merged, balls)]
        widths = [*state.details.get("hidden", []), len(merged)]
        details: dict[str, Any] = {"layers": told, "hidden": widths}
        if self.robust:
            gone = {node: reason for node, reason in notes.items() if node not in balls}
            kept = {node: reason for node, reason in notes.items() if node in balls}
            for key, reasons in (("left_out", gone), ("adjusted", kept)):
                details[key] = joined(state.details.get(key, {}), reasons, f"layer {layer.name}")
            details["unchecked"] = UNCHECKED_NEURONS
        return RoundOutcome(
            arrays=arrays, train_metrics=reported, details=details, memory=state.memory
        )

    def _screened(
        self, balls: dict[str, NeuronBalls]
    ) -> tuple[dict[str, NeuronBalls], dict[str, str]]:
        """Return the nodes' balls that count, and by node what was held against it."""
        if not self.robust:
            return balls, {}
        result = screen_neurons(list(balls.values()))
        return plausible(
            balls, result.layers, result.reasons, at_least=self.min_nodes, what="neurons"
        )

    def _collect_neurons(
        self,
        server_round: int,
        grid: Grid,
        arrays: Arrays,
        layer: WeightLayer,
        above: WeightLayer,
        config: ConfigRecord,
    ) -> tuple[dict[str, NeuronBalls], Metrics]:
        """Ask for neurons; return them by node, and the mean of what the handlers reported."""
        request = self.request(server_round - 1)
        nodes = self.choose_nodes(server_round, grid, self.fraction_train, TRAIN)
        messages = self.messages(server_round, nodes, TRAIN, to_record(arrays), config)
        for message in messages:
            ask_for_neurons(message.content, request)
        sent = neuron_rows(arrays, layer)
        outgoing = 0
        if self.neurons.outgoing:
            sent = np.column_stack([sent, outgoing_rows(arrays, layer, above)])
            outgoing = sent.shape[1] - layer.dimension
        unpack = partial(
            unpack_neurons_reply,
            request=request,
            width=layer.width,
            dimension=layer.dimension + outgoing,
            outgoing=outgoing,
            server_round=server_round,
            above=above.width,
        )
        answers = self.accept(self.collect(messages), partial(unpack_told, unpack=unpack))
        received = [answer.value.value for answer in answers]
        oversized = oversized_biases(received, sent) | oversized_layers(received, sent)
        reasons = {answers[position].node: reason for position, reason in oversized.items()}
        usable = self._exchange.without(answers, reasons, at_least=self.min_nodes)
        balls = {answer.node: answer.value.value for answer in usable}
        return balls, mean_reports(answer.value for answer in usable)

    # --- the output layer ---------------------------------------------------------------------

    def _finished(
        self, server_round: int, outcome: RoundOutcome, grid: Grid, config: ConfigRecord
    ) -> RoundOutcome:
        """Tune and verify a network whose output layer came with the last hidden one."""
        arrays = self.tuned(outcome.arrays)
        details = {**outcome.details, "space": OUTGOING, "tuned_on": self.tune}
        if self.verify:
            head = self._head()
            head.take_over(self, server_round)
            keys = weight_layers(arrays)[-1].keys
            details |= head.verified(server_round, grid, SplitModel.of(arrays, keys), config)
        return dataclasses.replace(outcome, arrays=arrays, details=details)

    def _head(self, arrays: Arrays | None = None) -> Gems:
        """Return the one-round strategy for the output layer; without arrays, to check options."""
        head, options = self._output, dict[str, Any]()
        is_cone = isinstance(head.asked_space, Cone) and head.head in ("cone", "auto")
        if head.ridge is None and self._hidden and is_cone:
            options["ridge"] = HEAD_RIDGE
        if arrays is not None and self.tune and self.tune_layers == "last":
            options |= {"tune": self.tune, "tune_rate": self.tune_rate}
            options["public"] = self._public_inputs(arrays)
        return Gems(
            space=head.asked_space,
            epsilon=head.epsilon,
            select=head.select,
            class_weight=head.class_weight,
            head=head.head,
            prior=head.prior,
            shrinkage=head.shrinkage,
            on_empty=head.on_empty,
            layer=head.layer,
            audit=head.audit,
            refine=head.refine,
            # The merged layers below it are new to everybody.
            backbone="send",
            verify=self.verify or head.verify,
            robust=self.robust if head.robust is None else head.robust,
            seed=self.seed,
            min_nodes=self.min_nodes,
            fraction_train=self.fraction_train,
            checkpoint_dir=self.checkpoint_dir,
            max_examples=self.max_examples,
            device=self.device,
            **({"ridge": head.ridge} | options),
        )

    def _public_inputs(self, arrays: Arrays) -> tuple[NDArray, NDArray]:
        """Return what the output layer sees of the public sample."""
        data = self.public_sample()
        assert self.build_model is not None
        reader = LayerReader(arrays, self.build_model(), device=self.device)
        seen = reader.read(data, reader.output_layer(data))
        return seen.inputs.cpu().numpy(), seen.labels.cpu().numpy()


def _as_gems(head: SpaceRequest | Gems | Outgoing | str) -> Gems:
    """Return the strategy of the output layer that a space or its name stands for."""
    if isinstance(head, Gems):
        return head
    assert not isinstance(head, Outgoing)
    space = as_space_request(head)
    if isinstance(head, str) and isinstance(space, Centered):
        space = dataclasses.replace(space, epsilon=HEAD_EPSILON)
    return Gems(space=space)


def _told(
    layer: WeightLayer, merged: MergedLayer, balls: Mapping[str, NeuronBalls]
) -> dict[str, Any]:
    """Return what a result says of one merged layer."""
    names, layers = list(balls), list(balls.values())

    def known(members: Sequence[tuple[int, int]]) -> list[str]:
        return [f"{names[node]}:{neuron}" for node, neuron in members]

    return {
        "layer": layer.name,
        "method": merged.method,
        "received": sum(len(balls) for balls in layers),
        "merged": len(merged),
        "shared": merged.groups,
        "origins": [known(members) for members in merged.origins],
        "dropped": known(merged.dropped),
        "uncovered": known(merged.uncovered(layers)),
        "median_radius": {n: float(np.median(b.radii)) for n, b in zip(names, layers, strict=True)},
    }


def _is_limit(value: Any) -> bool:
    if value is None or value == "same":
        return True
    if isinstance(value, str):
        return False
    return min(value if isinstance(value, Sequence) else [value], default=1) >= 1


def _of_layer(value: Any, layer: int) -> Any:
    return value[layer] if isinstance(value, Sequence) else value
