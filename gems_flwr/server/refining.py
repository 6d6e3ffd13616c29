"""Rounds of refinement: gradients of the true loss in, a safe step out.

A round has two exchanges. In the first, nodes send loss, gradient and curvature of the current
layer, as sums over their training data; in the second they are sent the step and answer with their
losses at some points along it. The mathematics is in `gems_flwr.intersect.refinement`.

Decided here: a round is about the nodes that answer it. Losses are compared over the same nodes,
and where the nodes change, pairs and bounds of other nodes do not count. If too few answer, the
layer stays as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from gems_flwr.intersect.cone_objective import ClassWeight
from gems_flwr.intersect.loss_bound import loss_bound
from gems_flwr.intersect.loss_curvature import LossCurvature, mean_directions
from gems_flwr.intersect.pooled_moments import pool_moments
from gems_flwr.intersect.refinement import (
    Evaluation,
    Proposal,
    candidates,
    choose,
    damping_after,
    points_at,
    propose,
    squared_length,
)
from gems_flwr.intersect.screen_gradients import input_length, screen_gradients, screen_losses
from gems_flwr.intersect.tuning import public_weight
from gems_flwr.moments.loss_sums import loss_sums, losses_along
from gems_flwr.networks.backbone import SplitModel
from gems_flwr.samples import Samples
from gems_flwr.server.backbone_sending import BackboneSender
from gems_flwr.server.exchange import Answer
from gems_flwr.server.log import log_event, log_warning
from gems_flwr.server.loop import RoundLoop
from gems_flwr.server.refine_memory import RefineMemory
from gems_flwr.server.refine_options import Refine
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.output_layer import OutputLayer, flatten_linear
from gems_flwr.typing import Arrays, Float
from gems_flwr.wire.gradient_replies import (
    GradientReply,
    unpack_gradient_reply,
    unpack_losses_reply,
)
from gems_flwr.wire.gradient_requests import (
    GradientRequest,
    LossesRequest,
    ask_for_gradient,
    ask_for_losses,
)
from gems_flwr.wire.keys import TRAIN

# With more classes the curvature of each would take more bytes than the gradient.
BY_CLASS = 15


@dataclasses.dataclass(frozen=True)
class RefineOptions:
    """How a layer is refined, and what of; see `gems_flwr.Gems`."""

    how: Refine
    class_weight: ClassWeight = "counts"
    robust: bool = False
    public: Samples | None = None
    device: str = "cpu"


@dataclasses.dataclass(frozen=True, eq=False)
class Refined:
    """What a round of refinement came to."""

    arrays: Arrays
    memory: RefineMemory
    details: Mapping[str, Any]


class RefineRound:
    """One round of refinement under way.

    Parameters
    ----------
    strategy : RoundLoop
        Whose round it is.
    backbones : BackboneSender
        Sends models.
    options : RefineOptions
        How.
    memory : RefineMemory
        What earlier rounds have left.
    arrays : mapping from str to ndarray
        The model so far.
    layer : OutputLayer
        Which of its arrays are refined.
    """

    def __init__(
        self,
        strategy: RoundLoop,
        backbones: BackboneSender,
        options: RefineOptions,
        memory: RefineMemory,
        arrays: Arrays,
        layer: OutputLayer,
    ) -> None:
        self.strategy, self.backbones, self.options = strategy, backbones, options
        self.memory, self.arrays, self.layer = memory, arrays, layer
        self.moments = pool_moments(list(memory.cones.values()))
        self.scale = _as_sent(self.moments.feature_scale)
        self.basis = _as_sent(mean_directions(self.moments, self.scale))
        self.point = layer.scaled_in(arrays, self.scale)
        self.weights = class_weights(memory.cones, layer.num_classes, options.class_weight)
        self.model = SplitModel.of(arrays, layer.keys)
        # By node, what its sums are multiplied by.
        self.factors: dict[str, float] = {}

    def play(
        self, server_round: int, grid: Grid, config: ConfigRecord, told: Sequence[Mapping[str, Any]]
    ) -> Refined:
        """Play the round; `told` is what earlier ones have said of themselves."""
        self.place = (server_round, config)
        nodes = self.strategy.choose_nodes(server_round, grid, 1.0, TRAIN)
        replies = self._gradients([node for node in nodes if self._takes_part(node)])
        note: dict[str, Any] = {"round": server_round, "nodes": len(replies), "taken": False}
        if len(replies) < self.strategy.min_nodes:
            return self._stays(note, told, f"too few nodes sent gradients ({len(replies)})")
        if lost := self._lost_classes(replies):
            return self._stays(note, told, f"most of classes {lost} sent no gradient")
        seen, softmax = self._pooled(replies)
        history = (*self.memory.history, seen)
        memory = dataclasses.replace(self.memory, history=history)
        curvature = LossCurvature.of(
            self.moments, self.scale, softmax, self.options.how.ridge, self.weights
        )
        proposal = propose(history, curvature, self.options.how.ridge, memory.damping)
        loss = seen.full_loss(self.options.how.ridge)
        note |= {
            "gradient_norm": float(np.linalg.norm(seen.full_gradient(self.options.how.ridge))),
            "gradient_error": seen.error_length,
            "expected_gain": proposal.gain,
            **self._reached(self.point, seen.loss, seen.nodes, history),
        }
        if proposal.gain < self.options.how.tolerance * loss:
            reason = f"a step would gain {proposal.gain:.2g} of a loss of {loss:.4g}"
            return self._ends(note, told, memory, reason)
        return self._stepped(note, told, memory, proposal, replies)

    def _stepped(
        self,
        note: dict[str, Any],
        told: Sequence[Mapping[str, Any]],
        memory: RefineMemory,
        proposal: Proposal,
        replies: Mapping[str, GradientReply],
    ) -> Refined:
        """Ask for losses along the step, and take the best if it is better."""
        direction = _as_sent(proposal.direction)
        tried = candidates()
        answers = self._losses(replies, direction, tried)
        if len(answers) < self.strategy.min_nodes:
            return self._stays(note, told, f"too few nodes told losses ({len(answers)})", memory)
        if lost := self._lost_classes(answers):
            return self._stays(note, told, f"most of classes {lost} told no loss", memory)
        data = self._mean_losses(replies, answers) + self._public_losses(direction, tried)
        layers = points_at(self.point, direction, tried)
        ridge = self.options.how.ridge
        losses = [d + ridge * squared_length(v) for d, v in zip(data, layers, strict=True)]
        best = choose(losses)
        memory = dataclasses.replace(memory, damping=damping_after(memory.damping, best))
        if not best:
            return self._stays(note, told, "no step lowers the loss", memory)
        arrays = self.layer.replace_in(self.arrays, self._flat(layers[best]))
        reached = self.layer.scaled_in(arrays, self.scale)
        # The model may be in single precision; what that costs is part of the bound.
        moved = float(np.linalg.norm(reached - layers[best]))
        slack = math.sqrt(2) * input_length(self.moments, self.scale) * moved
        nodes = tuple(answers)
        note |= {
            "taken": True,
            "multiple": 1 + float(tried[best, 0]),
            "step": float(tried[best, 1]),
        }
        note |= self._reached(reached, float(data[best]), nodes, memory.history, slack)
        note["gain"] = float(losses[0] - losses[best])
        if note["gain"] < self.options.how.tolerance * losses[0]:
            reason = f"the last step gained {note['gain']:.2g} of a loss of {losses[0]:.4g}"
            return self._ends(note, told, memory, reason, arrays)
        return Refined(arrays, memory, _details(note, told))

    # --- exchanges ------------------------------------------------------------------------------

    def _gradients(self, nodes: Sequence[int]) -> dict[str, GradientReply]:
        """Return the sums of the nodes that take part, as they count, by name."""
        request = GradientRequest(
            class_weights=self._told_weights(),
            dtype=self.options.how.dtype,
            by_class=self.layer.num_classes <= BY_CLASS,
        )
        unpack = partial(
            unpack_gradient_reply, request=request, classes=len(self.point), basis=self.basis
        )
        ask = partial(ask_for_gradient, request=request, scale=self.scale, basis=self.basis)
        answers = self._asked(nodes, ask, unpack, "gradient")
        if self.options.robust:
            cones = {answer.node: self.memory.cones[answer.node] for answer in answers}
            lies = screen_gradients(
                {answer.node: answer.value for answer in answers}, cones, self.scale, self.weights
            )
            answers = self.strategy.leave_out(answers, lies)
        return {answer.node: self._counted(answer.node, answer.value) for answer in answers}

    def _losses(
        self, replies: Mapping[str, GradientReply], direction: Float, tried: Float
    ) -> dict[str, Float]:
        """Return what those who sent gradients say of the points, as they count."""
        nodes = [i for i in self.strategy.answered_ids if self.strategy.name_of(i) in replies]
        request = LossesRequest(class_weights=self._told_weights())
        ask = partial(
            ask_for_losses, request=request, scale=self.scale, direction=direction, points=tried
        )
        answers = self._asked(nodes, ask, partial(unpack_losses_reply, points=len(tried)), "losses")
        counted = {a.node: a.value * self.factors[a.node] for a in answers if a.node in replies}
        if self.options.robust:
            layers = points_at(self.point, direction, tried)
            lies = screen_losses(counted, self.memory.cones, layers, self.scale, self.weights)
            answers = self.strategy.leave_out(answers, lies)
        return {answer.node: counted[answer.node] for answer in answers if answer.node in counted}

    def _asked(
        self,
        nodes: Sequence[int],
        ask: Callable[[RecordDict], None],
        unpack: Callable[[RecordDict], Any],
        step: str,
    ) -> list[Answer[Any]]:
        server_round, config = self.place

        def checked(content: RecordDict) -> Any:
            self.backbones.refuse_lacking(content, self.layer.weight)
            return unpack(content)

        def put(message: Message) -> None:
            ask(message.content)

        if not nodes:
            return []
        replies = self.backbones.collect(
            self.strategy, server_round, nodes, self.model, config, put, step
        )
        answers = self.strategy.accept(replies, checked)
        reason = "it has sent no space that counts"
        strangers = {a.node: reason for a in answers if not self._knows(a.node)}
        return self.strategy.leave_out(answers, strangers)

    # --- sums -----------------------------------------------------------------------------------

    def _counted(self, node: str, reply: GradientReply) -> GradientReply:
        """Let a node count for no more samples than its moments do."""
        cone = self.memory.cones.get(node)
        most = self.strategy.max_examples if cone is None else float(cone.total_count)
        factor = 1.0 if most is None else min(1.0, most / reply.count)
        self.factors[node] = factor
        return reply if factor == 1 else reply.times(factor)

    def _pooled(self, replies: Mapping[str, GradientReply]) -> tuple[Evaluation, Float]:
        """Return the evaluation of the pooled loss, and its curvature by class."""
        parts = list(replies.values())
        weight = max(sum(part.weight for part in parts), np.finfo(np.float64).tiny)
        loss = sum(part.loss for part in parts) / weight
        gradient = sum((p.gradient for p in parts), np.zeros_like(self.point)) / weight
        softmax = sum((p.curvature for p in parts), np.zeros_like(parts[0].curvature)) / weight
        errors = sum((part.errors for part in parts), np.zeros(len(self.point))) / weight
        loss, gradient, softmax = self._with_public(loss, gradient, softmax)
        return Evaluation(self.point, loss, gradient, errors, tuple(replies)), softmax

    def _mean_losses(
        self, replies: Mapping[str, GradientReply], answers: Mapping[str, Float]
    ) -> Float:
        """Return the mean loss at every point, over the nodes that told it."""
        weight = sum(replies[node].weight for node in answers)
        return np.asarray(sum(answers.values()) / weight)

    def _with_public(
        self, loss: float, gradient: Float, softmax: Float
    ) -> tuple[float, Float, Float]:
        """Add what public samples say."""
        if (public := self.options.public) is not None:
            own = loss_sums(
                public,
                self.point,
                self.scale,
                self._ones,
                by_class=len(softmax) > 1,
                device=self.options.device,
            )
            factor = public_weight(len(public)) / len(public)
            loss, gradient = loss + factor * own.loss, gradient + factor * own.gradient
            softmax = softmax + factor * own.curvature
        return loss, gradient, softmax

    def _public_losses(self, direction: Float, tried: Float) -> Float:
        public = self.options.public
        if public is None:
            return np.zeros(len(tried))
        directions = np.stack([self.point, direction])
        about = (directions, tried, self.scale, self._ones, self.options.device)
        sums = losses_along(public, self.point, *about)
        return np.asarray(sums * public_weight(len(public)) / len(public))

    @property
    def _ones(self) -> Float:
        return np.ones(self.layer.num_classes)

    # --- what is told ---------------------------------------------------------------------------

    def _reached(
        self,
        layer: Float,
        loss: float,
        nodes: tuple[str, ...],
        history: Sequence[Evaluation],
        slack: float = 0.0,
    ) -> dict[str, Any]:
        """Return the loss of a layer, and how much lower any can be."""
        ridge = self.options.how.ridge
        same = [seen for seen in history if seen.nodes == nodes]
        return {
            "data_loss": loss,
            "loss": loss + ridge * squared_length(layer),
            "loss_bound": loss_bound(layer, loss, same, ridge, slack),
        }

    def _stays(
        self,
        note: dict[str, Any],
        told: Sequence[Mapping[str, Any]],
        reason: str,
        memory: RefineMemory | None = None,
    ) -> Refined:
        """Keep the layer, and go on with the next round."""
        log_warning("no_step", round=self.place[0], reason=reason)
        details = _details({**note, "reason": reason}, told)
        return Refined(self.arrays, memory or self.memory, details)

    def _ends(
        self,
        note: dict[str, Any],
        told: Sequence[Mapping[str, Any]],
        memory: RefineMemory,
        reason: str,
        arrays: Arrays | None = None,
    ) -> Refined:
        """Play no more rounds."""
        log_event("refined", round=self.place[0], reason=reason)
        details = _details({**note, "reason": reason, "converged": True}, told)
        return Refined(self.arrays if arrays is None else arrays, memory, details)

    def _lost_classes(self, nodes: Collection[str]) -> list[int]:
        """Return the classes of which less than half the samples are on some nodes.

        A step by the loss of the others alone would unlearn them.
        """
        cones = self.memory.cones
        if self.memory.members and not cones.keys() >= set(self.memory.members):
            # Of sums nobody knows whose classes they are.
            return [] if set(nodes) >= set(self.memory.members) else list(range(len(self.point)))
        there, in_all = np.zeros((2, self.layer.num_classes))
        for node, cone in cones.items():
            np.add.at(in_all, cone.labels, cone.counts)
            if node in nodes:
                np.add.at(there, cone.labels, cone.counts)
        return [int(label) for label in np.flatnonzero(2 * there < in_all)]

    def _takes_part(self, node: int) -> bool:
        name = self.strategy.name_of(node)
        # In a resumed run some nodes tell their names with the first reply.
        return self._knows(name) or name == f"#{node}"

    def _knows(self, name: str) -> bool:
        return name in self.memory.members

    def _told_weights(self) -> tuple[float, ...]:
        return () if self.options.class_weight == "counts" else tuple(self.weights.tolist())

    def _flat(self, layer: Float) -> Float:
        return flatten_linear(layer[:, :-1] / self.scale, layer[:, -1])


def class_weights(
    cones: Mapping[str, ClassMomentCone], classes: int, class_weight: ClassWeight
) -> Float:
    """Return how much a sample of each class counts; of one that nobody sent, nothing."""
    if class_weight == "counts":
        return np.ones(classes)
    totals = np.zeros(classes)
    for cone in cones.values():
        np.add.at(totals, cone.labels, cone.counts)
    there = totals > 0
    return np.where(there, totals.sum() / (there.sum() * np.where(there, totals, 1)), 0.0)


def reason_to_stop(details: Mapping[str, Any]) -> str | None:
    """Return why further rounds of refinement would not help, or None."""
    rounds = details.get("refinement") or [{}]
    return str(rounds[-1]["reason"]) if rounds[-1].get("converged") else None


def _details(note: Mapping[str, Any], told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    latest = ("loss", "data_loss", "gradient_norm", "loss_bound")
    found = {key: note[key] for key in latest if key in note}
    return {**found, "refinement": [*told, dict(note)]}


def _as_sent(values: Float) -> Float:
    """Return numbers as nodes get them."""
    return values.astype(np.float32).astype(np.float64)
