"""Who shares masks and secrets with whom (Bell et al. 2020, Section 3).

All with all is right for tens of nodes. Among many, each has a fixed number of neighbours: the
nodes stand on a circle in an order that is drawn anew for every session, and each is joined to
those nearest to it on either side. What a node pays grows with its neighbours, not with all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from gems_flwr.errors import OptionError

Neighbours = Mapping[int, tuple[int, ...]]

# From here on all with all would cost more than it protects, unless somebody asks for it.
MANY = 64


def draw_neighbours(
    nodes: Sequence[int], degree: int | None, rng: np.random.Generator
) -> dict[int, tuple[int, ...]]:
    """Return the neighbours of each node, in order.

    Parameters
    ----------
    nodes : sequence of int
        Numbers of the nodes.
    degree : int, optional
        Neighbours of each, made even, at least 2; by default all others up to 64 nodes,
        and among more of them 64.
    rng : numpy.random.Generator
        Draws the circle.
    """
    wanted = MANY if degree is None else degree
    if wanted < 2:
        raise OptionError(f"neighbours must be at least 2, got {wanted}")
    half = math.ceil(wanted / 2)
    if 2 * half >= len(nodes) - 1:
        return {node: tuple(sorted(set(nodes) - {node})) for node in nodes}
    circle = [nodes[i] for i in rng.permutation(len(nodes))]
    steps = [step for step in range(-half, half + 1) if step]
    return {
        node: tuple(sorted(circle[(place + step) % len(circle)] for step in steps))
        for place, node in enumerate(circle)
    }


def shares_needed(threshold: float, holders: int) -> int:
    """Return how many of the holders of a secret must give their shares.

    Parameters
    ----------
    threshold : float
        Part of them, above a half, so that no two sets without a common member can.
    holders : int
        A node and its neighbours.
    """
    # The tiny term keeps 2/3 of 3 from counting as 3.
    return max(holders // 2 + 1, math.ceil(threshold * holders - 1e-9))


def not_to_be_opened(
    there: Collection[int], secrets: Collection[int], neighbours: Neighbours, threshold: float
) -> list[int]:
    """Return the nodes whose secrets could not be put together by those who are there."""
    present = set(there)
    return [
        node
        for node in secrets
        if len(present & {node, *neighbours[node]})
        < shares_needed(threshold, len(neighbours[node]) + 1)
    ]
