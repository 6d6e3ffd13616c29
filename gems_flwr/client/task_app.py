"""A ready ClientApp around a `Task`.

A user with a training handler of their own does not need it: our mods go around any handler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from gems_flwr.client.compression_mod import compression_mod
from gems_flwr.client.dynamic_averaging_mod import dynamic_averaging_mod
from gems_flwr.client.fault_reply_mod import fault_reply_mod, node_name
from gems_flwr.client.freezing import freeze_layers
from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.gradients import corrected_gradients
from gems_flwr.client.limits import NodeLimits
from gems_flwr.client.multi_model_mod import multi_model_mod
from gems_flwr.client.secure_sum_mod import secure_sum_mod
from gems_flwr.client.statistics_mod import statistics_mod
from gems_flwr.client.task import Task, TaskSet
from gems_flwr.devices import check_device, chosen_device
from gems_flwr.errors import ModelError, RefusedError
from gems_flwr.networks.inputs import batches
from gems_flwr.networks.node_data import NodeData
from gems_flwr.networks.surgery import resize_model
from gems_flwr.runtime.flower_internals import ClientAppCallable, Mod
from gems_flwr.runtime.seeding import derive_seed
from gems_flwr.wire.asking import (
    requested_averaging,
    requested_models,
    requested_statistics,
)
from gems_flwr.wire.keys import (
    ARRAYS,
    INTRODUCE,
    RUN_SEED,
    SERVER_ROUND,
    SHARE_EXAMPLES,
    TASK_MEMORY,
)
from gems_flwr.wire.model_replies import (
    instruction_config,
    pack_examples_reply,
    pack_metrics_reply,
    pack_model_reply,
    pack_name,
)
from gems_flwr.wire.multi_model_replies import put_gradient
from gems_flwr.wire.multi_model_requests import gradient_correction, named_model
from gems_flwr.wire.records import to_numpy, to_record


def task_client_app(
    make_task: Callable[[Context], Task | TaskSet],
    *,
    limits: NodeLimits | Callable[[Context], NodeLimits] | None = None,
    device: str | Callable[[Context], str] = "cpu",
) -> ClientApp:
    """Return a ClientApp that trains and evaluates a task.

    Parameters
    ----------
    make_task : callable
        Gets the node's context, returns its task, or a `TaskSet` if it trains several models
        (`MultiModel`). Called once per message: cache what is expensive, such as reading data.
    limits : NodeLimits, or callable that gets the node's context and returns them, optional
        What the node gives away at most; by default what its ``--node-config`` says.
    device : str, or callable that gets the node's context and returns it, default "cpu"
        Where spaces, statistics and losses are computed; see `good_enough_mod`. Where a task trains
        and evaluates is its own affair: its `train` and `evaluate` get the model on the CPU.

    Returns
    -------
    ClientApp
        Handles ``train``, with or without a request for a good-enough space, for the balls of a
        layer's neurons (at the widths and with the frozen layers that the server wants), for
        dynamic averaging, for statistics to merge by or for several models, and ``evaluate``;
        says its name when asked for it; every fault in the task becomes an error reply.

    Examples
    --------
    >>> import torch
    >>> from flwr.app import ArrayRecord
    >>> from gems_flwr import FedAvg, InProcessGrid, Report, Task, task_client_app
    >>> class Blobs(Task):
    ...     inputs, labels = torch.randn(64, 2), torch.arange(64) % 2
    ...     def build_model(self):
    ...         return torch.nn.Linear(2, 2)
    ...     def train(self, model, *, seed, config):
    ...         step = torch.optim.SGD(model.parameters(), lr=0.1)
    ...         loss = torch.nn.functional.cross_entropy(model(self.inputs), self.labels)
    ...         loss.backward()
    ...         step.step()
    ...         return Report(64, {"loss": loss.item()})
    ...     def evaluate(self, model, *, config):
    ...         return Report(64, {"loss": self.loss(model)})
    ...     def validation_data(self):
    ...         return self.inputs, self.labels
    >>> app = task_client_app(lambda context: Blobs())
    >>> initial = ArrayRecord(Blobs().build_model().state_dict())
    >>> result = FedAvg().start(InProcessGrid(app, nodes=2), initial, num_rounds=2)
    >>> len(result.train_metrics_clientapp)
    2
    """
    app = ClientApp()
    if isinstance(device, str):
        check_device(device)

    def where(context: Context) -> str:
        return device(context) if callable(device) else device

    def bounds(context: Context) -> NodeLimits:
        if limits is None:
            return NodeLimits.of_node(context.node_config)
        return limits(context) if callable(limits) else limits

    def limits_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        # Before all that answer: models and statistics of every kind pass here.
        bounds(context).check_message(message)
        return call_next(message, context)

    # Outermost: it masks what the others answer, and does nothing unless a secure sum is asked for.
    guarded: list[Mod] = [secure_sum_mod(), fault_reply_mod, limits_mod, compression_mod()]

    def spaces_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        # Inert unless the server asks for a space.
        task = _pick(make_task(context), message)
        mod = good_enough_mod(
            lambda _: _data_of(task),
            model=task.build_model,
            limits=bounds(context),
            device=where(context),
        )
        return mod(message, context, call_next)

    def measuring_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        # Inert unless the server asks for statistics.
        if requested_statistics(message.content) is None:
            return call_next(message, context)
        task = _pick(make_task(context), message)
        mod = statistics_mod(
            lambda _: _data_of(task),
            model=task.build_model,
            limits=bounds(context),
            device=where(context),
        )
        return mod(message, context, call_next)

    def several_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        # Inert unless the server trains several models.
        if requested_models(message.content) is None:
            return call_next(message, context)
        mod = multi_model_mod(
            holdings=lambda context: _several(make_task(context)).examples,
            capacity=lambda context: _several(make_task(context)).capacity,
            loss=lambda context, name, arrays: _loss(
                _several(make_task(context)).task(name), arrays, where(context)
            ),
        )
        return mod(message, context, call_next)

    def learning_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        # Inert unless the model lives on the node.
        if requested_averaging(message.content) is None:
            return call_next(message, context)
        return dynamic_averaging_mod()(message, context, call_next)

    @app.train(mods=[*guarded, several_mod, learning_mod, spaces_mod, measuring_mod])
    def train(message: Message, context: Context) -> Message:
        made = make_task(context)
        task = _pick(made, message)
        model = _load_model(task, message.content)
        config = instruction_config(message.content)
        # The same numbers for the same node and round, whoever runs first.
        seed = derive_seed(
            _as_int(config.get(RUN_SEED)),
            "train",
            _as_int(config.get(SERVER_ROUND)),
            node_name(context),
            *_among_several(made, message),
        )
        freeze_layers(model, message)
        memory_key = "/".join([TASK_MEMORY, *_among_several(made, message)])
        kept = context.state.get(memory_key)
        if isinstance(kept, ArrayRecord):
            task.recall(to_numpy(kept))
        with corrected_gradients(model, gradient_correction(message.content)) as gradients:
            report = task.train(model, seed=seed, config=config)
        arrays = ArrayRecord(model.state_dict())
        if memory := task.remember():
            context.state[memory_key] = to_record(memory)
        content = pack_model_reply(
            arrays, report.metrics, num_examples=report.num_examples, name=node_name(context)
        )
        if gradients is not None:
            put_gradient(content, gradients.mean())
        return Message(content, reply_to=message)

    @app.evaluate(mods=guarded)
    def evaluate(message: Message, context: Context) -> Message:
        task = _pick(make_task(context), message)
        model = _load_model(task, message.content)
        report = task.evaluate(model, config=instruction_config(message.content))
        return Message(
            pack_metrics_reply(
                report.metrics, num_examples=report.num_examples, name=node_name(context)
            ),
            reply_to=message,
        )

    # The question of servers of earlier versions.
    @app.query(INTRODUCE.split(".")[1], mods=guarded)
    def introduce(message: Message, context: Context) -> Message:
        return Message(pack_name(node_name(context)), reply_to=message)

    @app.query(SHARE_EXAMPLES.split(".")[1], mods=guarded)
    def share(message: Message, context: Context) -> Message:
        if not bounds(context).share_examples:
            raise RefusedError("share_examples", "raw data stays here; only simulations share it")
        features, labels = _pick(make_task(context), message).shared_examples()
        reply = pack_examples_reply(features, labels, name=node_name(context))
        return Message(reply, reply_to=message)

    return app


class _WhenRead:
    """Data that a task is asked for only if somebody reads them."""

    def __init__(self, get: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._get = get

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self._get())


def _data_of(task: Task) -> NodeData:
    return NodeData(_WhenRead(task.training_data), _WhenRead(task.validation_data))


def _load_model(task: Task, content: RecordDict) -> nn.Module:
    model = task.build_model()
    record = content.get(ARRAYS)
    if not isinstance(record, ArrayRecord):
        raise ModelError(f"the message has no ArrayRecord '{ARRAYS}'")
    return resize_model(model, to_numpy(record))


def _pick(made: Task | TaskSet, message: Message) -> Task:
    return made.task(named_model(message.content)) if isinstance(made, TaskSet) else made


def _several(made: Task | TaskSet) -> TaskSet:
    if not isinstance(made, TaskSet):
        raise ModelError("the server trains several models, but make_task returned a single task")
    return made


def _among_several(made: Task | TaskSet, message: Message) -> list[str]:
    """Return the model's name where there is more than one: a node's only model needs none."""
    name = named_model(message.content)
    return [name] if isinstance(made, TaskSet) and len(made.tasks) > 1 and name else []


def _loss(task: Task, arrays: ArrayRecord, device: str) -> float:
    model = task.build_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    return task.loss(model.to(chosen_device(device)))


def _as_int(value: object) -> int:
    # Another strategy than ours may send no seed and no round: then they count as 0.
    return value if isinstance(value, int) else 0
