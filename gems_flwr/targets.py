"""What is to be predicted: one of several classes, or a number.

It decides what a model's outputs mean, which loss is minimised and how good predictions are. The
loss of numbers is the squared error, as Keras' ``mean_squared_error``: no factor of one half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from gems_flwr import scoring
from gems_flwr.errors import ModelError


@dataclass(frozen=True)
class Classes:
    """One of several classes: logits, cross entropy, accuracy."""

    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "balanced_accuracy", "loss")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every example."""
        return F.cross_entropy(outputs, targets, reduction="none")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy; targets that are numbers are a ModelError."""
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
    """One number for each example, such as a steering angle: squared error, no accuracy."""

    metrics: ClassVar[tuple[str, ...]] = ("rmse", "loss")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of every example."""
        error = self._flat(outputs) - targets
        return error * error

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error; needs one output per example."""
        return self.losses(outputs, targets).mean()

    def hits(self, outputs: Tensor, targets: Tensor) -> None:
        """Return None: a number is near or far, not right or wrong."""

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return one number for each example."""
        return self._flat(outputs).double()

    def score(self, predictions: NDArray, labels: NDArray) -> dict[str, float]:
        """Return the mean squared error and its root."""
        return scoring.number_score(predictions, labels)

    @staticmethod
    def _flat(outputs: Tensor) -> Tensor:
        # (n, 1) minus (n,) would silently be (n, n).
        if outputs.ndim != 2 or outputs.shape[1] != 1:
            raise ModelError(
                "a model of numbers has one output for each example, shape (n, 1), got "
                f"{tuple(outputs.shape)}"
            )
        return outputs[:, 0]


Target = Classes | Numbers  # what a `Task` and a data set have
