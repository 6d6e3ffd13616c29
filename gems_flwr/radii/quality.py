"""When is a model good enough: by accuracy (2019) or by loss (2018).

Model Aggregation via Good-Enough Model Spaces (2019), Eq. 1: accuracy of at least epsilon.
Knowledge Aggregation via Good-Enough Model Spaces (2018), Section 3.1: mean loss of at most
epsilon; the loss here is the cross-entropy, as in its experiments.

Decided here: a tie for the highest score counts as wrong (else the zero model would be
perfect), and "accuracy of at least epsilon" means at least ``ceil(epsilon * n)`` samples.
A layer with one output is a logistic model of two classes: its rival score is zero.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gems_flwr.errors import OptionError


def required_correct(epsilon: float, count: int) -> int:
    """Return the smallest number of right answers among ``count`` that is good enough."""
    # The small term keeps 0.7 * 10 = 7.000000000000001 from asking for eight.
    return math.ceil(epsilon * count - 1e-9)


def two_sided(scores: Tensor) -> Tensor:
    """Return scores of shape (..., classes); one output becomes the pair (0, score)."""
    if scores.shape[-1] > 1:
        return scores
    return torch.cat([torch.zeros_like(scores), scores], dim=-1)


def class_margins(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the true class's score minus each class's score; infinite for itself.

    Parameters
    ----------
    scores : tensor of shape (n, C)
        C of at least 2.
    labels : int tensor of shape (n,)
        True classes.
    """
    index = labels[:, None]
    margins = scores.gather(1, index) - scores
    return margins.scatter(1, index, torch.inf)


@dataclasses.dataclass(frozen=True)
class Quality:
    """The model evaluation function Q.

    Parameters
    ----------
    epsilon : float
        Least accuracy, in (0, 1], or largest mean cross-entropy, above 0.
    measure : {"accuracy", "loss"}
        Which of the two.
    """

    epsilon: float
    measure: Literal["accuracy", "loss"] = "accuracy"

    def __post_init__(self) -> None:
        if self.measure not in ("accuracy", "loss"):
            raise OptionError(f"measure: expected accuracy or loss, got {self.measure!r}")
        high = 1.0 if self.measure == "accuracy" else math.inf
        if not 0 < self.epsilon <= high:
            raise OptionError(f"epsilon: expected a number in (0, {high:g}], got {self.epsilon}")

    def score(self, scores: Tensor, labels: Tensor) -> float:
        """Return the accuracy or the mean cross-entropy of class scores."""
        scores = two_sided(scores)
        if self.measure == "loss":
            return float(cross_entropy(scores, labels))
        right = class_margins(scores, labels).amin(dim=1) > 0
        return float(right.sum()) / len(labels)

    def good(self, scores: Tensor, labels: Tensor) -> bool:
        """Return whether class scores are good enough: Q = 1."""
        value = self.score(scores, labels)
        if self.measure == "loss":
            return value <= self.epsilon
        return round(value * len(labels)) >= required_correct(self.epsilon, len(labels))
