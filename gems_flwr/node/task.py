"""A node's model and data as a `Task`, and the ready ClientApp around it.

An app with a train handler of its own does not need it: `good_enough_mod` goes around any handler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor, nn

from gems_flwr.core.flower import ClientAppCallable
from gems_flwr.core.records import (
    ARRAYS,
    CONFIG,
    RUN_SEED,
    SERVER_ROUND,
    pack_reply,
    to_numpy,
    to_record,
)
from gems_flwr.core.run import derive_seed
from gems_flwr.devices import check_device, chosen_device
from gems_flwr.errors import ModelError
from gems_flwr.networks import NodeData, batches, resize_model
from gems_flwr.node.limits import NodeLimits
from gems_flwr.node.mod import NodeOptions, freeze_layers, node_name, respond, whole_number
from gems_flwr.node.scaffold import corrected_gradients
from gems_flwr.targets import Classes, Target
from gems_flwr.typing import Arrays

# Under which key a node keeps what its task remembers; in the config, which model to train.
TASK_MEMORY, MODEL = "task-memory", "model"
_CHUNK = 4096


@dataclass(frozen=True)
class Report:
    """What training or evaluation came to.

    Parameters
    ----------
    num_examples : int
        Samples used, greater than 0: the node's weight in averages.
    metrics : mapping from str to float
        Scalars such as ``loss`` and ``accuracy``.

    Examples
    --------
    >>> from gems_flwr import Report
    >>> Report(num_examples=120, metrics={"loss": 0.3}).metrics["loss"]
    0.3
    """

    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class Task(ABC):
    """One node's model and data; `task_client_app` has one that trains.

    Attributes
    ----------
    target : Target
        What the model predicts: `Classes` unless a subclass says `Numbers`.

    Examples
    --------
    >>> import torch
    >>> from gems_flwr import Report, Task
    >>> class Still(Task):
    ...     def build_model(self):
    ...         return torch.nn.Linear(2, 2)
    ...     def train(self, model, *, seed, config):
    ...         return Report(64)
    ...     def evaluate(self, model, *, config):
    ...         return Report(64, {"loss": self.loss(model)})
    ...     def validation_data(self):
    ...         return torch.zeros(64, 2), torch.arange(64) % 2
    >>> task = Still()
    >>> task.evaluate(task.build_model(), config={}).num_examples
    64
    """

    target: Target = Classes()

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return a model with the right architecture; the server's weights are loaded into it."""

    @abstractmethod
    def train(self, model: nn.Module, *, seed: int, config: Mapping[str, Any]) -> Report:
        """Train `model` in place on the node's training data.

        Parameters
        ----------
        model : torch.nn.Module
            Holds the weights that the server sent, at the server's widths. Weights that do not
            require gradients belong to layers that must stay as they are.
        seed : int
            Source of all randomness: differs by node and round, the same in every repetition.
        config : mapping
            The train config of the strategy's ``start``, with ``server-round``.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, *, config: Mapping[str, Any]) -> Report:
        """Score `model` on the node's own held-out data, changing nothing."""

    @abstractmethod
    def validation_data(self) -> tuple[Tensor, Tensor]:
        """Return inputs and labels on which good-enough spaces are built."""

    def training_data(self) -> tuple[Tensor, Tensor]:
        """Return inputs and labels from which class moments are taken; validation by default."""
        return self.validation_data()

    def loss(self, model: nn.Module) -> float:
        """Return the mean loss of `model`, which may be on any device, on the training data.

        Cross entropy, or whatever the loss of `target` is.
        """
        inputs, labels = self.training_data()
        was_training = model.training
        model.eval()
        where = next((weight.device for weight in model.parameters()), inputs.device)
        # Some at a time, unless they are there already.
        size = max(1, len(labels)) if where == inputs.device else _CHUNK
        total = 0.0
        with torch.no_grad():
            for x, y in zip(torch.split(inputs, size), torch.split(labels, size), strict=True):
                part = float(self.target.loss(model(x.to(where)), y.to(where)))
                total += part * (len(y) / len(labels))
        model.train(was_training)
        return total

    def recall(self, memory: Arrays) -> None:  # noqa: B027 - most tasks have nothing to recall
        """Take back, before training, what `remember` returned the last time.

        Such as the state of an optimiser; it is in the node's own state and never sent.
        """

    def remember(self) -> Arrays:
        """Return, after training, the arrays to keep until the next time; none by default."""
        return {}

    def shared_examples(self) -> tuple[NDArray, NDArray]:
        """Return raw training inputs and labels, as stored; only for pooled reference runs."""
        raise NotImplementedError(f"{type(self).__name__} shares no data")


@dataclass(frozen=True)
class TaskSet:
    """The tasks of a node that trains several models.

    Parameters
    ----------
    tasks : mapping from str to Task
        By the name of the model.
    examples : mapping from str to int
        Training examples of each; a task with none is never asked for.
    capacity : int, default 1
        The most models that the node trains in a round, at least 0.

    Examples
    --------
    >>> from gems_flwr import TaskSet
    >>> tasks = TaskSet({"faces": ..., "words": ...}, examples={"faces": 10, "words": 20})
    >>> tasks.task("faces")
    Ellipsis
    """

    tasks: Mapping[str, Task]
    examples: Mapping[str, int]
    capacity: int = 1

    def task(self, name: str | None) -> Task:
        """Return the task of a model."""
        if name is None or name not in self.tasks:
            raise ModelError(
                f"this node has the models {sorted(self.tasks)}, and the message is about "
                f"{'none in particular' if name is None else repr(name)}"
            )
        return self.tasks[name]

    def loss(self, name: str, arrays: Arrays, device: str) -> float:
        """Return a model's mean loss on its task's training data."""
        task = self.task(name)
        model = task.build_model()
        model.load_state_dict({key: torch.as_tensor(array) for key, array in arrays.items()})
        return task.loss(model.to(chosen_device(device)))


def task_client_app(
    make_task: Callable[[Context], Task | TaskSet],
    *,
    limits: NodeLimits | Callable[[Context], NodeLimits] | None = None,
    device: str | Callable[[Context], str] = "cpu",
) -> ClientApp:
    """Return a ClientApp that trains and evaluates a task, and answers every strategy here.

    Parameters
    ----------
    make_task : callable
        Gets the node's context, returns its task, or a `TaskSet` if it trains several models
        (`MultiModel`). Called once per message: cache what is expensive, such as reading data.
    limits : NodeLimits, or callable that gets the node's context and returns them, optional
        What the node gives away at most; by default what its ``--node-config`` says.
    device : str, or callable that gets the node's context and returns it, default "cpu"
        Where spaces, statistics and losses are computed; see `good_enough_mod`. A task's `train`
        and `evaluate` get the model on the CPU.

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
    if isinstance(device, str):
        check_device(device)

    def task_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        made = _Made(make_task, message, context)
        options = NodeOptions(
            data=lambda _: made.data(),
            model=lambda: made.task.build_model(),
            limits=limits(context) if callable(limits) else limits,
            device=device(context) if callable(device) else device,
            examples=lambda _: made.task.shared_examples(),
            several=lambda _: made.several,
        )
        return respond(options, message, context, call_next)

    app = ClientApp(mods=[task_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        made = _Made(make_task, message, context)
        task, config = made.task, _config_of(message)
        model = _load_model(task, message.content)
        # The same numbers for the same node and round, whoever runs first.
        seed = derive_seed(
            whole_number(config.get(RUN_SEED)),
            "train",
            whole_number(config.get(SERVER_ROUND)),
            node_name(context),
            *made.among_several,
        )
        freeze_layers(model, message)
        memory_key = "/".join([TASK_MEMORY, *made.among_several])
        kept = context.state.get(memory_key)
        if isinstance(kept, ArrayRecord):
            task.recall(to_numpy(kept))
        with corrected_gradients(model, message.content) as gradient:
            report = task.train(model, seed=seed, config=config)
        state = model.state_dict()
        arrays = to_record({name: each.detach().cpu().numpy() for name, each in state.items()})
        if memory := task.remember():
            context.state[memory_key] = to_record(memory)
        content = pack_reply(
            report.metrics,
            num_examples=report.num_examples,
            name=node_name(context),
            arrays=arrays,
        )
        content.update(gradient)
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        task = _Made(make_task, message, context).task
        report = task.evaluate(_load_model(task, message.content), config=_config_of(message))
        content = pack_reply(
            report.metrics, num_examples=report.num_examples, name=node_name(context)
        )
        return Message(content, reply_to=message)

    return app


@dataclass(frozen=True)
class _Made:
    """What `make_task` returns for a message, and which of several tasks that is about."""

    make_task: Callable[[Context], Task | TaskSet]
    message: Message
    context: Context

    @cached_property
    def all(self) -> Task | TaskSet:
        return self.make_task(self.context)

    @property
    def name(self) -> str | None:
        name = _config_of(self.message).get(MODEL)
        return name if isinstance(name, str) else None

    @property
    def task(self) -> Task:
        return self.all.task(self.name) if isinstance(self.all, TaskSet) else self.all

    @property
    def several(self) -> TaskSet:
        if not isinstance(self.all, TaskSet):
            raise ModelError("the server trains several models, but make_task returned one task")
        return self.all

    @property
    def among_several(self) -> list[str]:
        """The model's name where there is more than one: a node's only model needs none."""
        several = isinstance(self.all, TaskSet) and len(self.all.tasks) > 1
        return [self.name] if several and self.name else []

    def data(self) -> NodeData:
        task = self.task
        return NodeData(_WhenRead(task.training_data), _WhenRead(task.validation_data))


@dataclass(frozen=True)
class _WhenRead:
    """Data that a task is asked for only if something reads them."""

    get: Callable[[], tuple[Tensor, Tensor]]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self.get())


def _config_of(message: Message) -> dict[str, Any]:
    config = message.content.get(CONFIG)
    return dict(config) if isinstance(config, ConfigRecord) else {}


def _load_model(task: Task, content: RecordDict) -> nn.Module:
    model = task.build_model()
    record = content.get(ARRAYS)
    if not isinstance(record, ArrayRecord):
        raise ModelError(f"the message has no ArrayRecord '{ARRAYS}'")
    return resize_model(model, to_numpy(record))
