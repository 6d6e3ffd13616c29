"""Rounds of refinement: gradients of the true loss in, a safe step out.

A round has two exchanges (`gems_flwr.stages.gradients`). In the first, nodes send loss, gradient
and curvature of the current layer, as sums over their training data; in the second they are sent
the step and answer with their losses at some points along it. The mathematics is in
`gems_flwr.spaces.cone`.

Decided here: a round is about the nodes that answer it. Losses are compared over the same nodes,
and where the nodes change, pairs and bounds of other nodes do not count. If too few answer, the
layer stays as it is. Where moments are only added up, so is all of this: every sum is bounded
beforehand, and a round counts if most samples of every class are in its sums.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gems_flwr.core.log import log_event, log_warning
from gems_flwr.core.run import RoundOutcome, ServerState
from gems_flwr.core.sums import Total
from gems_flwr.errors import CheckpointError, OptionError, RoundFailedError
from gems_flwr.samples import Samples
from gems_flwr.spaces import (
    flatten_linear,
    input_length,
    screen_gradients,
    screen_losses,
)
from gems_flwr.spaces.cone import (
    REFINE_DAMPING,
    REFINE_RIDGE,
    ClassMomentCone,
    Evaluation,
    LossCurvature,
    Proposal,
    Standard,
    candidates,
    choose,
    damping_after,
    gradient_of,
    gradient_sections,
    loss_bound,
    loss_sums,
    losses_along,
    losses_sections,
    mean_directions,
    points_at,
    pool_moments,
    propose,
    rescaled,
    squared_length,
    symmetric,
)
from gems_flwr.stages.gradients import Gradient, GradientReply, GradientSum, Losses, LossesSum
from gems_flwr.stages.stage import Play, Stage
from gems_flwr.stages.tune import Tune, public_weight
from gems_flwr.typing import Arrays, Float

# With more classes the curvature of each would take more bytes than the gradient.
BY_CLASS = 15
TOLERANCE = 1e-4
# Beside the rounding of sums to the grid: that of doubles.
_DOUBLE = 1e-12
_TINY = float(np.finfo(np.float64).tiny)
_PREFIX = "refine"
_NOTES = f"{_PREFIX}-notes"
_LATEST = ("loss", "data_loss", "gradient_norm", "loss_bound")


@dataclass(frozen=True)
class Refine(Stage):
    """Rounds in which nodes send gradients, and the server steps towards the pooled optimum.

    ``Gems(refine=3)`` stands for ``Gems(refine=Refine(3))``.

    Parameters
    ----------
    rounds : int
        At most; at least 0.
    ridge : float, default 1e-4
        Weight of ``|W|^2``, and of the squared bias, in the loss that is minimised, on scaled
        features; above 0.
    tolerance : float, default 1e-4
        Refinement ends when a step gains, or would gain, a smaller share of the loss; at least 0.

    Examples
    --------
    >>> from gems_flwr import Cone, Gems, Refine
    >>> Gems(space=Cone(rank=20), refine=Refine(5, ridge=1e-3)).rounds_needed
    6
    """

    option: ClassVar[str] = "refine"
    needs: ClassVar[frozenset[str]] = frozenset({"moments", "exact"})

    rounds: int = 0
    ridge: float = REFINE_RIDGE
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        whole = isinstance(self.rounds, int) and not isinstance(self.rounds, bool)
        rules = {
            "rounds": (whole and self.rounds >= 0, "an integer from 0"),
            "ridge": (self.ridge > 0, "above 0"),
            "tolerance": (self.tolerance >= 0, "at least 0"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise OptionError(f"refine.{name} must be {allowed}, got {getattr(self, name)!r}")

    def play(self, play: Play) -> None:
        """Keep what the rounds that follow need to know of the first one."""
        cones = {n: s for n, s in play.spaces.items() if isinstance(s, ClassMomentCone)}
        members = tuple(cones) if play.summed is None else play.summed.nodes
        if "screened" in play.details:
            # A node that lied about a class would lie about its gradient, too.
            whole = {n: len(play.received[n].labels) == len(cones[n].labels) for n in members}
            members = tuple(n for n in members if whole[n])
        standard = None if play.summed is None else play.summed.standard
        play.memory |= RefineMemory(cones, members, standard=standard).to_arrays()

    def play_round(
        self, play: Play, state: ServerState, *, robust: bool = False, tune: Tune | None = None
    ) -> RoundOutcome:
        """Play one round of refinement.

        With `robust`, gradients and losses are held against the moments of their nodes; public
        samples join the loss.
        """
        memory = RefineMemory.of(state.memory)
        kind = RefineRound if memory.standard is None else SummedRefineRound
        public = None if tune is None else tune.samples(state.arrays)
        return kind(self, play, state, memory, robust, public).play()

    def reason_to_stop(self, details: Mapping[str, Any]) -> str | None:
        """Return why further rounds of refinement would not help, or None."""
        rounds = details.get("refinement") or [{}]
        return str(rounds[-1]["reason"]) if rounds[-1].get("converged") else None


@dataclass(frozen=True, eq=False)
class _Sums:
    """What some nodes sent, added up."""

    nodes: tuple[str, ...]
    weights: Float  # of all samples of each class that are behind it (C,)
    weight: float  # of all samples together, above 0
    value: Any
    safe: Any = None  # the value by which a step is chosen, where that is another


class RefineRound:
    """One round of refinement under way, with the answers of single nodes."""

    def __init__(
        self,
        how: Refine,
        play: Play,
        state: ServerState,
        memory: RefineMemory,
        robust: bool,
        public: Samples | None,
    ) -> None:
        self.how, self.state, self.memory, self.robust = how, state, memory, robust
        self.round, self.arrays, self.layer = play.round, play.start, play.layer
        self.device, self.min_count = play.device, getattr(play.question, "min_count", None)
        self.public = public
        self.public_share = 0.0 if public is None else public_weight(len(public)) / len(public)
        self.moments = pool_moments(list(memory.cones.values()))
        self.scale = _as_sent(self.moments.feature_scale)
        self.basis = _as_sent(mean_directions(self.moments, self.scale))
        self.point = self.layer.scaled_in(self.arrays, self.scale)
        self.classes = self.layer.num_classes
        self.counts = self._counts(memory.cones)
        self.weights = np.ones(self.classes)
        if play.head.class_weight == "balanced":
            there, totals = self.counts > 0, np.maximum(self.counts, 1)
            self.weights = np.where(there, self.counts.sum() / (there.sum() * totals), 0.0)
        # By node, what its sums are multiplied by.
        self.factors: dict[str, float] = {}
        self.replies: dict[str, GradientReply] = {}

    def play(self) -> RoundOutcome:
        """Play the round."""
        nodes = [name for name in self.round.sample() if self._takes_part(name)]
        sums = self._gradients(nodes)
        note: dict[str, Any] = {"round": self.round.number, "taken": False}
        note["nodes"] = len(sums.nodes)
        if reason := self._too_few(sums, "gradients"):
            return self._stays(note, reason)
        seen, softmax = self._evaluated(sums)
        history, ridge = (*self.memory.history, seen), self.how.ridge
        self.memory = dataclasses.replace(self.memory, history=history)
        curvature = LossCurvature.of(self.moments, self.scale, softmax, ridge, self.weights)
        proposal = propose(history, curvature, ridge, self.memory.damping)
        loss = seen.full_loss(ridge)
        note |= {
            "gradient_norm": float(np.linalg.norm(seen.full_gradient(ridge))),
            "gradient_error": seen.error_length,
            "expected_gain": proposal.gain,
            **self._reached(self.point, seen.loss, seen.nodes),
        }
        if proposal.gain < self.how.tolerance * loss:
            reason = f"a step would gain {proposal.gain:.2g} of a loss of {loss:.4g}"
            return self._ends(note, reason, self.arrays)
        return self._stepped(note, proposal, seen.nodes)

    def _stepped(
        self, note: dict[str, Any], proposal: Proposal, nodes: tuple[str, ...]
    ) -> RoundOutcome:
        """Ask for losses along the step, and take the best if it is better."""
        direction, tried = _as_sent(proposal.direction), candidates()
        sums = self._losses(nodes, direction, tried)
        if reason := self._too_few(sums, "losses"):
            return self._stays(note, reason)
        public = self._public_losses(direction, tried)
        layers, ridge = points_at(self.point, direction, tried), self.how.ridge
        rest = public + [ridge * squared_length(layer) for layer in layers]
        data = sums.value / sums.weight + public
        losses = (sums.value if sums.safe is None else sums.safe) / sums.weight + rest
        best = choose(losses)
        damping = damping_after(self.memory.damping, best)
        self.memory = dataclasses.replace(self.memory, damping=damping)
        if not best:
            return self._stays(note, "no step lowers the loss")
        weight, bias = layers[best][:, :-1] / self.scale, layers[best][:, -1]
        arrays = self.layer.replace_in(self.arrays, flatten_linear(weight, bias))
        reached = self.layer.scaled_in(arrays, self.scale)
        # The model may be in single precision; the bound includes what that takes.
        moved = float(np.linalg.norm(reached - layers[best]))
        slack = math.sqrt(2) * input_length(self.moments, self.scale) * moved
        multiple, step = 1 + float(tried[best, 0]), float(tried[best, 1])
        note |= {"taken": True, "multiple": multiple, "step": step}
        note |= self._reached(reached, float(data[best]), sums.nodes, slack)
        note["gain"] = float(losses[0] - losses[best])
        if note["gain"] < self.how.tolerance * losses[0]:
            reason = f"the last step gained {note['gain']:.2g} of a loss of {losses[0]:.4g}"
            return self._ends(note, reason, arrays)
        return self._outcome(note, arrays)

    # --- what nodes answer --------------------------------------------------------------------

    def _gradients(self, nodes: Sequence[str]) -> _Sums:
        """Return the sums of the nodes that take part, as they count: a `GradientReply`."""
        question = Gradient(
            self.scale.astype(np.float32),
            self.basis.astype(np.float32),
            by_class=self.classes <= BY_CLASS,
            class_weights=self._sent_weights(),
        )
        answers = self._members(self.round.ask(question, nodes))
        cones = {name: self.memory.cones[name] for name in answers}
        if self.robust:
            lies = screen_gradients(answers, cones, self.scale, self.weights, self.point)
            answers = self.round.leave_out(answers, lies)
        for name, reply in answers.items():
            # A node counts for no more samples than its moments do.
            self.factors[name] = min(1.0, float(cones[name].total_count) / reply.count)
        self.replies = {name: reply.times(self.factors[name]) for name, reply in answers.items()}
        return self._added(self.replies)

    def _losses(self, nodes: Sequence[str], direction: Float, tried: Float) -> _Sums:
        """Return what those who sent gradients answer for the points, as they count."""
        step = self.scale.astype(np.float32), direction.astype(np.float32), tried
        question = Losses(*step, class_weights=self._sent_weights())
        answers = self._members(self.round.ask(question, nodes))
        counted = {n: a * self.factors[n] for n, a in answers.items() if n in nodes}
        if self.robust:
            layers = points_at(self.point, direction, tried)
            about = layers, self.scale, self.weights, self.replies, tried
            lies = screen_losses(counted, self.memory.cones, *about)
            counted = self.round.leave_out(counted, lies)
        sums = self._added(counted)
        return dataclasses.replace(sums, safe=_safe(counted)) if counted and self.robust else sums

    def _added(self, answers: Mapping[str, Any]) -> _Sums:
        weight = sum(self.replies[node].weight for node in answers)
        there = {name: cone for name, cone in self.memory.cones.items() if name in answers}
        weights = self.weights * self._counts(there)
        for name, cone in there.items():
            left = self.replies[name].withheld > 0
            weights = weights - self.weights * self._counts({name: cone}) * left
        value = reduce(add, answers.values()) if answers else None
        return _Sums(tuple(answers), weights, max(weight, _TINY), value)

    def _members(self, answers: dict[str, Any]) -> dict[str, Any]:
        reason = "it has sent no space that counts"
        strangers = {name: reason for name in answers if name not in self.memory.members}
        return self.round.leave_out(answers, strangers)

    def _takes_part(self, name: str) -> bool:
        # In a resumed run some nodes send their names with the first reply.
        return name in self.memory.members or name.startswith("#")

    def _sent_weights(self) -> tuple[float, ...]:
        return () if (self.weights == 1).all() else tuple(self.weights.tolist())

    def _too_few(self, sums: _Sums, what: str) -> str:
        """Return why these answers do not make a round, if they do not."""
        if len(sums.nodes) < self.round.min_nodes:
            return f"too few nodes sent {what} ({len(sums.nodes)})"
        # A step by the loss of the other classes alone would unlearn these.
        lost = np.flatnonzero(2 * sums.weights < self.weights * self.counts)
        return f"most of classes {lost.tolist()} sent no {what}" if len(lost) else ""

    # --- sums ---------------------------------------------------------------------------------

    def _counts(self, cones: Mapping[str, ClassMomentCone]) -> Float:
        """Return the samples of each class in some cones."""
        counts = np.zeros(self.classes)
        for cone in cones.values():
            np.add.at(counts, cone.labels, cone.counts)
        return counts

    def _evaluated(self, sums: _Sums) -> tuple[Evaluation, Float]:
        """Return the evaluation of the loss, public samples included, and its curvature."""
        pooled: GradientReply = sums.value.over(sums.weight)
        loss, gradient, softmax = pooled.loss, pooled.gradient, pooled.curvature
        if (public := self.public) is not None:
            by_class, ones, share = len(softmax) > 1, np.ones(self.classes), self.public_share
            about = (public, self.point, self.scale, ones)
            own = loss_sums(*about, by_class=by_class, device=self.device)
            loss, gradient = loss + share * own.loss, gradient + share * own.gradient
            softmax = softmax + share * own.curvature
        return Evaluation(self.point, loss, gradient, pooled.errors, sums.nodes), softmax

    def _public_losses(self, direction: Float, tried: Float) -> Float:
        if (public := self.public) is None:
            return np.zeros(len(tried))
        directions, ones = np.stack([self.point, direction]), np.ones(self.classes)
        about = (directions, tried, self.scale, ones, self.device)
        losses = losses_along(public, self.point, *about)
        return np.asarray(losses.sum(axis=0) * self.public_share)

    # --- what is reported ---------------------------------------------------------------------

    def _reached(
        self, layer: Float, loss: float, nodes: tuple[str, ...], slack: float = 0.0
    ) -> dict[str, Any]:
        """Return the loss of a layer, and how much lower any can be."""
        ridge = self.how.ridge
        same = [seen for seen in self.memory.history if seen.nodes == nodes]
        return {
            "data_loss": loss,
            "loss": loss + ridge * squared_length(layer),
            "loss_bound": loss_bound(layer, loss, same, ridge, slack),
        }

    def _stays(self, note: dict[str, Any], reason: str) -> RoundOutcome:
        log_warning("no_step", round=self.round.number, reason=reason)
        return self._outcome({**note, "reason": reason}, self.arrays)

    def _ends(self, note: dict[str, Any], reason: str, arrays: Arrays) -> RoundOutcome:
        log_event("refined", round=self.round.number, reason=reason)
        return self._outcome({**note, "reason": reason, "converged": True}, arrays)

    def _outcome(self, note: dict[str, Any], arrays: Arrays) -> RoundOutcome:
        details: dict[str, Any] = {key: note[key] for key in _LATEST if key in note}
        details["refinement"] = [*self.state.details.get("refinement", []), note]
        memory = self.state.memory
        others = {key: a for key, a in memory.items() if not key.startswith(_PREFIX)}
        memory = {**others, **self.memory.to_arrays()}
        return RoundOutcome(arrays=arrays, details=details, memory=memory)


class SummedRefineRound(RefineRound):
    """One round of refinement in which the server sees totals over nodes alone."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        assert self.memory.standard is not None
        self.standard = rescaled(self.memory.standard, self.scale)
        # A class that was left out of the moments is in no later sum: bounds do not cover it.
        self.weights = self.weights * (self.counts > 0)
        # Fewest samples of a class in a node's summand; under masks the total counts.
        self.min_count = None if self.round.is_secure else self.min_count

    def _gradients(self, nodes: Sequence[str]) -> _Sums:
        question = GradientSum(
            self.scale.astype(np.float32),
            self.standard.center.astype(np.float32),
            by_class=self.classes <= BY_CLASS,
            min_count=self.min_count,
            class_weights=self._sent_weights(),
        )
        about = self.point, self.standard, self.weights
        sections = gradient_sections(*about, by_class=question.by_class)
        return self._total(question, sections, nodes, self._reply)

    def _reply(self, total: Total) -> GradientReply:
        """Return what one node with all the samples would send."""
        values, errors, center = total.values, total.errors, self.standard.center / self.scale
        gradient = gradient_of(values["gradient"], values["bias"], center)
        off = errors["gradient"] + errors["bias"] * float(np.abs(center).max(initial=1.0))
        off += _DOUBLE * float(np.abs(gradient).max(initial=0))
        rows, softmax = np.full(self.classes, off), symmetric(values["curvature"], self.classes)
        weight = float(values["weights"].sum())
        loss, none = float(values["loss"][0]), np.zeros(self.classes)
        return GradientReply(weight, weight, loss, gradient, rows, softmax, none)

    def _losses(self, nodes: Sequence[str], direction: Float, tried: Float) -> _Sums:
        step = self.scale.astype(np.float32), direction.astype(np.float32), tried
        question = LossesSum(*step, self.min_count, class_weights=self._sent_weights())
        layers = points_at(self.point, direction, tried)
        sections = losses_sections(layers, self.standard, self.weights)
        return self._total(question, sections, nodes, lambda total: total.values["losses"])

    def _total(
        self, question: Any, sections: Any, nodes: Sequence[str], read: Callable[[Total], Any]
    ) -> _Sums:
        try:
            total = self.round.total(question, sections, nodes)
        except RoundFailedError as error:
            # A secure sum that too few nodes are left to open: the layer stays as it is.
            what = question.kind
            log_warning("not_opened", round=self.round.number, what=what, reason=str(error))
            return _Sums((), np.zeros(self.classes), _TINY, None)
        weights = total.values["weights"]
        return _Sums(tuple(total), weights, max(float(weights.sum()), _TINY), read(total))

    def _takes_part(self, name: str) -> bool:
        # Of a sum no node can be left out afterwards.
        return name in self.memory.members


def _safe(answers: Mapping[str, Float]) -> Float:
    """Return losses by which no minority lets a layer pass for better than it is to the others.

    At each point the largest gains do not count, as many as a minority has nodes. An honest node
    among them gains no less than any liar that counts, so where the rest gains, the honest gain.
    """
    sent = np.stack(list(answers.values()))
    gains = np.sort(sent[:, :1] - sent, axis=0)
    counted = gains[: len(sent) - (len(sent) - 1) // 2]
    return np.asarray(sent[:, 0].sum() - counted.sum(axis=0))


def _as_sent(values: Float) -> Float:
    """Return numbers as nodes get them."""
    return values.astype(np.float32).astype(np.float64)


@dataclass(frozen=True, eq=False)
class RefineMemory:
    """What a checkpoint keeps between two rounds, so that a resumed run steps to the same bit."""

    # Moments that count, by node; one for all nodes where they are only added up.
    cones: Mapping[str, ClassMomentCone]
    members: tuple[str, ...]  # the nodes that take part
    history: tuple[Evaluation, ...] = ()  # what was seen of the loss so far
    damping: float = REFINE_DAMPING  # of the next step
    standard: Standard | None = None  # how long inputs are in all, where totals are looked at

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all of it as arrays, and text in which each array is a number."""
        arrays: list[NDArray[Any]] = []

        def place(array: NDArray[Any]) -> dict[str, int]:
            arrays.append(array)
            return {"array": len(arrays) - 1}

        values = {
            "cones": [[node, *cone.to_arrays()] for node, cone in self.cones.items()],
            "members": self.members,
            "history": [vars(seen) for seen in self.history],
            "damping": self.damping,
            "standard": self.standard and vars(self.standard),
        }
        text = np.frombuffer(json.dumps(values, default=place).encode(), dtype=np.uint8)
        return {_NOTES: text, **{f"{_PREFIX}/{n}": array for n, array in enumerate(arrays)}}

    @classmethod
    def of(cls, memory: Arrays) -> RefineMemory:
        """Read what `to_arrays` returned."""
        if _NOTES not in memory:
            raise CheckpointError("the run was started without refine: start it again")

        def replaced(found: dict[str, Any]) -> Any:
            return memory[f"{_PREFIX}/{found['array']}"] if found.keys() == {"array"} else found

        values = json.loads(bytes(memory[_NOTES]), object_hook=replaced)
        cones, standard = values["cones"], values["standard"]
        return cls(
            {node: ClassMomentCone.from_arrays(*cone) for node, *cone in cones},
            tuple(values["members"]),
            tuple(Evaluation(**{**s, "nodes": tuple(s["nodes"])}) for s in values["history"]),
            values["damping"],
            standard and Standard(**standard),
        )
