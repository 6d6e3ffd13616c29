"""What a node can do, without a word about messages.

Implement `Task` for your data and model, hand it to `task_client_app`, and every strategy of
this library can work with the node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from gems_flwr.errors import ModelError
from gems_flwr.targets import Classes, Target
from gems_flwr.typing import Arrays

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
    """One node's model and data.

    Attributes
    ----------
    target : Target
        What the model predicts: `Classes` unless a subclass says `Numbers`.

    Examples
    --------
    >>> import torch
    >>> from gems_flwr import Report, Task
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
    >>> task = Blobs()
    >>> task.train(task.build_model(), seed=0, config={}).num_examples
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
    def validation_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels on which good-enough spaces are built."""

    def training_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels from which class moments are taken; validation by default."""
        return self.validation_data()

    def loss(self, model: nn.Module) -> float:
        """Return the mean loss of `model` on the node's training data, at least 0.

        Cross entropy, or whatever the loss of `target` is. ``MultiModel(sampling="lvr")`` samples
        by it. The model may be on any device: the data go there.
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
        """Take back, before training, what `remember` returned the last time; nothing by default.

        For what a node keeps besides its model, such as the state of an optimiser. It lies in the
        node's own state and never crosses the network.
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
    >>> import torch
    >>> from gems_flwr import Report, Task, TaskSet, task_client_app
    >>> class Averaging(Task):
    ...     def build_model(self):
    ...         return torch.nn.Linear(2, 2)
    ...     def train(self, model, *, seed, config):
    ...         return Report(num_examples=10)
    ...     def evaluate(self, model, *, config):
    ...         return Report(num_examples=4, metrics={"accuracy": 1.0})
    ...     def validation_data(self):
    ...         return torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    >>> tasks = TaskSet({"faces": Averaging(), "words": Averaging()}, {"faces": 10, "words": 10})
    >>> tasks.task("faces").build_model()
    Linear(in_features=2, out_features=2, bias=True)
    >>> app = task_client_app(lambda context: tasks)
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
