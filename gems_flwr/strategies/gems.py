"""Good-Enough Model Spaces in one round (Guha & Smith 2019, Section 3.1; Guha 2018).

Every node computes the set of output layers that are good enough on its own data and sends it
once; the server intersects the sets. Beyond the papers: class-moment cones, which close the gap
to pooled data in the same round; radii that say how honest they are; a verdict on the
intersection with a proof; and a verification round that tells for whom the model is good enough.

Decided here: one round is about the linear output layer. The layers below it, if there are any,
are common to all nodes and stay as the server sent them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from gems_flwr.errors import DiskError, RoundFailedError
from gems_flwr.intersect.aggregate import (
    Aggregate,
    Spaces,
    aggregate_spaces,
    intersection_details,
    left_out_details,
)
from gems_flwr.intersect.audit import audit_nodes
from gems_flwr.intersect.cone_objective import ConeOptions
from gems_flwr.intersect.moment_heads import Head, HeadOptions, Prior
from gems_flwr.intersect.screen_spaces import screen_spaces
from gems_flwr.keyword_hints import with_hints
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.moments.cone_building import MIN_COUNT, cone_from_sums
from gems_flwr.moments.small_means import MeanRule
from gems_flwr.networks.backbone import SplitModel
from gems_flwr.networks.layers import layers_below_output
from gems_flwr.receipts import samples_of
from gems_flwr.samples import Samples
from gems_flwr.secure.kept_total import save_total
from gems_flwr.server.backbone_sending import BackboneMode, BackboneSender
from gems_flwr.server.client_metrics import mean_reports
from gems_flwr.server.gems_options import (
    SPACE_OPTIONS,
    check_gems_options,
    moved_options,
)
from gems_flwr.server.head_choice import (
    HeadChoice,
    check_head_options,
    warn_of_missing,
)
from gems_flwr.server.log import log_warning
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.public_tuning import check_tuning, first_samples
from gems_flwr.server.publishing import Publisher, check_publishing
from gems_flwr.server.refine_memory import RefineMemory, renamed_state
from gems_flwr.server.refine_memory import others as without_refinement
from gems_flwr.server.refine_options import Refine, as_refine
from gems_flwr.server.refining import RefineOptions, RefineRound
from gems_flwr.server.refining import reason_to_stop as refined_enough
from gems_flwr.server.screening import plausible, unchecked_details
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.server.summed_counts import count_sections, counts_of, score_of
from gems_flwr.server.summed_exchange import SummedExchange
from gems_flwr.server.summed_moments import MomentExchanges, SummedMoments
from gems_flwr.server.summed_refining import SummedRefineRound
from gems_flwr.server.withdrawing import (
    Forgotten,
    HeldSpaces,
    check_enough,
    forget_spaces,
    held_spaces,
    not_forgotten,
    refined_anew,
    rounds_again,
)
from gems_flwr.spaces.ball import with_new_ball
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.curved_space import CurvedSpace, without_curve
from gems_flwr.spaces.output_layer import OutputLayer, find_output_layer
from gems_flwr.spaces.space_files import Space, SpaceFolder
from gems_flwr.typing import Arrays, Metrics
from gems_flwr.wire.asking import ask_for_score, ask_for_space, freeze_below
from gems_flwr.wire.choice_messages import Counts, ask_for_choice, unpack_choice_reply
from gems_flwr.wire.handler_metrics import unpack_told
from gems_flwr.wire.keys import EVALUATE, TRAIN
from gems_flwr.wire.space_replies import NodeSpace, unpack_score_reply, unpack_space_reply
from gems_flwr.wire.space_requests import Centered, Cone, SpaceRequest, as_space_request


@with_hints(moved_options(SPACE_OPTIONS))
@dataclass(kw_only=True, eq=False)
class Gems(RoundLoop):
    """Intersect the nodes' good-enough spaces.

    Parameters
    ----------
    space : Cone, Means, Ball or Ellipsoid, or "cone", "means", "ball" or "ellipsoid"
        What nodes are asked for; a word stands for the space with its defaults. Class moments,
        or the papers' balls and ellipsoids.
    epsilon : "auto", or mapping from node name to float, optional
        What is good enough, where not one number of the space's holds for all nodes: ``"auto"``
        takes the largest at which all balls or ellipsoids meet; a mapping has numbers for some
        nodes, in place of the space's.
    select : {"first", "margin", "objective"}, optional
        Which point of the intersection; see `gems_flwr.intersect.intersect`. By default the
        smallest loss for cones, else the first on the way from the average.
    ridge : float, optional
        Ridge of the cone objective, at least 0; by default that of the form of the moments. For
        ``head="ridge"`` in units of the mean variance of a feature, 0.01 by default.
    class_weight : {"counts", "balanced"}
        Whether a class counts by its samples, or all the same: in the cone objective, in the loss
        that is refined, and in what ``head="auto"`` chooses by (balanced accuracy then).
    head : {"cone", "ridge", "lda", "nearest_mean", "auto"}
        What is made of class moments: the layer of the cone objective, or a closed form of others;
        see `gems_flwr.intersect.moment_heads`. ``auto`` sends all of them to the nodes in one more
        exchange, whose held-out data choose. (``qda`` is no linear layer and is refused.)
    prior : "counts", "uniform" or float in [0, 1], default "counts"
        How likely a class is for ridge and lda: by its samples, all the same, or samples to that
        power. For cones there is `class_weight`.
    shrinkage : float, optional
        Of lda's covariance towards a round one, in [0, 1]; 0.05 by default.
    on_empty : {"least", "relax", "retrain", "subset", "fail"}
        If the spaces do not meet: take the least violating point; lower epsilon until they do;
        let the nodes train again from new initial weights, up to `retrains` times, and add the
        new balls to their sets (2018); leave out as few nodes as possible (balls, ellipsoids);
        or fail. ``retrain`` needs `Ball`.
    retrains : int, default 3
        Further rounds that ``retrain`` may take.
    initialise : callable, optional
        Gets the round, returns new initial arrays; needed for ``retrain``.
    tune : int, default 0
        How many public samples to fine-tune on; 0 for none.
    tune_rate : float, default 0.001
        Adam's rate for balls and ellipsoids, above 0; the released code has 0.01.
    public : pair of arrays, optional
        Public inputs of the output layer, and their classes; needed for `tune`.
    verify : bool, default False
        Whether every node is asked how accurate the result is on its own held-out data; with a
        `Cone` of sums and a sketch, all together (`details["score"]`).
    robust : bool, optional
        Whether each node's space is held against those of the others before it counts; see
        `intersect.screen_spaces`. Who is left out, or counts for less, is in the details, and
        which classes too few nodes hold for a lie about them to be noticed. By default not, and
        as the head of a `LayerwiseGems` if that one is.
    audit : bool, default False
        Whether the nodes' scores may convict a node, for cones: the server aggregates without
        each in turn and asks the others what they gain; see `gems_flwr.intersect.audit`. It costs a
        model down to every node for each suspect, and again after each conviction.
    layer : str, optional
        Name of the linear output layer, where it is not the last matrix of the model.
    refine : int or Refine, default 0
        Further rounds, for cones, in which nodes send the gradient of their training loss and the
        server steps towards the pooled optimum; see `gems_flwr.server.refining`. The loss falls
        in each or the layer stays; `details` have ``loss``, ``gradient_norm`` and ``loss_bound``:
        how much lower the pooled optimum can be, at most.
    backbone : {"auto", "send", "local"}
        Who is sent the layers below the output layer. Nodes whose own `model` has them, as a
        digest tells, are not, unless they take less than a megabyte: those come along with the
        first message (``auto``). ``send`` has them come along whatever their size, which saves
        an exchange where no node has them; ``local`` sends them to nobody, and a node that has
        others is left out, by name.
    **loop
        See `RoundLoop`. With a `checkpoint_dir` the received spaces are kept in its folder
        ``spaces``, where ``python -m gems_flwr aggregate`` can add a late one.

    Examples
    --------
    >>> from gems_flwr import Ball, Cone, Gems
    >>> Gems(space=Cone(rank=20, clusters=8), verify=True).request().to_json()
    '{"rank": 20, "clusters": 8}'
    >>> Gems(space=Ball(radius="worst"), epsilon={"north": 0.8}).request("north").epsilon
    0.8
    >>> Gems(space="ball", epsilon=0.6)
    Traceback (most recent call last):
        ...
    gems_flwr.errors.OptionError: an epsilon for all nodes is the space's: space=Ball(epsilon=0.6)
    """

    needs_classes: ClassVar[bool] = True
    mod_needed: ClassVar[str] = "good_enough_mod(data, model=Net)"
    sends_models: ClassVar[bool] = False
    sums_replies: ClassVar[bool] = True
    publishes: ClassVar[bool] = True
    # Four of moments, the choice of a head, and the nodes' verdict.
    sums_in_round: ClassVar[int] = 6

    space: SpaceRequest | str = "cone"
    epsilon: str | Mapping[str, float] | None = None
    select: Literal["first", "margin", "objective"] | None = None
    ridge: float | None = None
    class_weight: Literal["counts", "balanced"] = "counts"
    head: Head = "cone"
    prior: Prior = "counts"
    shrinkage: float | None = None
    on_empty: Literal["least", "relax", "retrain", "subset", "fail"] = "least"
    retrains: int = 3
    initialise: Callable[[int], Arrays] | None = None
    tune: int = 0
    tune_rate: float = 1e-3
    public: tuple[NDArray, NDArray] | None = None
    verify: bool = False
    robust: bool | None = None
    audit: bool = False
    layer: str | None = None
    refine: Refine | int = 0
    backbone: BackboneMode = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._space = as_space_request(self.space)
        if isinstance(self.epsilon, Mapping):
            # Names are text, though YAML reads the name 0 as a number.
            self.epsilon = {str(node): value for node, value in self.epsilon.items()}
        check_gems_options(self, self._space)
        # Of sums nothing but the total is anybody's business: single ones are never written.
        self.keep_replies = self.keep_replies and not self._space.is_summed
        check_tuning(self.tune, self.tune_rate, self.public)
        self._cone_options = ConeOptions(
            ridge=self.ridge, class_weight=self.class_weight, device=self.device
        )
        self._head = HeadOptions(self.head, self.prior, self.shrinkage, self.ridge, self.device)
        check_head_options(self._head, self._space, tune=self.tune, select=self.select)
        for node in self.epsilon if isinstance(self.epsilon, Mapping) else [""]:
            self.request(node)
        check_publishing(
            self.publish_every,
            hidden=self._space.is_summed,
            asks_more=self.audit or self.head == "auto" or self.on_empty == "retrain",
            fraction=self.fraction_train,
        )
        self._publisher = Publisher(
            self.publish_every, self.min_nodes, self.checkpoint_dir, self.callbacks
        )
        self._spaces = SpaceFolder(self._folder() if self.checkpoint_dir else None)
        self._received: dict[str, NodeSpace] = {}
        self._first_round = 1
        self._unchecked: tuple[int, ...] | None = None
        again = self.verify or self.audit or self.on_empty == "retrain" or self.refine_rounds > 0
        self._backbones = BackboneSender(self.backbone, keep=again or self.head == "auto")

    @property
    def asked_space(self) -> SpaceRequest:
        """What nodes are asked for, with the epsilon of all nodes."""
        return self._space

    @property
    def refine_rounds(self) -> int:
        """How many rounds of refinement there are at most."""
        return as_refine(self.refine).rounds

    @property
    def rounds_needed(self) -> int:  # type: ignore[override]
        """One, and as many more as retraining or refining may take."""
        return 1 + (self.retrains if self.on_empty == "retrain" else self.refine_rounds)

    def request(self, node: str = "") -> SpaceRequest:
        """Return what a node is asked for."""
        asked: dict[str, Any] = {}
        if isinstance(self.epsilon, Mapping) and node in self.epsilon:
            asked["epsilon"] = float(self.epsilon[node])
        elif self.epsilon == "auto":
            # Any that every centre meets; the curve tells the rest.
            asked["epsilon"] = 1e-6
        if isinstance(self._space, Centered) and (
            self.epsilon == "auto" or self.on_empty == "relax"
        ):
            asked["curve"] = True
        return dataclasses.replace(self._space, **asked)

    # --- the round ----------------------------------------------------------------------------

    def play_round(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Collect the spaces, intersect them, and let the nodes verify the result."""
        layer = find_output_layer(state.arrays, self.layer)
        start = state.arrays
        self._publisher.begin()
        anew = self._exchange.held is not None
        if self.refine_rounds and server_round > self._first_round and not anew:
            return self._refined(server_round, state, grid, layer, train_config, evaluate_config)
        if server_round > self._first_round and self.initialise is not None:
            start = self.initialise(server_round)
        summed: SummedMoments | None = None
        received: dict[str, NodeSpace] = {}
        told: Metrics = {}
        if isinstance(self._space, Cone) and self._adds_up:
            summed = self._summed(server_round, grid, start, layer, self._space, train_config)
            usable: dict[str, Space | CurvedSpace] = {"all nodes": summed.cone}
            notes: dict[str, str] = {}
        else:
            received, told = self._collect(server_round, grid, start, layer, train_config)
            check_enough(self._exchange, received, self.min_nodes)
            usable, notes = self._screened(self._usable_spaces(received))
        found, spaces, convicted = self._audited(
            usable,
            lambda candidate, step: self._scores(
                server_round,
                grid,
                SplitModel.of(layer.replace_in(start, candidate), layer.keys),
                evaluate_config,
                step,
            ),
        )
        chosen: dict[str, Any] = {"head": self.head, **self._unusual()}
        if self.head == "auto":
            found, decided = self._chosen(server_round, grid, found, spaces, start, evaluate_config)
            chosen |= decided
        arrays = layer.replace_in(start, found.point)
        self._publisher.publish(self._exchange, arrays, list(spaces))
        chosen |= self._publisher.details(state.details)
        if self.refine_rounds:
            chosen |= refined_anew(state, server_round, self._first_round)
        done = server_round == self._last_round({**state.details, **chosen}) or (
            found.intersection.feasible and not self.refine_rounds
        )
        verified: dict[str, Any] = {}
        if done and self.verify:
            model = SplitModel.of(arrays, layer.keys)
            verified = self.verified(server_round, grid, model, evaluate_config)
        scores = verified.get("node_scores", {})
        details = intersection_details(self._space.kind, found, spaces, scores) | verified
        details |= {} if summed is None else summed.details
        details |= left_out_details(found, spaces, notes, convicted) | chosen
        warn_of_missing(server_round, details)
        if self.robust:
            details |= unchecked_details(self._unchecked)
        # Only now: a round that fails leaves everything as it was.
        self._keep(received, afresh=server_round == self._first_round)
        memory = {**state.memory, **self._to_refine(received, spaces, summed)}
        return RoundOutcome(arrays=arrays, train_metrics=told, details=details, memory=memory)

    def _unusual(self) -> dict[str, Any]:
        """Return options that change the layer and that no file of spaces tells."""
        said = {
            "class_weight": (self.class_weight, "counts"),
            "max_examples": (self.max_examples, None),
        }
        return {name: value for name, (value, usual) in said.items() if value != usual}

    def _summed(
        self,
        server_round: int,
        grid: Grid,
        arrays: Arrays,
        layer: OutputLayer,
        space: Cone,
        config: ConfigRecord,
    ) -> SummedMoments:
        """Find the moments of all nodes together, in sums over nodes."""
        nodes = self.choose_nodes(server_round, grid, self.fraction_train, TRAIN)
        model = SplitModel.of(arrays, layer.keys)
        exchanges = MomentExchanges(self._to_sum(server_round, model, config), layer, space)
        if space.is_sketched:
            return exchanges.play(nodes)
        summed, total = exchanges.play_full(nodes)
        if self.checkpoint_dir is not None:
            # What nodes that leave take their share out of: `gems-flwr aggregate --total`.
            save_total(Path(self.checkpoint_dir) / "total.safetensors", total)
        return summed

    @property
    def _adds_up(self) -> bool:
        """Whether all that the server sees of the nodes are totals of whole numbers."""
        return self._space.is_sketched or (self._space.is_summed and self.secure is not None)

    def _to_sum(self, server_round: int, model: SplitModel, config: ConfigRecord) -> SummedExchange:
        return SummedExchange(self, self.sums, self._backbones, server_round, model, config)

    def _refined(
        self,
        server_round: int,
        state: ServerState,
        grid: Grid,
        layer: OutputLayer,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> RoundOutcome:
        """Step towards the optimum of the pooled loss."""
        options = RefineOptions(
            how=as_refine(self.refine),
            class_weight=self.class_weight,
            robust=bool(self.robust),
            public=self._public(),
            device=self.device,
        )
        memory = RefineMemory.of(state.memory).without_members(self._nodes.names_of_leavers)
        about = (self, self._backbones, options, memory, state.arrays, layer)
        this = RefineRound(*about)
        if isinstance(self._space, Cone) and self._adds_up:
            this = SummedRefineRound(
                self.sums, None if self.secure else self._space.min_count, *about
            )
        found = this.play(server_round, grid, train_config, state.details.get("refinement", []))
        self._publisher.publish(self._exchange, found.arrays, memory.members)
        details = {**found.details, **self._publisher.details(state.details)}
        last = self._last_round(state.details)
        if self.verify and (server_round == last or refined_enough(details)):
            model = SplitModel.of(found.arrays, layer.keys)
            details |= self.verified(server_round, grid, model, evaluate_config)
        kept = {**without_refinement(state.memory), **found.memory.to_arrays()}
        return RoundOutcome(arrays=found.arrays, details=details, memory=kept)

    def _to_refine(
        self, received: Mapping[str, NodeSpace], spaces: Spaces, summed: SummedMoments | None
    ) -> dict[str, NDArray]:
        """Return what rounds of refinement have to know of the first one."""
        if not self.refine_rounds:
            return {}
        cones = {n: cone for n, cone in spaces.items() if isinstance(cone, ClassMomentCone)}
        if summed is not None:
            return RefineMemory(cones, summed.nodes, standard=summed.standard).to_arrays()
        members = tuple(received) if self._space.is_summed else tuple(cones)
        if self.robust:
            # Who was found to lie about a class would have its gradient, too.
            members = tuple(n for n in members if _is_whole(cones[n], received[n]))
        return RefineMemory(cones, members).to_arrays()

    def _aggregate(self, spaces: Spaces) -> Aggregate:
        return aggregate_spaces(
            list(spaces.values()),
            select=self.select,
            auto_epsilon=self.epsilon == "auto",
            on_empty=self.on_empty,
            cone_options=self._cone_options,
            public=self._public(),
            rate=self.tune_rate,
            seed=self.seed,
            head=self._head,
        )

    def _chosen(
        self,
        server_round: int,
        grid: Grid,
        found: Aggregate,
        spaces: Spaces,
        start: Arrays,
        config: ConfigRecord,
    ) -> tuple[Aggregate, dict[str, Any]]:
        """Let the nodes' held-out data choose among the heads."""
        layer = find_output_layer(start, self.layer)
        cones = [space for space in spaces.values() if isinstance(space, ClassMomentCone)]
        cone = found.intersection
        choice = HeadChoice.among(cones, cone, self._head, self._cone_options, self._space.score)
        models = [
            SplitModel.of(layer.replace_in(start, each.point), layer.keys)
            for each in choice.candidates.values()
        ]

        def ask(content: RecordDict) -> None:
            ask_for_choice(content, choice.request, [model.head for model in models])

        def unpack(content: RecordDict) -> Counts:
            self._backbones.refuse_lacking(content, layer.weight)
            return unpack_choice_reply(content, choice.request, layer.num_classes)

        nodes = self.choose_nodes(server_round, grid, 1.0, EVALUATE)
        if self._adds_up:
            groups = layer.num_classes if choice.request.by_class else 1
            sections = count_sections(len(models), groups)
            exchange = self._to_sum(server_round, models[0], config)
            total = exchange.total(nodes, ask, sections, "choice")
            return choice.decided({"all nodes": counts_of(total)} if total else {}, found, None)
        replies = self._backbones.collect(
            self, server_round, nodes, models[0], config, lambda m: ask(m.content), "choice"
        )
        counts = {answer.node: answer.value for answer in self.accept(replies, unpack)}
        return choice.decided(counts, found, self.max_examples)

    def _audited(
        self, spaces: Spaces, scores: Callable[[NDArray, str], dict[str, float]]
    ) -> tuple[Aggregate, Spaces, Mapping[str, float]]:
        """Aggregate, with `audit` without those whom the others' scores convict.

        Parameters
        ----------
        spaces : mapping from str to space
            By node.
        scores : callable
            Gets a flat layer and the name of the exchange, returns each node's accuracy.

        Returns
        -------
        tuple
            The aggregate, the spaces that are in it, and what the others gain without a node.
        """
        if not self.audit:
            return self._aggregate(spaces), spaces, {}
        asked = itertools.count(1)
        verdict = audit_nodes(
            list(spaces),
            lambda names: self._aggregate({name: spaces[name] for name in names}),
            lambda candidate: scores(candidate.point, f"audit-{next(asked)}"),
            at_least=self.min_nodes,
        )
        kept = {name: spaces[name] for name in verdict.nodes}
        return verdict.model, kept, verdict.convicted

    def take_over(self, other: RoundLoop, first_round: int) -> None:
        """Play on in the middle of another strategy's run."""
        self.join(other)
        self._first_round = first_round

    def rename_nodes(self, state: ServerState, names: Mapping[str, str]) -> ServerState:
        """Let nodes keep the spaces that they have sent under new names."""
        received = self._received or dict(self._spaces.load())
        self._received = {names.get(node, node): space for node, space in received.items()}
        if not self._space.is_summed:
            self._spaces.clear()
            self._spaces.save({n: without_curve(space) for n, space in self._received.items()})
        return renamed_state(state, names)

    def forget_nodes(self, state: ServerState, names: Sequence[str]) -> Forgotten:
        """Forget the spaces of nodes that have left."""
        if self._adds_up:
            return not_forgotten(state, self._exchange, names, only_totals=True)
        return forget_spaces(state, self._exchange, self._spaces, self._received, names)

    def contributors(self, state: ServerState) -> dict[str, int | None]:
        """Return whose spaces the model is made of, and their samples."""
        if self._adds_up:
            return super().contributors(state)
        return _samples(self._received)

    def told_examples(self) -> dict[str, int | None]:
        """Return how many samples are behind the spaces that nodes sent."""
        if self._adds_up:
            return super().told_examples()
        return {**super().told_examples(), **_samples(self._received or self._spaces.load())}

    def rounds_in_all(self, state: ServerState, rounds: int) -> int:
        """Refinement that began anew has all its rounds again."""
        return rounds + rounds_again(state.details)

    def _last_round(self, details: Mapping[str, Any]) -> int:
        return self._first_round + self.rounds_needed - 1 + rounds_again(details)

    def needs_names(self) -> bool:
        """Whether names must be known first: for an epsilon of each, or to refine by sums.

        Who is in a sum cannot be left out afterwards.
        """
        refined = self._adds_up and self.refine_rounds > 0
        return isinstance(self.epsilon, Mapping) or refined

    def reason_to_stop(self, state: ServerState) -> str | None:
        """Stop as soon as the spaces meet."""
        if self.on_empty == "retrain" and state.details.get("status") == "feasible":
            return "the spaces meet"
        if self.refine_rounds and (reason := refined_enough(state.details)):
            return reason
        return super().reason_to_stop(state)

    def _collect(
        self,
        server_round: int,
        grid: Grid,
        arrays: Arrays,
        layer: OutputLayer,
        config: ConfigRecord,
    ) -> tuple[dict[str, NodeSpace], Metrics]:
        """Ask the nodes for their spaces.

        Returns
        -------
        tuple
            What is usable, with what was received before, by node; and the mean of what the train
            handlers reported, where spaces need training.
        """
        if (held := held_spaces(self._exchange)) is not None:
            return dict(held.received), mean_reports(held.told.values())
        nodes = self.choose_nodes(server_round, grid, self.fraction_train, TRAIN)
        frozen = layers_below_output(arrays)

        def ask(message: Message) -> None:
            ask_for_space(message.content, self.request(self._name_of(message)))
            freeze_below(message.content, frozen)

        def unpack_space(content: RecordDict) -> NodeSpace:
            self._backbones.refuse_lacking(content, layer.weight)
            return unpack_space_reply(content, self.request(), layer)

        model = SplitModel.of(arrays, layer.keys)

        def made(spaces: dict[str, NodeSpace]) -> Arrays:
            usable, _ = self._screened(self._usable_spaces(spaces))
            return layer.replace_in(arrays, self._aggregate(usable).point)

        with self._publisher.listening(self._exchange, unpack_space, made):
            replies = self._backbones.collect(self, server_round, nodes, model, config, ask)
            asked, step = set(nodes), 0
            while late := self._late(server_round, grid, asked):
                asked, step = asked | set(late), step + 1
                replies += self._backbones.collect(
                    self, server_round, late, model, config, ask, f"late-{step}"
                )
        unpack = partial(unpack_told, unpack=unpack_space)
        answers = self.accept(replies, unpack, at_least=self.min_nodes)
        received: dict[str, NodeSpace] = {}
        if server_round > self._first_round:
            # A resumed run: what earlier rounds received lies in the folder.
            received = dict(self._received or self._spaces.load())
        for answer in answers:
            received[answer.node] = with_new_ball(received.get(answer.node), answer.value.value)
        told = {answer.node: answer.value for answer in answers}
        self._exchange.held = HeldSpaces(dict(received), told)
        return received, mean_reports(told.values())

    def _late(self, server_round: int, grid: Grid, asked: Collection[int]) -> list[int]:
        """Return the nodes that have connected since the others were asked."""
        if not self.publish_every:
            return []
        nodes = self.choose_nodes(server_round, grid, 1.0, TRAIN)
        return [node for node in nodes if node not in asked]

    def _keep(self, received: dict[str, NodeSpace], *, afresh: bool) -> None:
        """Remember what was received, and put it into the folder."""
        self._received = received
        kept = {}
        if not self._space.is_summed:
            kept = {node: without_curve(space) for node, space in received.items()}
        try:
            if afresh:
                self._spaces.clear()
            self._spaces.save(kept)
        except DiskError as error:
            if self.on_empty == "retrain":
                raise  # a resumed run would go on without them
            log_warning("spaces_not_kept", round=self._exchange.server_round, reason=error)

    def _usable_spaces(self, received: Mapping[str, NodeSpace]) -> dict[str, Space | CurvedSpace]:
        most = float("inf") if self.max_examples is None else self.max_examples
        if not isinstance(self._space, Cone) or not self._space.sums:
            spaces = {k: s for k, s in received.items() if not isinstance(s, ClassSums)}
            return {
                k: s.with_samples_at_most(most) if isinstance(s, ClassMomentCone) else s
                for k, s in spaces.items()
            }
        # Nothing but the total is looked at, and each node's samples where those are capped.
        parts = [
            s.with_samples_at_most(most) for s in received.values() if isinstance(s, ClassSums)
        ]
        total = sum(parts[1:], parts[0])
        least = self._space.min_count or MIN_COUNT
        # The total's means are nobody's own: small classes keep theirs as they are.
        return {"all nodes": cone_from_sums(total, min_count=least, mean_rule=MeanRule(1, True))}

    def _screened(
        self, spaces: dict[str, Space | CurvedSpace]
    ) -> tuple[dict[str, Space | CurvedSpace], dict[str, str]]:
        """Return the spaces that count, and by node what was held against it."""
        if not self.robust:
            return spaces, {}
        result = screen_spaces([without_curve(space) for space in spaces.values()])
        self._unchecked = result.unchecked if isinstance(self._space, Cone) else None
        screened = [
            space if now is without_curve(space) else now
            for space, now in zip(spaces.values(), result.spaces, strict=True)
        ]
        return plausible(spaces, screened, result.reasons, at_least=self.min_nodes, what="spaces")

    def verified(
        self, server_round: int, grid: Grid, model: SplitModel, config: ConfigRecord
    ) -> dict[str, Any]:
        """Return what nodes say of the result: each of them, or all together."""
        step = "verification"
        if not self._adds_up:
            return {"node_scores": self._scores(server_round, grid, model, config, step)}

        nodes = self.choose_nodes(server_round, grid, 1.0, EVALUATE)
        exchange = self._to_sum(server_round, model, config)
        try:
            return {"score": score_of(exchange.total(nodes, ask_for_score, count_sections(), step))}
        except RoundFailedError as error:
            # The model is there; what is missing is the nodes' word on it.
            log_warning("not_opened", round=server_round, what=step, reason=str(error))
            return {"score": None}

    def _scores(
        self, server_round: int, grid: Grid, model: SplitModel, config: ConfigRecord, step: str
    ) -> dict[str, float]:
        """Return each node's accuracy with a model."""
        nodes = self.choose_nodes(server_round, grid, 1.0, EVALUATE)

        def ask(message: Message) -> None:
            ask_for_score(message.content, self._space.score)

        def unpack(content: RecordDict) -> float:
            self._backbones.refuse_lacking(content, next(iter(model.head)))
            return unpack_score_reply(content)

        # As train messages, because every client has a handler for those, and the mod around it.
        replies = self._backbones.collect(self, server_round, nodes, model, config, ask, step)
        answers = self.accept(replies, unpack)
        return {answer.node: answer.value for answer in answers}

    # --- helpers ------------------------------------------------------------------------------

    def _name_of(self, message: Message) -> str:
        return self._nodes.name(message.metadata.dst_node_id)

    def _folder(self) -> Path:
        return Path(str(self.checkpoint_dir)) / "spaces"

    def _public(self) -> Samples | None:
        if not self.tune or self.public is None:
            return None
        return Samples(*first_samples(self.public, self.tune))


def _is_whole(cone: ClassMomentCone, received: NodeSpace) -> bool:
    return isinstance(received, ClassMomentCone) and len(cone.labels) == len(received.labels)


def _samples(spaces: Mapping[str, NodeSpace]) -> dict[str, int | None]:
    return {node: samples_of(space) for node, space in spaces.items()}
