"""Merging the hidden neurons of many nodes into one layer.

Model Aggregation via Good-Enough Model Spaces (2019), Section 3.2, step 3. Four ways, one value:

- ``kmeans``: the papers' (`neuron_clusters`), a chosen number of clusters;
- ``verified``: one pass with a proof per group (`one_pass`), for many nodes;
- ``pairs``: every pair that meets, as in 2018 (`all_pairs`);
- ``concat``: nothing merges but equal neurons; as wide and as faithful as it gets.

Decided here: the result depends on the balls and the nodes' order alone. How a node numbers
its neurons changes nothing but the indices in `MergedLayer.origins`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from gems_flwr.errors import OptionError
from gems_flwr.neuron_merging.all_pairs import merge_all_pairs
from gems_flwr.neuron_merging.budget import Budget, limit_each, pad, prune, shrink, split_groups
from gems_flwr.neuron_merging.distinct import Distinct, distinct_neurons
from gems_flwr.neuron_merging.merged_layer import MergedLayer, MergeMethod
from gems_flwr.neuron_merging.neuron_clusters import merge_in_clusters
from gems_flwr.neuron_merging.one_pass import merge_in_one_pass
from gems_flwr.spaces.checks import check_integer
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.typing import Float


def merge_neurons(
    layers: Sequence[NeuronBalls],
    method: MergeMethod,
    *,
    clusters: int = 100,
    max_neurons: int | None = None,
    exact: bool = False,
    max_alone: int | None = None,
    within_node: bool | None = None,
    budget: Budget = "drop",
    seed: int,
    device: str = "cpu",
) -> MergedLayer:
    """Return one layer that has a neuron in every ball of every node.

    Parameters
    ----------
    layers : sequence of NeuronBalls
        One per node, sorted by the nodes' names, all of one dimension.
    method : {"kmeans", "verified", "pairs", "concat"}
        How to merge.
    clusters : int
        Clusters of ``kmeans`` (m_epsilon), at least 1; nothing to the others.
    max_neurons : int, optional
        Size budget, at least 1; none if left out.
    exact : bool, default False
        Whether the layer must have `max_neurons`, not fewer: then groups are taken apart again, and
        neurons that do nothing fill what is left (``pairs``: those alone).
    max_alone : int, optional
        Most merged neurons that may stand for one node alone, at least 1; see `limit_each`.
    within_node : bool, optional
        Whether different neurons of one node may merge. If left out: yes for ``kmeans``, as in
        the released code, and no for ``verified``.
    budget : {"drop", "cluster"}
        How to meet the size budget; see `prune` and `shrink`.
    seed : int
        Seed of k-means and of the random projection.
    device : str
        Where k-means runs; what balls have in common is decided on the CPU.

    Raises
    ------
    ValueError
        If there is no layer, the layers do not fit together, or an option is out of range.
    """
    _check_layers(layers)
    check_integer("clusters", clusters, 1)
    if max_neurons is not None:
        check_integer("max_neurons", max_neurons, 1)
    if max_alone is not None:
        check_integer("max_alone", max_alone, 1)
    _check_choice("method", method, get_args(MergeMethod))
    _check_choice("budget", budget, get_args(Budget))
    items = distinct_neurons(layers)
    if method == "kmeans":
        within = True if within_node is None else within_node
        points, groups = merge_in_clusters(items, clusters, within, seed, device)
    elif method == "verified":
        points, _, groups = merge_in_one_pass(items, bool(within_node), seed)
    elif method == "pairs":
        points, groups = merge_all_pairs(items)
    else:
        points, groups = items.centers.astype(np.float64), [[i] for i in range(len(items))]
    # A neuron of many pairs has no one group to leave.
    if exact and max_neurons is not None and method != "pairs":
        points, groups = split_groups(items, points, groups, max_neurons)
    merged = _merged(items, points, groups, method)
    if max_alone is not None:
        merged = limit_each(merged, max_alone)
    if max_neurons is None:
        return merged
    if budget == "drop":
        merged = prune(merged, max_neurons)
    else:
        merged = shrink(merged, layers, max_neurons, seed, device)
    return pad(merged, max_neurons) if exact else merged


def _merged(
    items: Distinct, points: Float, groups: list[list[int]], method: MergeMethod
) -> MergedLayer:
    importance = np.array([items.importance[group].sum() for group in groups])
    # Equally important ones in the order of their most important item.
    order = np.lexsort((np.array([min(group) for group in groups]), -importance))
    origins = [sorted(m for item in groups[i] for m in items.members[item]) for i in order]
    return MergedLayer(
        weights=points[order],
        origins=tuple(tuple(members) for members in origins),
        dropped=(),
        method=method,
        importance=importance[order],
    )


def _check_layers(layers: Sequence[NeuronBalls]) -> None:
    if not layers:
        raise ValueError("layers: expected at least one, got none")
    for node, layer in enumerate(layers):
        for name in ("dimension", "outgoing"):
            expected, got = getattr(layers[0], name), getattr(layer, name)
            if expected != got:
                raise ValueError(
                    f"layers: expected {name} {expected} as of node 0, got {got} of node {node}"
                )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name}: expected one of {allowed}, got {value!r}")
