"""Strategies that keep every node's model: ensembles, and the local reference run.

The arrays of such a run are those of all members, under the keys ``member/<node>/<name>``;
`split_members` takes them apart again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args
from urllib.parse import quote, unquote

from numpy.typing import NDArray

from gems_flwr import scoring, wire
from gems_flwr.averaging import Arrays
from gems_flwr.runtime.seeding import generator
from gems_flwr.strategies.exchange import Answer
from gems_flwr.strategies.public_tuning import TunesOnPublicData

_PREFIX = "member"
# What the one model of arrays that were not joined from several is called.
ONLY_MODEL = "model"
Vote = Literal["majority", "softmax_mean"]


def join_members(members: Mapping[str, Arrays]) -> dict[str, NDArray]:
    """Return the arrays of several models as those of one."""
    return {
        f"{_PREFIX}/{quote(node, safe='')}/{name}": array
        for node, arrays in members.items()
        for name, array in arrays.items()
    }


def split_members(arrays: Arrays) -> dict[str, dict[str, NDArray]]:
    """Return the models that `join_members` joined, by node; one model alone is named ''."""
    members: dict[str, dict[str, NDArray]] = {}
    for key, array in arrays.items():
        prefix, _, rest = key.partition("/")
        node, _, name = rest.partition("/")
        if prefix == _PREFIX and name:
            members.setdefault(unquote(node), {})[name] = array
        else:
            members.setdefault("", {})[key] = array
    return members


def join_models(models: Mapping[str, Arrays]) -> dict[str, NDArray]:
    """Return the arrays of several models, by name, as those that `MultiModel` starts from."""
    return join_members(models)


def split_models(arrays: Arrays) -> dict[str, dict[str, NDArray]]:
    """Return the models that `join_models` joined, by name; one model alone is named ``model``."""
    members = split_members(arrays)
    return {ONLY_MODEL: members[""]} if set(members) == {""} else members


@dataclass(kw_only=True, eq=False)
class LocalModels(TunesOnPublicData):
    """The reference "local": every node trains alone; scores are means over the nodes.

    Parameters
    ----------
    **tuning
        See `TunesOnPublicData`; the server tunes each node's model by itself.
    """

    rounds_needed: ClassVar[int | None] = 1

    def aggregate(self, answers: Sequence[Answer[wire.ModelReply]]) -> Arrays:
        """Return all models, each fine-tuned, side by side."""
        return join_members({answer.node: self.tuned(answer.value.arrays) for answer in answers})

    def score(self, members: Sequence[NDArray], labels: NDArray) -> dict[str, float]:
        """Return the mean over the models of each one's score."""
        return scoring.mean_score(members, labels)


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
    """

    vote: Vote = "majority"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vote not in get_args(Vote):
            raise ValueError(f"vote must be one of {list(get_args(Vote))}, got '{self.vote}'")

    def score(self, members: Sequence[NDArray], labels: NDArray) -> dict[str, float]:
        """Score the vote. A majority has no probabilities, and so no loss."""
        if self.vote == "softmax_mean":
            return scoring.score(scoring.softmax_mean(members), labels)
        predicted = scoring.majority_vote(members, generator(self.seed, "ties"))
        return {
            "accuracy": scoring.accuracy(predicted, labels),
            "balanced_accuracy": scoring.balanced_accuracy(predicted, labels),
        }
