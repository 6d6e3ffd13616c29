"""Making a merged layer fit a size budget.

2019, Section 4.5 trades size against accuracy by epsilon_j and m_epsilon, and never by a number
of neurons that a server can pay for. With many nodes unmatched neurons add up to more.

Decided here: two ways. ``drop`` leaves out the merged neurons of the least importance (the sum
over their members); what stays is still verified. ``cluster`` merges on, by k-means over the
merged neurons weighted by importance, and is not verified: whoever's ball does not hold the
new neuron is listed as dropped. Among nodes that may lie, `limit_each` bounds beforehand how
many places one node can take by itself.

A layer that must have one width and no other may also have too few neurons. Then groups are taken
apart again, the most important neurons first (`split_groups`), and if there are no more different
ones, neurons are added that do nothing (`pad`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from gems_flwr.devices import exact_device
from gems_flwr.moments.class_clusters import k_means
from gems_flwr.neuron_merging.distinct import Distinct
from gems_flwr.neuron_merging.merged_layer import Member, MergedLayer, in_balls
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.typing import Float

Budget = Literal["drop", "cluster"]


def prune(merged: MergedLayer, max_neurons: int) -> MergedLayer:
    """Return the most important merged neurons, the members of the others as dropped.

    Parameters
    ----------
    merged : MergedLayer
        What is too large, or not.
    max_neurons : int
        Neurons to keep, at least 1; of equal importance the earlier ones.
    """
    if len(merged) <= max_neurons:
        return merged
    best = np.argsort(-merged.importance, kind="stable")
    return _without(merged, best[max_neurons:].tolist())


def limit_each(merged: MergedLayer, max_alone: int) -> MergedLayer:
    """Return a layer in which no node has too many neurons that stand for it alone.

    Parameters
    ----------
    merged : MergedLayer
        Neurons of all nodes.
    max_alone : int
        Neurons that may have members of one and the same node only, at least 1; of each node the
        most important stay, of equal importance the earlier ones.
    """
    taken: Counter[int] = Counter()
    lost = []
    for i in np.argsort(-merged.importance, kind="stable").tolist():
        nodes = {node for node, _ in merged.origins[i]}
        if len(nodes) == 1:
            taken.update(nodes)
            if taken[nodes.pop()] > max_alone:
                lost.append(i)
    return _without(merged, lost) if lost else merged


def _without(merged: MergedLayer, positions: Sequence[int]) -> MergedLayer:
    """Return a layer without some of its neurons, whose members are listed as dropped."""
    keep = np.setdiff1d(np.arange(len(merged)), positions)
    held = {member for i in keep for member in merged.origins[i]}
    # A member of several neurons is lost with the last of them.
    lost = {member for i in positions for member in merged.origins[i]} - held
    return dataclasses.replace(
        merged,
        weights=merged.weights[keep],
        origins=tuple(merged.origins[i] for i in keep),
        dropped=tuple(sorted([*merged.dropped, *lost])),
        importance=merged.importance[keep],
    )


def shrink(
    merged: MergedLayer,
    layers: Sequence[NeuronBalls],
    max_neurons: int,
    seed: int,
    device: str = "cpu",
) -> MergedLayer:
    """Return at most so many neurons, each the weighted mean of a cluster of merged ones.

    Parameters
    ----------
    merged : MergedLayer
        What is too large, or not.
    layers : sequence of NeuronBalls
        What was merged; says whose ball holds the new neurons.
    max_neurons : int
        Clusters, at least 1.
    seed : int
        Seed of k-means.
    device : str
        Where k-means runs.
    """
    if len(merged) <= max_neurons:
        return merged
    # A neuron that adds nothing still has to go somewhere.
    weights = np.maximum(merged.importance, 1e-12 * merged.importance.max())
    if not weights.any():
        weights = np.ones(len(merged))
    where = exact_device(device)
    points = torch.from_numpy(merged.weights - merged.weights.mean(axis=0)).to(where)
    shares = torch.from_numpy(weights).to(where)
    labels = k_means(points, max_neurons, seed, weights=shares)[0].cpu().numpy()
    found = []
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        point = merged.weights[mine[0]]
        if len(mine) > 1:
            point = np.average(merged.weights[mine], axis=0, weights=weights[mine])
        members = sorted({member for i in mine for member in merged.origins[i]})
        found.append((float(merged.importance[mine].sum()), point, members))
    found.sort(key=lambda entry: -entry[0])
    return _checked(merged, layers, found)


def _checked(
    merged: MergedLayer,
    layers: Sequence[NeuronBalls],
    found: list[tuple[float, np.ndarray, list[Member]]],
) -> MergedLayer:
    origins, lost = [], set(merged.dropped)
    for _, point, members in found:
        held = in_balls(layers, np.broadcast_to(point, (len(members), len(point))), members)
        origins.append(tuple(m for m, is_held in zip(members, held, strict=True) if is_held))
        lost |= {m for m, is_held in zip(members, held, strict=True) if not is_held}
    lost -= {member for members in origins for member in members}
    return dataclasses.replace(
        merged,
        weights=np.stack([point for _, point, _ in found]),
        origins=tuple(origins),
        dropped=tuple(sorted(lost)),
        importance=np.array([total for total, _, _ in found]),
    )


def split_groups(
    items: Distinct, points: Float, groups: Sequence[Sequence[int]], wanted: int
) -> tuple[Float, list[list[int]]]:
    """Return at least `wanted` groups, where there are as many items: some stand alone again.

    Parameters
    ----------
    items : Distinct
        All neurons, most important first.
    points : array of shape (G, d)
        The merged neurons.
    groups : sequence of G sequences of int
        The items of each.
    wanted : int
        How many groups there are to be.
    """
    apart = [list(group) for group in groups]
    place = {item: i for i, group in enumerate(apart) for item in group}
    added: list[int] = []
    for item in range(len(items)):
        if len(apart) + len(added) >= wanted:
            break
        if len(apart[place[item]]) > 1:
            apart[place[item]].remove(item)
            added.append(item)
    alone = items.centers[added].astype(np.float64).reshape(len(added), points.shape[1])
    return np.concatenate([points, alone]), apart + [[item] for item in added]


def pad(merged: MergedLayer, width: int) -> MergedLayer:
    """Return a layer of at least `width` neurons; those that are added have no weights.

    Parameters
    ----------
    merged : MergedLayer
        What is too small, or not.
    width : int
        Neurons that there are to be.
    """
    missing = width - len(merged)
    if missing <= 0:
        return merged
    return dataclasses.replace(
        merged,
        weights=np.concatenate([merged.weights, np.zeros((missing, merged.weights.shape[1]))]),
        origins=merged.origins + ((),) * missing,
        importance=np.concatenate([merged.importance, np.zeros(missing)]),
    )
