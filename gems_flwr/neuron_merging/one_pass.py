"""The quick merge: one pass over all neurons, a proof for every group on the way.

The papers' way (2019, Section 3.2) asks for an intersection per tuple. Here each group carries a
ball (z, s) that lies inside all its members' balls. A neuron (c, r) whose ball meets it joins, and
the group's ball shrinks to the largest one between the two surfaces: z is in every member's
ball, always, and nothing is ever solved. A common point may be missed (the balls can meet outside
of the inner ball), which costs width and never validity.

Decided here: a neuron joins the nearest group that takes it. By default a group takes one neuron
per node, so that features which a node holds apart stay apart. Candidates are found in a random
projection to 32 dimensions (Johnson and Lindenstrauss), a block of neurons against all groups at
once, and every one is checked in full. A group's ball only ever shrinks into itself, so what was no
candidate when the block began is none later on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gems_flwr.neuron_merging.common_point import inner_ball
from gems_flwr.neuron_merging.distinct import Distinct
from gems_flwr.neuron_merging.may_meet import left_rows, right_rows
from gems_flwr.typing import Float

Index = NDArray[np.intp]
PROJECTED = 32
BLOCK = 256
# Projected lengths are off by 13 % (one standard deviation): this is more than three.
SLACK = 1.4
# So many of the nearest candidates are checked in full.
CANDIDATES = 128


def merge_in_one_pass(
    items: Distinct, within_node: bool, seed: int
) -> tuple[Float, Float, list[list[int]]]:
    """Return the groups' points, the radii of their inner balls, and their items.

    Parameters
    ----------
    items : Distinct
        All neurons, most important first: that is the order of the pass.
    within_node : bool
        Whether neurons of one node may merge.
    seed : int
        Seed of the projection.
    """
    groups = _Groups(items, within_node, seed)
    for start in range(0, len(items), BLOCK):
        block = np.arange(start, min(start + BLOCK, len(items)))
        places = np.concatenate([np.flatnonzero(groups.started[:start]), block])
        groups.refresh()
        may_meet = groups.may_meet(block, places)
        # Needed only where there are more candidates than are checked.
        crowded = bool((may_meet.sum(axis=1) > CANDIDATES).any())
        apart = groups.apart(block, places) if crowded else np.zeros(may_meet.shape, np.float32)
        for item, row, near in zip(block.tolist(), may_meet, apart, strict=True):
            groups.place(item, places[row], near[row])
    founders = np.flatnonzero(groups.started)
    members = [groups.members[i] for i in founders.tolist()]
    return groups.centers[founders], groups.radii[founders], members


class _Groups:
    """Inner balls of all groups; a group is kept at the place of its first item."""

    def __init__(self, items: Distinct, within_node: bool, seed: int) -> None:
        self.items, self.within_node = items, within_node
        self.centers = items.centers.astype(np.float64)
        self.radii = items.radii.copy()
        self.nodes = items.nodes.copy()
        self.started = np.zeros(len(items), dtype=np.bool_)
        self.members: dict[int, list[int]] = {}
        self.moved: set[int] = set()

        # Around the mean and in units of the largest number, so that single precision will do.
        self.projection = _projection(self.centers.shape[1], seed)
        self.middle, self.unit = self.centers.mean(axis=0), 1.0
        self.projected = self._project(self.centers)
        self.unit = float(max(np.abs(self.projected).max(), self.radii.max())) or 1.0
        self.projected /= self.unit
        self.neurons = left_rows(self.projected, self.radii / self.unit, SLACK)
        self.columns = right_rows(self.projected, self.radii / self.unit, SLACK)

    def _project(self, points: Float) -> Float:
        shifted = points @ self.projection - self.middle @ self.projection
        return np.asarray(shifted / self.unit)

    def refresh(self) -> None:
        """Project the groups anew that have moved."""
        moved = np.array(sorted(self.moved), dtype=np.intp)
        self.moved.clear()
        self.projected[moved] = self._project(self.centers[moved])
        self.columns[moved] = right_rows(
            self.projected[moved], self.radii[moved] / self.unit, SLACK
        )

    def may_meet(self, block: Index, places: Index) -> NDArray[np.bool_]:
        """Return which of the places' balls each neuron of the block may meet."""
        return np.asarray(self.neurons[block] @ self.columns[places].T <= 0)

    def apart(self, block: Index, places: Index) -> NDArray[np.float32]:
        """Return projected squared distances, less what is the same for all places."""
        neurons, groups = (self.projected[some].astype(np.float32) for some in (block, places))
        products = neurons @ groups.T
        return np.asarray((groups**2).sum(axis=1) - np.float32(2) * products)

    def place(self, item: int, places: Index, apart: NDArray[np.float32]) -> None:
        """Put an item into the nearest group at these places that takes it, or start one."""
        places = self._allowed(item, places, apart)
        ball, group = None, item
        if len(places):
            center, radius = self.items.centers[item].astype(np.float64), self.items.radii[item]
            distances = np.linalg.norm(self.centers[places] - center, axis=1)
            distances[distances > self.radii[places] + radius] = np.inf
            group = int(places[np.argmin(distances)])
            # None too if rounding alone made them meet.
            ball = inner_ball(self.centers[group], float(self.radii[group]), center, float(radius))
        if ball is None:
            self.started[item] = True
            self.members[item] = [item]
        else:
            self.centers[group], self.radii[group] = ball
            self.nodes[group] |= self.items.nodes[item]
            self.members[group].append(item)
            self.moved.add(group)

    def _allowed(self, item: int, places: Index, apart: NDArray[np.float32]) -> Index:
        allowed = self.started[places]
        if not self.within_node:
            for node in np.flatnonzero(self.items.nodes[item]).tolist():
                allowed &= ~self.nodes[places, node]
        places, apart = places[allowed], apart[allowed]
        if len(places) > CANDIDATES:
            # In the order of the pass, so that of two equally near groups the older one is taken.
            places = places[np.sort(np.argpartition(apart, CANDIDATES)[:CANDIDATES])]
        return places


def _projection(dimension: int, seed: int) -> Float:
    if dimension <= PROJECTED:
        return np.eye(dimension)
    rng = np.random.default_rng(seed)
    return np.asarray(rng.normal(size=(dimension, PROJECTED)) / np.sqrt(PROJECTED))
