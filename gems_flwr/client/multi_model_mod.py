"""The mod that lets a handler for one model serve a node that trains several models.

It sits around the user's own train handler::

    app = ClientApp(mods=[multi_model_mod(data, model={"faces": Net, "words": Reader})])

and does nothing unless the server's strategy is `MultiModel`. Then it calls the handler once for
each model that the node is to train, with an ordinary message: ``arrays``, and a ``config`` in
which ``model`` names the model. It joins the replies, and keeps on the node (``context.state``)
what need not travel: current models whose losses are asked for, trained models of which only the
norm of the update was asked for, the last update that the server has used, and SCAFFOLD's control
variate.

Decided here: a fault in one model's training drops this model from the reply; only if all fail is
it an error reply. A message of an earlier round than the node has seen is refused; in the same
round a model is not trained twice. What a node has sent counts as its old update (or control
variate) only after the server has said that it arrived; a node that has lost its state has none.
SCAFFOLD needs the handler's help, since it changes every gradient: the reply must carry the mean
gradient (`wire.put_gradient`), as that of `task_client_app` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from gems_flwr.averaging.steps import best_beta, residual_norm, update_of
from gems_flwr.client.compression_mod import with_packed_models
from gems_flwr.client.fault_reply_mod import fault_reply_mod, node_name
from gems_flwr.client.several_data import (
    Builders,
    DataByModel,
    counted_holdings,
    cross_entropy_loss,
)
from gems_flwr.devices import check_device
from gems_flwr.errors import ModelError, OptionError, OutdatedMessageError, describe_fault
from gems_flwr.runtime.flower_internals import ClientAppCallable, Mod
from gems_flwr.wire.asking import requested_models, wants_name
from gems_flwr.wire.keys import MULTI_MODEL, SERVER_ROUND
from gems_flwr.wire.model_replies import instruction_config
from gems_flwr.wire.multi_model_replies import (
    Holdings,
    pack_holdings,
    pack_models_reply,
    pack_part,
    take_gradient,
)
from gems_flwr.wire.multi_model_requests import (
    sent_controls,
    sent_weights,
    single_instruction,
    vector_of,
    vector_record,
)
from gems_flwr.wire.quick_records import records_of
from gems_flwr.wire.records import only_model, to_numpy
from gems_flwr.wire.requests import ModelsRequest

Loss = Callable[[Context, str, ArrayRecord], float]


def multi_model_mod(
    data: DataByModel | None = None,
    *,
    model: Builders | None = None,
    holdings: Callable[[Context], Mapping[str, int]] | None = None,
    capacity: Callable[[Context], int] = lambda _: 1,
    loss: Loss | None = None,
    device: str | None = None,
) -> Mod:
    """Return a mod for nodes with several models; see the module's docstring.

    Parameters
    ----------
    data : callable, optional
        Gets the node's context, returns for each model's name ``(train, validation)`` as for
        `good_enough_mod`. Holdings and losses are taken from the training data.
    model : mapping from str to callable, optional
        By name, what returns the torch module; a model that is a single linear layer can do
        without.
    holdings : callable, optional
        Gets the node's context, returns how many training examples it has for each model; counted
        in `data` by default. A model that is missing, or has 0, is never trained here.
    capacity : callable, optional
        Returns B_i: the most models that the node trains in a round; 1 by default.
    loss : callable, optional
        Gets the context, a model's name and its arrays; returns the model's mean loss on the
        node's training data, at least 0; with `data`, the cross entropy by default. Only rules
        that ask for losses need it, such as ``sampling="lvr"``.
    device : str, optional
        Where the cross entropy is computed; see `good_enough_mod`.

    Examples
    --------
    A handler for one model serves two; which one it trains, ``config["model"]`` says.

    >>> import numpy as np
    >>> from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, MultiModel, join_models, multi_model_mod
    >>> mod = multi_model_mod(
    ...     holdings=lambda context: {"faces": 60, "words": 5},
    ...     capacity=lambda context: 2,
    ...     loss=lambda context, name, arrays: float(np.abs(arrays["w"].numpy() - 1).mean()),
    ... )
    >>> app = ClientApp(mods=[mod])
    >>> @app.train()
    ... def train(message, context):
    ...     rate = {"faces": 0.5, "words": 0.1}[message.content["config"]["model"]]
    ...     weights = message.content["arrays"]["w"].numpy()
    ...     arrays = ArrayRecord({"w": Array(weights + rate * (1 - weights))})
    ...     metrics = MetricRecord({"num-examples": 10})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> start = join_models({name: {"w": np.zeros(2)} for name in ("faces", "words")})
    >>> initial = ArrayRecord({name: Array(array) for name, array in start.items()})
    >>> result = MultiModel(budget=3).start(InProcessGrid(app, 2), initial, num_rounds=2)
    >>> result.details["examples"]["0"], result.details["capacities"]["0"]
    ({'faces': 60, 'words': 5}, 2)
    """
    if device is not None:
        check_device(device)
    if data is not None:
        holdings = holdings or counted_holdings(data)
        loss = loss or cross_entropy_loss(data, model or {}, device)
    if holdings is None:
        raise OptionError(
            "write multi_model_mod(data, model={'faces': Net, …}), where data(context) returns "
            "{'faces': (train, validation), …}; or give holdings="
        )
    count = holdings

    def introduce(message: Message, context: Context) -> Message:
        held = Holdings(count(context), capacity(context))
        return Message(pack_holdings(held, name=node_name(context)), reply_to=message)

    def guarded(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if wants_name(message.content):
            return fault_reply_mod(message, context, call_next)
        request = requested_models(message.content)
        if request is None:
            return call_next(message, context)
        if request.action == "introduce":
            return fault_reply_mod(message, context, introduce)

        def answer(message: Message, context: Context) -> Message:
            before = dict(context.state)
            asked = _ModelsMessage(message, context, call_next, request, loss)
            reply = fault_reply_mod(message, context, lambda *_: asked.answer())
            if reply.has_error():
                # Whatever the handler has put there belongs to training that did not count.
                context.state.clear()
                context.state.update(before)
            return reply

        return with_packed_models(message, context, answer)

    return guarded


class _ModelsMessage:
    """One message and what comes of it."""

    def __init__(
        self,
        message: Message,
        context: Context,
        call_next: ClientAppCallable,
        request: ModelsRequest,
        loss: Loss | None,
    ) -> None:
        self.message, self.context, self.call_next = message, context, call_next
        self.content = message.content
        self.request, self.loss = request, loss
        self.round = cast(int, instruction_config(message.content)[SERVER_ROUND])
        self.memory = _Memory(context, request.run)
        self.weights = sent_weights(message.content)
        self.given = sent_controls(message.content)
        self.records: dict[str, MetricRecord] = {}
        self.models: dict[str, ArrayRecord] = {}
        self.controls: dict[str, NDArray] = {}

    def answer(self) -> Message:
        """Work through the models and reply."""
        if self.round < self.memory.round:
            raise OutdatedMessageError(
                f"a message of round {self.round} came after round {self.memory.round}; "
                "it changes nothing"
            )
        self.memory.round = self.round
        needs, failed = [], {}
        work = {"losses": self._report_loss, "train": self._train, "send": self._send}
        for name in self.request.versions:
            try:
                if not work[self.request.action](name):
                    needs.append(name)
            except Exception as error:
                failed[name] = describe_fault(error)
        if failed and len(failed) == len(self.request.versions):
            raise RuntimeError("; ".join(f"model '{n}': {why}" for n, why in failed.items()))
        self.memory.save()
        content = pack_models_reply(
            self.records,
            name=node_name(self.context),
            models=self.models,
            controls=self.controls,
            needs=tuple(needs),
            failed=failed,
        )
        return Message(content, reply_to=self.message)

    # --- one model; False if the node lacks what it needs ------------------------------------

    def _report_loss(self, name: str) -> bool:
        weights = self._current(name)
        if weights is None:
            return False
        if self.loss is None:
            raise ModelError(
                "write multi_model_mod(data, model=…), or give loss=: the server asks for local "
                "losses (sampling=lvr)"
            )
        self.records[name] = pack_part({}, loss=self.loss(self.context, name, weights))
        return True

    def _train(self, name: str) -> bool:
        report, memory = self.request.report, self.memory
        if report != "model" and memory.marked("held", name) == self.round:
            self.records[name] = cast(MetricRecord, memory.get("held-metrics", name))
            return True
        weights = self._current(name)
        if weights is None:
            return False
        memory.settle(name, self.request.settled.get(name, 0))
        trained, metrics = self._handle(name, weights)
        if report == "model":
            self.models[name] = trained
            self.records[name] = pack_part(metrics)
            return True
        update = update_of(to_numpy(weights), to_numpy(trained))
        old = memory.vector("settled", name) if report == "residual" else None
        beta = best_beta(update, old)
        norm = residual_norm(update, old, beta)
        told = {"norm": norm} if report == "norm" else {"norm": norm, "beta": beta}
        self.records[name] = pack_part(metrics, **told)
        memory.put("held", name, trained, self.round)
        memory.put("held-metrics", name, self.records[name])
        if report == "residual":
            memory.put("update", name, vector_record(update))
        return True

    def _send(self, name: str) -> bool:
        memory = self.memory
        held = memory.get("held", name)
        if not isinstance(held, ArrayRecord) or memory.marked("held", name) != self.round:
            return False
        self.models[name] = held
        self.records[name] = cast(MetricRecord, memory.get("held-metrics", name))
        update = memory.get("update", name)
        if update is not None:
            memory.put("sent", name, update, self.round)
        return True

    def _current(self, name: str) -> ArrayRecord | None:
        """Return the global model in the version that is asked for, if the node has it."""
        version, weights = self.request.versions[name], self.weights.get(name)
        if weights is None:
            kept = self.memory.get("current", name)
            same = self.memory.marked("current", name) == version
            return kept if same and isinstance(kept, ArrayRecord) else None
        if self.request.keep:
            self.memory.put("current", name, weights, version)
        return weights

    def _handle(self, name: str, weights: ArrayRecord) -> tuple[ArrayRecord, dict[str, Any]]:
        """Let the handler train one model."""
        correction = old = None
        if name in self.given:
            old = self.memory.vector("settled", name)
            if old is None:
                old = np.zeros_like(self.given[name])
            correction = self.given[name] - old
        self.message.content = single_instruction(self.content, name, weights, correction)
        reply = self.call_next(self.message, self.context)
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        if old is not None:
            self._advance_control(name, reply.content, old)
        trained = only_model(reply.content)
        metrics = {
            key: value
            for record in records_of(reply.content, MetricRecord).values()
            for key, value in record.items()
            if not isinstance(value, list)
        }
        return trained, metrics

    def _advance_control(self, name: str, content: RecordDict, old: NDArray) -> None:
        # SCAFFOLD's option II, c_i − c + (x − y) / (Kη), is the mean gradient if steps are plain
        # SGD; taken from the gradients themselves, nobody needs to know K and η.
        gradient = take_gradient(content)
        if gradient is None:
            raise ModelError(
                "SCAFFOLD corrects every gradient, which this node's train handler does not do; "
                "use task_client_app, or another sampling than scaffold"
            )
        self.controls[name] = gradient - old
        self.memory.put("sent", name, vector_record(gradient), self.round)


class _Memory:
    """What a node keeps between messages, by kind and model; marks are rounds or versions."""

    def __init__(self, context: Context, run: str) -> None:
        self._state = context.state
        note = self._state.get(MULTI_MODEL)
        text = note.get("json") if isinstance(note, ConfigRecord) else None
        notes = json.loads(text) if isinstance(text, str) else {}
        if notes.get("run") != run:
            for key in [k for k in self._state if k.startswith(f"{MULTI_MODEL}/")]:
                del self._state[key]
            notes = {"run": run, "round": 0, "marks": {}}
        self._notes = notes

    @property
    def round(self) -> int:
        """The last round that the node has seen."""
        return int(self._notes["round"])

    @round.setter
    def round(self, number: int) -> None:
        self._notes["round"] = number

    def get(self, kind: str, model: str) -> object:
        """Return a record, or None."""
        return self._state.get(_key(kind, model))

    def vector(self, kind: str, model: str) -> NDArray | None:
        """Return the vector in a record, or None."""
        record = self.get(kind, model)
        return vector_of(record) if isinstance(record, ArrayRecord) else None

    def marked(self, kind: str, model: str) -> int | None:
        """Return the round or version of a record."""
        mark = self._notes["marks"].get(_key(kind, model))
        return mark if isinstance(mark, int) else None

    def put(self, kind: str, model: str, record: Any, mark: int | None = None) -> None:
        """Keep a record."""
        self._state[_key(kind, model)] = record
        if mark is not None:
            self._notes["marks"][_key(kind, model)] = mark

    def settle(self, model: str, settled_round: int) -> None:
        """Let what was sent in a round, which the server has used, take the place of the old."""
        if self.marked("sent", model) == settled_round and self.get("sent", model) is not None:
            self.put("settled", model, self._state.pop(_key("sent", model)), settled_round)
        elif self.marked("settled", model) != settled_round:
            self._state.pop(_key("settled", model), None)

    def save(self) -> None:
        """Keep the notes."""
        self._state[MULTI_MODEL] = ConfigRecord({"json": json.dumps(self._notes)})


def _key(kind: str, model: str) -> str:
    return f"{MULTI_MODEL}/{kind}/{model}"
