"""Every node trains alone, once; the models of all vote (the papers' ensemble)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from numpy.typing import NDArray

from gems_flwr import scoring
from gems_flwr.errors import OptionError
from gems_flwr.runtime.seeding import generator
from gems_flwr.strategies.local_models import LocalModels

Vote = Literal["majority", "softmax_mean"]


@dataclass(kw_only=True, eq=False)
class Ensemble(LocalModels):
    """Every node trains alone, once; the models vote on each sample.

    Parameters
    ----------
    vote : {"majority", "softmax_mean"}
        Most predicted class, ties broken at random by `seed` (the papers' ensemble); or the
        class with the highest mean probability.
    **tuning
        See `LocalModels`.

    Examples
    --------
    The strategy knows how its models vote; it is started as `LocalModels` is:

    >>> import numpy as np
    >>> from gems_flwr import Ensemble
    >>> first = np.array([[0.9, 0.1], [0.6, 0.4]])  # class probabilities of two samples
    >>> second = np.array([[0.8, 0.2], [0.1, 0.9]])
    >>> Ensemble(vote="softmax_mean").score([first, second], np.array([0, 1]))["accuracy"]
    1.0
    """

    needs_classes: ClassVar[bool] = True

    vote: Vote = "majority"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vote not in get_args(Vote):
            raise OptionError(f"vote must be one of {list(get_args(Vote))}, got '{self.vote}'")

    def score(
        self, members: Sequence[NDArray], labels: NDArray, one: scoring.Score = scoring.score
    ) -> dict[str, float]:
        """Score the vote. A majority has no probabilities, and so no loss."""
        if self.vote == "softmax_mean":
            return one(scoring.softmax_mean(members), labels)
        predicted = scoring.majority_vote(members, generator(self.seed, "ties"))
        return {
            "accuracy": scoring.accuracy(predicted, labels),
            "balanced_accuracy": scoring.balanced_accuracy(predicted, labels),
        }
