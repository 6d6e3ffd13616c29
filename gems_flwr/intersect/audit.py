"""Leave-one-out: whether the others would be better off without a node.

Moments cannot be told from data that nobody else has. Scores can: every node measures a model on
its own held-out data. For each suspect the server aggregates without it and asks the *other* nodes
for their scores. If most of them gain, the suspect is convicted and left out; then all over again,
for one liar may hide another.

Decided here: the gain of a suspect is the (lower) *median* over the other nodes, so that half of
them cannot have an honest node convicted by lying about their scores. The price: harm to fewer than
half of the nodes (a node that claims the classes of one other, say) convicts nobody. And an honest
node costs the others something by rivalry alone: without its classes there is less to confuse, up
to 2 points (median) on MNIST by label over five nodes. `LEAST_GAIN` is above that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

LEAST_GAIN = 0.05

M = TypeVar("M")


@dataclasses.dataclass(frozen=True, eq=False)
class Audit(Generic[M]):
    """What an audit came to.

    Parameters
    ----------
    model : M
        Aggregated without those convicted.
    nodes : tuple of str
        Who it was aggregated from.
    scores : mapping from str to float
        Of the model, by node.
    convicted : mapping from str to float
        Who was left out, in this order, and what the others gained (median).
    """

    model: M
    nodes: tuple[str, ...]
    scores: Mapping[str, float]
    convicted: Mapping[str, float]


def audit_nodes(
    nodes: Sequence[str],
    aggregate: Callable[[Sequence[str]], M],
    score: Callable[[M], Mapping[str, float]],
    *,
    at_least: int = 2,
) -> Audit[M]:
    """Leave out, one after the other, nodes without which most others do clearly better.

    Parameters
    ----------
    nodes : sequence of str
        Who contributes.
    aggregate : callable
        Gets the names of some nodes, returns the model from their contributions.
    score : callable
        Gets a model, returns each node's accuracy with it, from 0 to 1.
    at_least : int
        How many nodes must be left. Never are half of the nodes or more convicted.
    """
    remaining = list(nodes)
    model = aggregate(remaining)
    scores = score(model)
    convicted: dict[str, float] = {}
    while len(remaining) > max(2, at_least) and 2 * (len(convicted) + 1) < len(nodes):
        trials: list[tuple[float, str, M, Mapping[str, float]]] = []
        for suspect in remaining:
            rest = [node for node in remaining if node != suspect]
            other = aggregate(rest)
            theirs = score(other)
            changes = [theirs[n] - scores[n] for n in rest if n in theirs and n in scores]
            gain = _lower_median(changes)
            trials.append((gain, suspect, other, theirs))
        gain, worst, other, theirs = max(trials, key=lambda trial: trial[0])
        if gain < LEAST_GAIN:
            break
        convicted[worst] = gain
        remaining.remove(worst)
        model, scores = other, theirs
    return Audit(model, tuple(remaining), scores, convicted)


def _lower_median(values: Sequence[float]) -> float:
    """Return the lower of the two middle values, so that half of the votes convict nobody."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
