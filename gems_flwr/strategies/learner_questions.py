"""What a server asks of nodes that keep their own models, both sides (Kamp et al. 2018).

The user's own train handler is called with the node's model in place of one from the server; model
and reference are kept in the node's state (``context.state``).

- A fault leaves the state as it was. A message of an earlier round than the node has seen is
  refused; one of the same round is answered again without training.
- Every model that the server hands out has a number, and a question names the numbers of the model
  and of the reference that the node must have, which come along where it lacks them. So repeated
  messages are harmless, and a node that has lost its state answers that it needs the model.
- With ``compress`` models travel as differences to the reference. What rounding takes from a model
  that a node sends, it adds to the next one once it is given another model, since then this one was
  averaged. So a node that is asked again in a round answers with the same bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from gems_flwr.averaging import squared_distance
from gems_flwr.bounds import MAX_EXAMPLES, MAX_STEPS
from gems_flwr.carriers import open_packed, pack_bytes, packed_models, unpack_bytes
from gems_flwr.compression import FORMS, Form, PackedModel, decode, decode_whole, encode
from gems_flwr.core import records as wire
from gems_flwr.core.question import NOTHING, ON_SERVER, Disclosure, Question
from gems_flwr.errors import BadReplyError, OutdatedMessageError
from gems_flwr.typing import Arrays

if TYPE_CHECKING:
    from gems_flwr.node import Node

# What handlers may report of a learner: mean losses and shares of right answers, before each
# update, summed over batches; added up over nodes and rounds, and not averaged.
LOSS_SUM, CORRECT_SHARE_SUM, BATCHES = "loss-sum", "correct-share-sum", "batches"
# What is added up over the steps of one message; of other metrics the last counts.
_SUMS = (wire.NUM_EXAMPLES, LOSS_SUM, CORRECT_SHARE_SUM, BATCHES)
REFERENCE, SQUARED_DISTANCE = "reference", "squared-distance"
_LEARNER, _NEEDS_MODEL = "learner", "needs-model"

Send = Literal["never", "violated", "always"]


@dataclass(frozen=True)
class LearnerReply(wire.MetricsReply):
    """A validated reply of a learner; ‖f − r‖² and the model are there if they were asked for."""

    num_examples: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)  # type: ignore[assignment]
    squared_distance: float | None = None
    arrays: Arrays | None = None


# --- the questions ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LearnerQuestion(Question[LearnerReply | None]):
    """Base of the questions to single learners; who needs a model reads as None."""

    carries_model: ClassVar[bool] = False

    # What a node keeps from another run does not count.
    run: str
    # Numbers of the model that the node was given last, and of the reference.
    model: int
    reference: int
    # Whether the model in this message is the new reference, too.
    adopt: bool = False
    compress: Form = "float32"
    # Number of the reference that the model in this message is a difference to, where it is one.
    base: int = 0
    # The reference, which a model must be like, and whom this is for.
    expected: Arrays = field(
        default_factory=dict, kw_only=True, repr=False, compare=False, metadata=ON_SERVER
    )
    node: str = field(default="", kw_only=True, metadata=ON_SERVER)

    def __post_init__(self) -> None:
        self.check({"compress": (self.compress in FORMS, f"one of {list(FORMS)}")})

    def answer(self, node: Node) -> RecordDict:
        """Bring the learner up to date and let it reply; a fault leaves its state as it was."""
        with all_or_nothing(node.state):
            learner = Learner.updated(node, self)
            if learner is None:
                return RecordDict({_LEARNER: ConfigRecord({_NEEDS_MODEL: True})})
            content = self.reply(node, learner)
            learner.keep(node)
            return content

    def reply(self, node: Node, learner: Learner) -> RecordDict:
        """Let the learner work, and return what it answers: nothing by default."""
        return RecordDict()

    def read(self, content: RecordDict) -> LearnerReply | None:
        """Read a reply; None if the node needs the model."""
        note = content.get(_LEARNER)
        if isinstance(note, ConfigRecord) and note.get(_NEEDS_MODEL) is True:
            return None
        return self.read_reply(content)

    def read_reply(self, content: RecordDict) -> LearnerReply:
        """Check and read the reply of a node that is up to date."""
        return LearnerReply()

    def read_model(self, content: RecordDict, *, needed: bool) -> Arrays | None:
        """Return the model in a reply, if there is one."""
        if self.compress != "float32" and (packed := packed_models(content)):
            if len(packed) > 1 or wire.records_of(content, ArrayRecord):
                raise BadReplyError("expected one packed model and no arrays beside it")
            [(key, model)] = packed.items()
            wire.put_instead(content, key, open_packed(model, self.expected, self.compress))
        if wire.records_of(content, ArrayRecord):
            whole = RecordDict({wire.ARRAYS: wire.only_model(content), wire.METRICS: _ONE_EXAMPLE})
            return wire.unpack_model_reply(whole, self.expected).arrays
        if needed:
            raise BadReplyError("the model was asked for, but none came")
        return None


@dataclass(frozen=True)
class Learn(LearnerQuestion):
    """How far is your model from the reference, after some more steps?"""

    kind: ClassVar[str] = "learn"

    # How often to call the train handler.
    steps: int = 1
    # Whether the model is to be sent: ``violated`` if ‖f − r‖² > delta.
    send: Send = "never"
    delta: float = 0.0
    # Whether ‖f − r‖² is to be reported.
    measure: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            {
                "send": (self.send in get_args(Send), f"one of {list(get_args(Send))}"),
                "steps": (
                    type(self.steps) is int and 0 < self.steps <= MAX_STEPS,
                    f"a whole number from 1 to {MAX_STEPS:,}",
                ),
                "delta": (self.delta >= 0, "at least 0"),
            }
        )

    def discloses(self, node: Node) -> Disclosure:
        """A trained model, or its distance to the reference."""
        return Disclosure("model")

    def reply(self, node: Node, learner: Learner) -> RecordDict:
        """Train, measure, and send the model if it is due."""
        learner.train(node, self.steps)
        numbers: dict[str, Any] = dict(learner.metrics)
        due = self.send == "always"
        if self.is_measured:
            distance = numbers[SQUARED_DISTANCE] = learner.squared_distance
            due = due or (self.send == "violated" and not distance <= self.delta)
        content = RecordDict({wire.METRICS: MetricRecord(numbers)})
        if due:
            content[wire.ARRAYS] = learner.send(self.compress)
        return content

    @property
    def is_measured(self) -> bool:
        """Whether the reply must have the distance."""
        return self.measure or self.send == "violated"

    def read_reply(self, content: RecordDict) -> LearnerReply:
        """Read metrics, distance and model."""
        arrays = self.read_model(content, needed=self.send == "always")
        reply = wire.unpack_metrics_reply(content)
        metrics = wire.single_numbers(reply.metrics)
        distance = metrics.pop(SQUARED_DISTANCE, None)
        if self.is_measured and distance is None:
            raise BadReplyError(f"metric '{SQUARED_DISTANCE}' is missing or not a single number")
        if distance is not None and distance < 0:
            raise BadReplyError(f"metric '{SQUARED_DISTANCE}' is {distance}, expected at least 0")
        # What is summed over the nodes is divided by these.
        for name, least in ((BATCHES, 1), (CORRECT_SHARE_SUM, 0)):
            value = metrics.get(name, least)
            if value and not least <= value <= MAX_EXAMPLES:
                raise BadReplyError(
                    f"metric '{name}' is {value}, expected 0, or {least} to {MAX_EXAMPLES:g}"
                )
        return LearnerReply(reply.num_examples, metrics, distance, arrays)


@dataclass(frozen=True)
class SendModel(LearnerQuestion):
    """What is your model?"""

    kind: ClassVar[str] = "send-model"

    def discloses(self, node: Node) -> Disclosure:
        """A trained model."""
        return Disclosure("model")

    def reply(self, node: Node, learner: Learner) -> RecordDict:
        """Send the model as it is."""
        return RecordDict({wire.ARRAYS: learner.send(self.compress)})

    def read_reply(self, content: RecordDict) -> LearnerReply:
        """Read the model."""
        return LearnerReply(arrays=self.read_model(content, needed=True))


@dataclass(frozen=True)
class TakeModel(LearnerQuestion):
    """Do you have the model to go on from?"""

    kind: ClassVar[str] = "take-model"

    def discloses(self, node: Node) -> Disclosure:
        """Nothing but that the node has it."""
        return NOTHING


# --- on the node --------------------------------------------------------------------------------

_ONE_EXAMPLE = MetricRecord({wire.NUM_EXAMPLES: 1})
_STATE = {name: f"learner-{name}" for name in ("model", "reference", "left_over", "left_next")}
_STATE_NOTES, _STATE_METRICS = "learner-notes", "learner-metrics"
_NOTES = ("run", "model_version", "reference_version", "round")


@dataclass
class Learner:
    """What a node keeps between messages."""

    run: str
    # f and r, and the numbers of what the server gave the node.
    model: ArrayRecord
    reference: ArrayRecord
    model_version: int
    reference_version: int
    # Up to which round it has trained, and what the handler reported of that.
    round: int = 0
    metrics: Mapping[str, int | float] = field(default_factory=dict)
    # What rounding has taken from models that were averaged, and what it took from the last one.
    left_over: ArrayRecord | None = None
    left_next: ArrayRecord | None = None

    @classmethod
    def kept(cls, node: Node, run: str) -> Learner | None:
        """Return what the node has kept of a run; None if there is nothing, or not all of it."""
        state = node.state
        found: dict[str, Any] = {name: state.get(key) for name, key in _STATE.items()}
        records: dict[str, Any] = {n: r for n, r in found.items() if isinstance(r, ArrayRecord)}
        notes, metrics = state.get(_STATE_NOTES), state.get(_STATE_METRICS)
        if not (
            {"model", "reference"} <= records.keys()
            and isinstance(notes, ConfigRecord)
            and isinstance(metrics, MetricRecord)
            and notes.get("run") == run
        ):
            return None
        learner = cls(metrics=cast(Any, dict(metrics)), **records, **cast(Any, dict(notes)))
        if node.round < learner.round:
            raise OutdatedMessageError(
                f"a message of round {node.round} came after round {learner.round}; it changes "
                "nothing"
            )
        return learner

    @classmethod
    def updated(cls, node: Node, asked: LearnerQuestion) -> Learner | None:
        """Return the learner with what the server sent; None if it still lacks what it needs."""
        learner = cls.kept(node, asked.run)
        came = [_take(node.message.content, key) for key in (wire.ARRAYS, REFERENCE)]
        model, reference = (_opened(sent, learner, asked) for sent in came)
        if asked.adopt:
            reference = model
        if learner is None:
            if model is None or reference is None:
                return None
            return cls(asked.run, model, reference, asked.model, asked.reference)
        if model is not None and asked.model > learner.model_version:
            # Whoever is given the reference whole, as its model, restarts: nothing is left over.
            restarts = asked.adopt and isinstance(came[0], PackedModel) and came[0].is_whole
            learner.model = _with_own_integers(learner.model, model)
            learner.model_version = asked.model
            learner.left_over = None if restarts else learner.left_next or learner.left_over
            learner.left_next = None
        if reference is not None and asked.reference > learner.reference_version:
            learner.reference, learner.reference_version = reference, asked.reference
        has = (learner.model_version, learner.reference_version)
        return learner if has == (asked.model, asked.reference) else None

    def train(self, node: Node, steps: int) -> None:
        """Let the handler train the model, once per step, unless this round's steps are done."""
        if not steps or node.round <= self.round:
            return
        content, model, metrics = node.message.content, self.model, dict[str, int | float]()
        config = cast(ConfigRecord, content[wire.CONFIG])
        for step in range(steps):
            # What an ordinary train handler expects: a model and a round.
            config[wire.SERVER_ROUND] = node.round - steps + 1 + step
            content[wire.ARRAYS] = model
            reply = node.call_handler()
            model = wire.only_model(reply)
            new = reported_numbers(reply)
            metrics = {**new, **{k: metrics.get(k, 0) + new[k] for k in _SUMS if k in new}}
        self.model, self.round, self.metrics = model, node.round, metrics

    @property
    def squared_distance(self) -> float:
        """Return ‖f − r‖²."""
        return squared_distance(wire.to_numpy(self.model), wire.to_numpy(self.reference))

    def send(self, form: Form) -> ArrayRecord | ConfigRecord:
        """Return the model as it travels; remember what rounding takes."""
        if form == "float32":
            return self.model
        left_over = None if self.left_over is None else wire.to_numpy(self.left_over)
        encoded = encode(wire.to_numpy(self.model), wire.to_numpy(self.reference), form, left_over)
        self.left_next = wire.to_record(encoded.left_over)
        return pack_bytes(encoded.packed)

    def keep(self, node: Node) -> None:
        """Write everything into the node's state."""
        for name, key in _STATE.items():
            node.state.pop(key, None)
            if (record := getattr(self, name)) is not None:
                node.state[key] = record
        node.state[_STATE_METRICS] = MetricRecord(dict(self.metrics))
        node.state[_STATE_NOTES] = ConfigRecord({name: getattr(self, name) for name in _NOTES})


@contextlib.contextmanager
def all_or_nothing(state: RecordDict) -> Iterator[None]:
    """Undo all changes of a state if there is an error, those by the handler included."""
    before = dict(state)
    try:
        yield
    except BaseException:
        state.clear()
        state.update(before)
        raise


def reported_numbers(content: RecordDict) -> dict[str, int | float]:
    """Return what a handler reported, without lists."""
    records = wire.records_of(content, MetricRecord).values()
    return {k: v for each in records for k, v in each.items() if not isinstance(v, list)}


def _take(content: RecordDict, key: str) -> ArrayRecord | PackedModel | None:
    record = content.pop(key, None)
    if isinstance(record, ConfigRecord):
        return unpack_bytes(record, key)
    return record if isinstance(record, ArrayRecord) else None


def _opened(
    sent: ArrayRecord | PackedModel | None, learner: Learner | None, asked: LearnerQuestion
) -> ArrayRecord | None:
    """Return what the server sent as arrays; None for a difference to what the node lacks."""
    if not isinstance(sent, PackedModel):
        return sent
    if sent.is_whole:
        return wire.to_record(decode_whole(sent))
    if learner is None or learner.reference_version != asked.base:
        return None
    return wire.to_record(decode(sent, wire.to_numpy(learner.reference), asked.compress))


def _with_own_integers(own: ArrayRecord, new: ArrayRecord) -> ArrayRecord:
    integers = [name for name, array in new.items() if not array.dtype.startswith("float")]
    return ArrayRecord({**new, **{n: own.get(n, new[n]) for n in integers}}) if integers else new
