"""What a `MultiModel` server asks of nodes: which models they have data for, and work on these.

A handler for one model serves several: it is called once for each model that the node trains, with
an ordinary message (``arrays``, and a ``config`` in which ``model`` names the model). What need not
travel stays on the node (``context.state``): current models whose losses are asked for, trained
models whose norms are, the last update that the server has used, SCAFFOLD's control variate.

A fault in one model's training drops this model from the reply; only if all fail is it an error. A
message of an earlier round than the node has seen is refused; in the same round no model is trained
twice. What a node has sent counts as its old update (or control variate) only after the server has
confirmed that it arrived; a node that has lost its state has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard, get_args

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.averaging import best_beta, flat, residual_norm, update_of
from gems_flwr.bounds import MAX_CAPACITY, MAX_EXAMPLES, MAX_NOTE_CHARACTERS
from gems_flwr.core import records as wire
from gems_flwr.core.question import NOTHING, ON_SERVER, Disclosure, Question
from gems_flwr.errors import BadReplyError, ModelError, OutdatedMessageError, describe_fault, shown
from gems_flwr.networks import LayerReader, count_samples, linear_layer, read_node_data
from gems_flwr.strategies.learner_questions import all_or_nothing, reported_numbers
from gems_flwr.strategies.multi_model.sampling import Action, ReportKind
from gems_flwr.typing import Arrays

if TYPE_CHECKING:
    from gems_flwr.node import Node, NodeOptions
    from gems_flwr.node.task import TaskSet

_NOTE, _JSON, _CAPACITY = "several-models", "json", "capacity"
# Records of one model each are "<kind>/<model>"; numbers are among its metrics.
_MODEL, _CONTROL = "model", "control"
_LOSS, _NORM, _BETA = "local-loss", "update-norm", "beta"


@dataclass(frozen=True)
class DataByModel:
    """A node's models by ``good_enough_mod(data, model={name: Net, …})``; as a `TaskSet`."""

    options: NodeOptions
    context: Context

    def _train(self, name: str) -> Any:
        assert self.options.data is not None
        return read_node_data(self.options.data(self.context)[name]).train

    @property
    def examples(self) -> dict[str, int]:
        """Training examples of each model, counted."""
        returned = self.options.data(self.context) if self.options.data else None
        if not isinstance(returned, Mapping):
            raise ModelError(
                "return {name of the model: (train, validation), …} from data(context), and write "
                "good_enough_mod(data, model={name: Net, …}): the server trains several models; "
                f"data(context) returned a {type(returned).__name__}"
            )
        trains = {name: read_node_data(each).train for name, each in returned.items()}
        return {name: 0 if data is None else count_samples(data) for name, data in trains.items()}

    @property
    def capacity(self) -> int:
        """Models that the node trains in a round at most."""
        capacity = self.options.capacity
        return capacity(self.context) if callable(capacity) else capacity

    def loss(self, name: str, arrays: Arrays, device: str) -> float:
        """Return the mean cross entropy of a model on its training data."""
        from torch.nn.functional import cross_entropy

        from gems_flwr.spaces.ball import LayerData

        builders = self.options.model if isinstance(self.options.model, Mapping) else {}
        module = builders[name]() if name in builders else None
        reader = LayerReader(arrays, module, device=device)
        layer = reader.output_layer(self._train(name))
        seen = reader.read(self._train(name), layer)
        data = LayerData(*linear_layer(arrays, layer, device), seen.inputs, seen.labels)
        return float(cross_entropy(*data.scores()))


def models_on(node: Node) -> TaskSet | DataByModel:
    """Return a node's several models: examples, capacity and losses."""
    several = node.options.several
    return DataByModel(node.options, node.context) if several is None else several(node.context)


@dataclass(frozen=True)
class Holdings:
    """Examples by model (above 0), and how many models a node trains in a round."""

    examples: Mapping[str, int]
    capacity: int


@dataclass(frozen=True)
class HoldingsQuestion(Question[Holdings]):
    """How many examples do you have for each model, and how many models can you train in a round?

    Examples of models that are not among the server's do not count.
    """

    kind: ClassVar[str] = "holdings"
    carries_model: ClassVar[bool] = False

    models: tuple[str, ...] = field(default=(), metadata=ON_SERVER)

    def discloses(self, node: Node) -> Disclosure:
        """Return that counts of examples are nothing beside trained models, which have them too."""
        return NOTHING

    def answer(self, node: Node) -> RecordDict:
        """Return examples and capacity."""
        several = models_on(node)
        examples = {key: int(count) for key, count in several.examples.items() if count > 0}
        text, capacity = json.dumps(examples), int(several.capacity)
        return RecordDict({_NOTE: ConfigRecord({_JSON: text, _CAPACITY: capacity})})

    def read(self, content: RecordDict) -> Holdings:
        """Return examples of the server's models, and the capacity."""
        note = content.get(_NOTE)
        if not isinstance(note, ConfigRecord):
            raise BadReplyError(f"expected a ConfigRecord '{_NOTE}' with the node's examples")
        examples, capacity = wire.read_json(note.get(_JSON), _NOTE), note.get(_CAPACITY)
        for model, count in examples.items():
            if not _is_count(count, MAX_EXAMPLES):
                raise BadReplyError(
                    f"examples of model '{model}' are {shown(count)}, expected a count of at most "
                    f"{MAX_EXAMPLES:g}"
                )
        if not _is_count(capacity, MAX_CAPACITY):
            raise BadReplyError(
                f"'{_CAPACITY}' is {shown(capacity)}, expected a whole number from 0 up to "
                f"{MAX_CAPACITY:,}"
            )
        return Holdings({m: examples[m] for m in self.models if examples.get(m)}, capacity)


@dataclass(frozen=True)
class ModelPart:
    """One model's part of a reply."""

    # Reported by the train handler.
    metrics: Mapping[str, float]
    num_examples: float
    arrays: Arrays | None = None
    # The change of the node's control variate (SCAFFOLD).
    control: NDArray | None = None
    # The local loss; ‖U‖ or ‖U − βh‖; β.
    loss: float | None = None
    norm: float | None = None
    beta: float | None = None


@dataclass(frozen=True)
class ModelsReply:
    """A checked reply: its parts by model, models that the node lacks, and failures."""

    parts: Mapping[str, ModelPart]
    needs: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AboutModels(Question[ModelsReply]):
    """What are the losses of these models; train them; send what you have trained.

    Models that the node lacks travel beside the question, as ``model/<name>``, and SCAFFOLD's
    control variates as ``control/<name>``.
    """

    kind: ClassVar[str] = "models"
    carries_model: ClassVar[bool] = False

    # What a node keeps from another run does not count.
    run: str
    # Report losses; train; send what was trained earlier in this round.
    action: Action
    # Which models, and the version of each.
    versions: Mapping[str, int]
    # The answer of training: the model, ‖U‖, or β and ‖U − βh‖. In the last two cases the trained
    # model stays on the node until it is to be sent.
    report: ReportKind = "model"
    # By model, the round of the last reply by this node that the server has used: what was sent
    # then is h, or SCAFFOLD's control variate of the node.
    settled: Mapping[str, int] = field(default_factory=dict)
    # Whether the node keeps the models that it is given.
    keep: bool = False
    # What models in replies must be like, and whether changes of control variates must come along.
    models: Mapping[str, Arrays] = field(default_factory=dict, metadata=ON_SERVER)
    with_control: bool = field(default=False, metadata=ON_SERVER)

    def __post_init__(self) -> None:
        counted = isinstance(self.versions, Mapping) and isinstance(self.settled, Mapping)
        self.check(
            {
                "action": (self.action in get_args(Action), f"one of {get_args(Action)}"),
                "report": (self.report in get_args(ReportKind), f"one of {get_args(ReportKind)}"),
                "versions": (counted and bool(self.versions), "numbers by model"),
                "run": (isinstance(self.run, str), "a text"),
            }
        )

    def discloses(self, node: Node) -> Disclosure:
        """Return that the answer is losses, or trained models or their norms."""
        return Disclosure("loss" if self.action == "losses" else "model")

    def answer(self, node: Node) -> RecordDict:
        """Work through the models; what failed leaves nothing behind on the node."""
        with all_or_nothing(node.state):
            return _Work(self, node).content()

    def beside(
        self, lacking: Mapping[str, ArrayRecord], controls: Mapping[str, ArrayRecord]
    ) -> dict[str, ArrayRecord]:
        """Return the records that travel beside the question."""
        models = {f"{_MODEL}/{name}": record for name, record in lacking.items()}
        return {**models, **{f"{_CONTROL}/{name}": record for name, record in controls.items()}}

    def read(self, content: RecordDict) -> ModelsReply:
        """Check every part; errors name the model and the key."""
        note = content.get(_NOTE)
        notes = wire.read_json(note.get(_JSON), _NOTE) if isinstance(note, ConfigRecord) else {}
        needs, failed = notes.get("needs", []), notes.get("failed", {})
        if not isinstance(needs, list) or not isinstance(failed, dict):
            raise BadReplyError(f"'{_NOTE}' must have a list 'needs' and an object 'failed'")
        needed, parts = set(map(str, needs)), {}
        for name in self.versions:
            if name in needed or name in failed:
                continue
            try:
                parts[name] = self._read_part(content, name)
            except BadReplyError as error:
                raise BadReplyError(f"model '{name}': {error}") from error
        return ModelsReply(
            parts,
            tuple(name for name in self.versions if name in needed),
            {n: str(failed[n])[:MAX_NOTE_CHARACTERS] for n in self.versions if n in failed},
        )

    def _read_part(self, content: RecordDict, name: str) -> ModelPart:
        metrics, expected = content.get(f"{wire.METRICS}/{name}"), self.models[name]
        if not isinstance(metrics, MetricRecord):
            raise BadReplyError(f"expected a MetricRecord '{wire.METRICS}/{name}'")
        single = RecordDict({wire.METRICS: metrics})
        if self.action == "losses":
            # The number of examples is known already.
            single[wire.METRICS] = MetricRecord({**metrics, wire.NUM_EXAMPLES: 1})
        arrays = None
        if self.action == "send" or (self.action == "train" and self.report == "model"):
            record = content.get(f"{_MODEL}/{name}")
            if not isinstance(record, ArrayRecord):
                raise BadReplyError("the model was asked for, but none came")
            single[wire.ARRAYS] = record
            arrays = wire.unpack_model_reply(single, expected).arrays
        reply = wire.unpack_metrics_reply(single)
        reported = wire.single_numbers(reply.metrics)
        numbers = {key: reported.pop(key, None) for key in (_LOSS, _NORM, _BETA)}
        trained = {"model": (), "norm": (_NORM,), "residual": (_NORM, _BETA)}[self.report]
        needed = {"losses": (_LOSS,), "train": trained, "send": ()}[self.action]
        for key in needed:
            value = numbers[key]
            if value is None:
                raise BadReplyError(f"metric '{key}' is missing or not a single number")
            if key != _BETA and value < 0:
                raise BadReplyError(f"metric '{key}' is {value}, expected at least 0")
        control = self._read_control(content, name) if self.with_control else None
        return ModelPart(reported, reply.num_examples, arrays, control, *numbers.values())

    def _read_control(self, content: RecordDict, name: str) -> NDArray:
        record, like = content.get(f"{_CONTROL}/{name}"), flat(self.models[name])
        if not isinstance(record, ArrayRecord) or len(record) != 1:
            raise BadReplyError(f"expected an ArrayRecord '{_CONTROL}/{name}' with one vector")
        return wire.checked_array(next(iter(record.values())), _CONTROL, like.shape, like.dtype)


class _Work:
    """One message on a node."""

    def __init__(self, question: AboutModels, node: Node) -> None:
        self.question, self.node = question, node
        self.received, self.memory = node.message.content, _Memory(node.state, question.run)
        self.weights, controls = _named(self.received, _MODEL), _named(self.received, _CONTROL)
        self.given = {name: _vector(each) for name, each in controls.items()}
        self.records: dict[str, MetricRecord | ArrayRecord | ConfigRecord] = {}

    def content(self) -> RecordDict:
        """Work through the models; return the reply."""
        self.memory.advance(self.node.round)
        needs, failed = [], {}
        work = {"losses": self._report_loss, "train": self._train, "send": self._send}
        for name in self.question.versions:
            try:
                if not work[self.question.action](name):
                    needs.append(name)
            except Exception as error:
                for kind in (wire.METRICS, _MODEL, _CONTROL):
                    self.records.pop(f"{kind}/{name}", None)
                failed[name] = describe_fault(error)
        if failed and len(failed) == len(self.question.versions):
            raise RuntimeError("; ".join(f"model '{n}': {why}" for n, why in failed.items()))
        self.memory.save()
        if needs or failed:
            note = json.dumps({"needs": needs, "failed": failed})
            self.records[_NOTE] = ConfigRecord({_JSON: note})
        return RecordDict(self.records)

    # One model each; False if the node lacks what it needs.

    def _report_loss(self, name: str) -> bool:
        weights = self._current(name)
        if weights is None:
            return False
        loss = models_on(self.node).loss(name, wire.to_numpy(weights), self.node.device)
        self._report(name, {}, {_LOSS: loss})
        return True

    def _train(self, name: str) -> bool:
        report, memory = self.question.report, self.memory
        if report != "model" and memory.get("held", name, self.node.round) is not None:
            self.records[f"{wire.METRICS}/{name}"] = memory.get("metrics", name)
            return True
        weights = self._current(name)
        if weights is None:
            return False
        memory.settle(name, self.question.settled.get(name, 0))
        trained, metrics = self._handle(name, weights)
        if report == "model":
            self.records[f"{_MODEL}/{name}"] = trained
            self._report(name, metrics, {})
            return True
        update = update_of(wire.to_numpy(weights), wire.to_numpy(trained))
        old = memory.vector("settled", name) if report == "residual" else None
        beta = best_beta(update, old)
        norm = {_NORM: residual_norm(update, old, beta)}
        self._report(name, metrics, norm if report == "norm" else {**norm, _BETA: beta})
        memory.put("held", name, trained, self.node.round)
        memory.put("metrics", name, self.records[f"{wire.METRICS}/{name}"])
        if report == "residual":
            memory.put("update", name, ArrayRecord([update]))
        return True

    def _send(self, name: str) -> bool:
        memory = self.memory
        held = memory.get("held", name, self.node.round)
        if held is None:
            return False
        self.records[f"{_MODEL}/{name}"] = held
        self.records[f"{wire.METRICS}/{name}"] = memory.get("metrics", name)
        update = memory.get("update", name)
        if update is not None:
            memory.put("sent", name, update, self.node.round)
        return True

    def _report(self, name: str, metrics: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
        own = {key: float(value) for key, value in numbers.items()}
        self.records[f"{wire.METRICS}/{name}"] = MetricRecord({**metrics, **own})

    def _current(self, name: str) -> ArrayRecord | None:
        """Return the global model in the version that is asked for, if the node has it."""
        version, weights = self.question.versions[name], self.weights.get(name)
        if weights is None:
            kept: ArrayRecord | None = self.memory.get("current", name, version)
            return kept
        if self.question.keep:
            self.memory.put("current", name, weights, version)
        return weights

    def _handle(self, name: str, weights: ArrayRecord) -> tuple[ArrayRecord, dict[str, Any]]:
        """Let the handler train one model."""
        from gems_flwr.node.scaffold import CORRECTION, vector_record

        config = self.received.get(wire.CONFIG)
        own = dict(config) if isinstance(config, ConfigRecord) else {}
        single = RecordDict(
            {wire.CONFIG: ConfigRecord({**own, _MODEL: name}), wire.ARRAYS: weights}
        )
        given, old = self.given.get(name), self.memory.vector("settled", name)
        if given is not None:
            old = np.zeros_like(given) if old is None else old
            single[CORRECTION] = vector_record(given - old)
        self.node.message.content = single
        reply = self.node.call_handler()
        if given is not None and old is not None:
            self._change_control(name, reply, old)
        return wire.only_model(reply), reported_numbers(reply)

    def _change_control(self, name: str, reply: RecordDict, old: NDArray) -> None:
        # SCAFFOLD's option II, c_i − c + (x − y) / (Kη), is the mean gradient if steps are plain
        # SGD; taken from the gradients themselves, K and η need not be known.
        from gems_flwr.node.scaffold import GRADIENT, vector_in

        gradient = vector_in(reply.pop(GRADIENT, None))
        if gradient is None:
            raise ModelError(
                "SCAFFOLD corrects every gradient, which this node's train handler does not do; "
                "use task_client_app, or another sampling than scaffold"
            )
        self.records[f"{_CONTROL}/{name}"] = ArrayRecord([gradient - old])
        self.memory.put("sent", name, ArrayRecord([gradient]), self.node.round)


class _Memory:
    """A node's records between messages, by kind and model; marks are rounds or versions."""

    def __init__(self, state: RecordDict, run: str) -> None:
        self._state = state
        note = state.get(_NOTE)
        text = note.get(_JSON) if isinstance(note, ConfigRecord) else None
        notes = json.loads(text) if isinstance(text, str) else {}
        if notes.get("run") != run:
            for key in [k for k in state if k.startswith(f"{_NOTE}/")]:
                del state[key]
            notes = {"run": run, "round": 0, "marks": {}}
        self._notes = notes

    def advance(self, number: int) -> None:
        """Note the round; one before it is over."""
        if number < self._notes["round"]:
            raise OutdatedMessageError(
                f"a message of round {number} came after round {self._notes['round']}; it changes "
                "nothing"
            )
        self._notes["round"] = number

    def get(self, kind: str, model: str, mark: int | None = None) -> Any:
        """Return a record; with a mark only if it has that one."""
        key = _key(kind, model)
        fits = mark is None or self._notes["marks"].get(key) == mark
        return self._state.get(key) if fits else None

    def vector(self, kind: str, model: str) -> NDArray | None:
        record = self.get(kind, model)
        return None if record is None else _vector(record)

    def put(self, kind: str, model: str, record: Any, mark: int | None = None) -> None:
        self._state[_key(kind, model)] = record
        if mark is not None:
            self._notes["marks"][_key(kind, model)] = mark

    def settle(self, model: str, settled_round: int) -> None:
        """Let what was sent in a round that the server has used take the place of the old."""
        if self.get("sent", model, settled_round) is not None:
            self.put("settled", model, self._state.pop(_key("sent", model)), settled_round)
        elif self.get("settled", model, settled_round) is None:
            self._state.pop(_key("settled", model), None)

    def save(self) -> None:
        self._state[_NOTE] = ConfigRecord({_JSON: json.dumps(self._notes)})


def _key(kind: str, model: str) -> str:
    return f"{_NOTE}/{kind}/{model}"


def _named(content: RecordDict, prefix: str) -> dict[str, ArrayRecord]:
    return {
        key.removeprefix(f"{prefix}/"): record
        for key, record in wire.records_of(content, ArrayRecord).items()
        if key.startswith(f"{prefix}/")
    }


def _vector(record: ArrayRecord) -> NDArray:
    return next(iter(wire.to_numpy(record).values()))


def _is_count(value: object, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
