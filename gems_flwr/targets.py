"""What is to be predicted: one of several classes, or a number.

It decides what a model's outputs mean, which loss is minimised, and how good predictions are. A
`Task` has one, and so does every data set of the simulations; nobody else asks.

Losses of numbers are squared errors, as Keras has them (``mean_squared_error``): no factor of one
half. A number has no accuracy, so nothing reports one; what a person can read, in the number's own
unit, is the root of the mean squared error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from gems_flwr import scoring
from gems_flwr.errors import ModelError


class Target(Protocol):
    """What a model predicts of an example.

    Examples
    --------
    >>> from gems_flwr import Classes, Numbers, Target
    >>> def unit(target: Target):
    ...     return target.metrics[0]
    >>> unit(Classes()), unit(Numbers())
    ('accuracy', 'rmse')
    """

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what `score` returns, the one that a person reads first."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every example, given a model's outputs for a batch."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""

    def hits(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return which examples are predicted right; None where there is no such thing."""

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return what a model's outputs say, in double precision."""

    def score(self, predictions: NDArray, labels: NDArray) -> dict[str, float]:
        """Return how good predictions are, by metric."""


@dataclass(frozen=True)
class Classes:
    """One of several classes: logits, cross entropy, accuracy.

    Examples
    --------
    >>> import torch
    >>> from gems_flwr import Classes
    >>> Classes().loss(torch.zeros(3, 2), torch.tensor([0, 1, 1])).item()  # the logarithm of 2
    0.6931471824645996
    """

    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "balanced_accuracy", "loss")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every example."""
        return F.cross_entropy(outputs, targets, reduction="none")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy.

        Raises
        ------
        ModelError
            If the targets are numbers.
        """
        if targets.is_floating_point() and targets.ndim == 1:
            raise ModelError(
                "cross entropy needs the classes of the examples as whole numbers, got one "
                f"{targets.dtype} each: a task whose targets are numbers has target = Numbers()"
            )
        return F.cross_entropy(outputs, targets)

    def hits(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return which examples have their largest output at the true class."""
        return outputs.argmax(1) == targets

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return class probabilities, one row per example."""
        # Softmax in double: in single precision rows sum to 1 only to about 1e-7.
        return torch.softmax(outputs.double(), dim=1)

    def score(self, predictions: NDArray, labels: NDArray) -> dict[str, float]:
        """Return accuracy, balanced accuracy and cross entropy."""
        return scoring.score(predictions, labels)


@dataclass(frozen=True)
class Numbers:
    """One number for each example, such as a steering angle: squared error, no accuracy.

    Examples
    --------
    A task that says so is scored by it:

    >>> import torch
    >>> from gems_flwr import Numbers
    >>> outputs, truth = torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0])
    >>> Numbers().loss(outputs, truth).item()
    2.0
    >>> Numbers().score(Numbers().predictions(outputs).numpy(), truth.numpy())["rmse"]
    1.4142135623730951
    """

    metrics: ClassVar[tuple[str, ...]] = ("rmse", "loss")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of every example."""
        error = self._flat(outputs) - targets
        return error * error

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error.

        Raises
        ------
        ModelError
            If the model has not one output for each example.
        """
        return self.losses(outputs, targets).mean()

    def hits(self, outputs: Tensor, targets: Tensor) -> None:
        """Return nothing: a number is near or far, not right or wrong."""
        return None

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return one number for each example."""
        return self._flat(outputs).double()

    def score(self, predictions: NDArray, labels: NDArray) -> dict[str, float]:
        """Return the mean squared error and its root."""
        return scoring.number_score(predictions, labels)

    @staticmethod
    def _flat(outputs: Tensor) -> Tensor:
        # (n, 1) minus (n,) would be (n, n) without a word.
        if outputs.ndim != 2 or outputs.shape[1] != 1:
            raise ModelError(
                "a model of numbers has one output for each example, shape (n, 1), got "
                f"{tuple(outputs.shape)}"
            )
        return outputs[:, 0]
