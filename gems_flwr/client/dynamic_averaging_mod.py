"""The mod that lets a node keep its model, and send it only when it pays (Kamp et al. 2018).

It sits around the user's own train handler::

    app = ClientApp(mods=[dynamic_averaging_mod()])

and does nothing unless the server's strategy is one of local learners (`DynamicAveraging`,
`PeriodicAveraging`, `NoSync`). Then the handler trains the node's own model instead of one from
the message; the mod keeps it, and the reference, in the node's state (``context.state``), checks
the local condition ‖f − r‖² ≤ Δ, and takes the model out of the reply unless the condition is
violated or the server asks for it.

Decided here: the state changes only when the whole message has been worked through, so a fault in
the handler leaves the node as it was. A message of an earlier round than the node has seen is
refused; one of the same round is answered again without training, so the server may ask twice.
Integer arrays (batch-norm counters) stay the node's own when it is given a new model. Where models
travel as differences, the node keeps what rounding has taken from those that it sent. It adds that
to the next once it is given a new model, since then the last one was averaged; one that was lost on
its way is of no account, and whoever begins anew has nothing left over. So a node that is asked
again in the same round answers with the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord

from gems_flwr.averaging.distances import squared_distance
from gems_flwr.client.fault_reply_mod import fault_reply_mod, node_name
from gems_flwr.compression.difference_coding import (
    Form,
    PackedModel,
    decode,
    decode_whole,
    encode,
)
from gems_flwr.errors import OutdatedMessageError
from gems_flwr.runtime.flower_internals import ClientAppCallable, Mod
from gems_flwr.wire.asking import requested_averaging, wants_name
from gems_flwr.wire.averaging_replies import (
    SentModel,
    pack_averaging_reply,
    pack_needs_model,
    put_local_model,
    take_new_models,
)
from gems_flwr.wire.keys import (
    BATCHES,
    CORRECT_SHARE_SUM,
    LOCAL_LEFT_NEXT,
    LOCAL_LEFT_OVER,
    LOCAL_METRICS,
    LOCAL_MODEL,
    LOCAL_NOTES,
    LOCAL_REFERENCE,
    LOSS_SUM,
    NUM_EXAMPLES,
    SERVER_ROUND,
)
from gems_flwr.wire.model_replies import instruction_config
from gems_flwr.wire.quick_records import records_of
from gems_flwr.wire.records import only_model, to_numpy, to_record
from gems_flwr.wire.requests import AveragingRequest

Metrics = Mapping[str, int | float]

# Metrics that count something are added up over the steps of a message; of others the last counts.
_SUMS = (NUM_EXAMPLES, LOSS_SUM, CORRECT_SHARE_SUM, BATCHES)


@dataclass(frozen=True)
class _Memory:
    """What a node keeps between messages."""

    run: str
    model: ArrayRecord
    reference: ArrayRecord
    model_version: int
    reference_version: int
    round: int = 0
    metrics: Metrics = field(default_factory=dict)
    # What rounding has taken from models that were averaged, and what it took from the last one.
    left_over: ArrayRecord | None = None
    left_next: ArrayRecord | None = None


def dynamic_averaging_mod() -> Mod:
    """Return a mod that keeps the local model on the node; see the module's docstring.

    Examples
    --------
    The handler is yours; this one adds the node's number to each weight:

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from gems_flwr import InProcessGrid, PeriodicAveraging, dynamic_averaging_mod
    >>> app = ClientApp(mods=[dynamic_averaging_mod()])
    >>> @app.train()
    ... def train(message, context):
    ...     [w] = message.content["arrays"].to_numpy_ndarrays()
    ...     arrays = ArrayRecord([w + context.node_config["partition-id"]])
    ...     metrics = MetricRecord({"num-examples": 1})
    ...     return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
    >>> grid = InProcessGrid(app, nodes=3)
    >>> result = PeriodicAveraging(b=2).start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
    >>> result.arrays.to_numpy_ndarrays()
    [array([2., 2.])]
    """

    def guarded(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if wants_name(message.content):
            return fault_reply_mod(message, context, call_next)
        if requested_averaging(message.content) is None:
            return call_next(message, context)
        before = dict(context.state)
        reply = fault_reply_mod(message, context, lambda m, c: _answer(m, c, call_next))
        if reply.has_error():
            # Whatever the handler has put there belongs to a step that did not count.
            context.state.clear()
            context.state.update(before)
        return reply

    return guarded


def _answer(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    request = requested_averaging(message.content)
    assert request is not None
    server_round = cast(int, instruction_config(message.content)[SERVER_ROUND])
    memory = _recall(context, request)
    if memory is not None and server_round < memory.round:
        raise OutdatedMessageError(
            f"a message of round {server_round} came after round {memory.round}; it changes nothing"
        )
    model, reference = take_new_models(message.content)
    # Who is given the reference whole, as its model, begins anew from it.
    begins_anew = request.adopt and isinstance(model, PackedModel) and model.is_whole
    memory = _brought_up_to_date(
        memory,
        request,
        _unpacked(model, memory, request),
        _unpacked(reference, memory, request),
        begins_anew,
    )
    if memory is None:
        return Message(pack_needs_model(node_name(context)), reply_to=message)
    if request.steps and server_round > memory.round:
        trained = _train(memory, request.steps, server_round, message, context, call_next)
        if isinstance(trained, Message):
            return trained
        memory = trained
    distance = _distance(memory, request)
    due = request.send == "always" or (
        request.send == "violated" and distance is not None and not distance <= request.delta
    )
    sent: SentModel | None = memory.model if due else None
    if due and request.compress != "float32":
        memory, sent = _packed(memory, request.compress)
    _keep(context, memory)
    content = pack_averaging_reply(
        # A node that has not trained yet has nothing to report; the server drops such a reply.
        memory.metrics,
        name=node_name(context),
        squared_distance=distance,
        model=sent,
    )
    return Message(content, reply_to=message)


def _unpacked(
    sent: SentModel | None, memory: _Memory | None, request: AveragingRequest
) -> ArrayRecord | None:
    """Return what the server sent as arrays; None for a difference to what the node lacks."""
    if not isinstance(sent, PackedModel):
        return sent
    if sent.is_whole:
        return to_record(decode_whole(sent))
    if memory is None or memory.reference_version != request.base:
        return None
    return to_record(decode(sent, to_numpy(memory.reference), request.compress))


def _packed(memory: _Memory, form: Form) -> tuple[_Memory, PackedModel]:
    """Return the model as a difference to the reference, and what the node keeps of it."""
    left_over = None if memory.left_over is None else to_numpy(memory.left_over)
    encoded = encode(to_numpy(memory.model), to_numpy(memory.reference), form, left_over)
    return dataclasses.replace(memory, left_next=to_record(encoded.left_over)), encoded.packed


def _brought_up_to_date(
    memory: _Memory | None,
    request: AveragingRequest,
    model: ArrayRecord | None,
    reference: ArrayRecord | None,
    begins_anew: bool,
) -> _Memory | None:
    """Take over what the server sent; None if the node still lacks what it should have."""
    if memory is None:
        first_reference = model if request.adopt else reference
        if model is None or first_reference is None:
            return None
        return _Memory(request.run, model, first_reference, request.model, request.reference)
    if model is not None and request.model > memory.model_version:
        own = _with_own_integers(memory.model, model)
        memory = dataclasses.replace(
            memory,
            model=own,
            model_version=request.model,
            left_over=None if begins_anew else memory.left_next or memory.left_over,
            left_next=None,
        )
    new_reference = model if request.adopt else reference
    if new_reference is not None and request.reference > memory.reference_version:
        memory = dataclasses.replace(
            memory, reference=new_reference, reference_version=request.reference
        )
    fits = (memory.model_version, memory.reference_version) == (request.model, request.reference)
    return memory if fits else None


def _train(
    memory: _Memory,
    steps: int,
    server_round: int,
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
) -> _Memory | Message:
    """Let the handler train the local model, once per step; an error reply is passed on."""
    model, metrics = memory.model, dict[str, int | float]()
    for step in range(steps):
        put_local_model(message.content, model, server_round - steps + 1 + step)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        model = only_model(reply.content)
        new = _scalars(reply)
        sums = {key: metrics.get(key, 0) + new[key] for key in _SUMS if key in new}
        metrics = {**new, **sums}
    return dataclasses.replace(memory, model=model, round=server_round, metrics=metrics)


def _scalars(reply: Message) -> dict[str, int | float]:
    return {
        key: value
        for record in records_of(reply.content, MetricRecord).values()
        for key, value in record.items()
        if not isinstance(value, list)
    }


def _distance(memory: _Memory, request: AveragingRequest) -> float | None:
    if not request.measure and request.send != "violated":
        return None
    return squared_distance(to_numpy(memory.model), to_numpy(memory.reference), request.ignore)


def _with_own_integers(own: ArrayRecord, new: ArrayRecord) -> ArrayRecord:
    if all(array.dtype.startswith("float") for array in new.values()):
        return new
    return ArrayRecord(
        {
            name: array if array.dtype.startswith("float") else own.get(name, array)
            for name, array in new.items()
        }
    )


def _recall(context: Context, request: AveragingRequest) -> _Memory | None:
    """Return what the node has kept of this run; None if there is nothing, or not all of it."""
    state = context.state
    model, reference = state.get(LOCAL_MODEL), state.get(LOCAL_REFERENCE)
    notes, metrics = state.get(LOCAL_NOTES), state.get(LOCAL_METRICS)
    if not (
        isinstance(model, ArrayRecord)
        and isinstance(reference, ArrayRecord)
        and isinstance(notes, ConfigRecord)
        and isinstance(metrics, MetricRecord)
        and notes.get("run") == request.run
    ):
        return None
    left = [state.get(key) for key in (LOCAL_LEFT_OVER, LOCAL_LEFT_NEXT)]
    over, following = (each if isinstance(each, ArrayRecord) else None for each in left)
    return _Memory(
        run=request.run,
        model=model,
        reference=reference,
        model_version=cast(int, notes["model"]),
        reference_version=cast(int, notes["reference"]),
        round=cast(int, notes["round"]),
        metrics=cast(Metrics, dict(metrics)),
        left_over=over,
        left_next=following,
    )


def _keep(context: Context, memory: _Memory) -> None:
    state = context.state
    state[LOCAL_MODEL] = memory.model
    state[LOCAL_REFERENCE] = memory.reference
    state[LOCAL_METRICS] = MetricRecord(dict(memory.metrics))
    state[LOCAL_NOTES] = ConfigRecord(
        {
            "run": memory.run,
            "model": memory.model_version,
            "reference": memory.reference_version,
            "round": memory.round,
        }
    )
    for key, left in (
        (LOCAL_LEFT_OVER, memory.left_over),
        (LOCAL_LEFT_NEXT, memory.left_next),
    ):
        state.pop(key, None)
        if left is not None:
            state[key] = left
