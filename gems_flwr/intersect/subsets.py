"""The largest set of nodes whose spaces have a point in common.

One node with a far-away space makes the intersection of all of them empty, and the least violating
point then lies half-way to it. The others need not suffer: leave out as few nodes as possible.

There are 2^K subsets, so: leave out the node that misses most others until the rest meets; then
look for a larger subset among all there are, largest first. Pairs that were proved to be disjoint
rule out every subset that holds them. If each larger subset was proved to be empty, the answer is
proved to be the largest; if the budget of solved problems ends first, it is one that was found.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from gems_flwr.intersect.intersect import intersect
from gems_flwr.intersect.result import Intersection, Select
from gems_flwr.spaces.space_files import Space


@dataclasses.dataclass(frozen=True, eq=False)
class Subset:
    """Spaces that meet.

    Parameters
    ----------
    members : tuple of int
        Indices of the spaces that meet, in order.
    intersection : Intersection
        Where; its margins are those of the members.
    proved : bool
        Whether no larger subset meets.
    """

    members: tuple[int, ...]
    intersection: Intersection
    proved: bool


def largest_subset(
    spaces: Sequence[Space], select: Select | None = None, budget: int = 1000
) -> Subset:
    """Return the largest subset of spaces that has a point in common.

    Parameters
    ----------
    spaces : sequence of spaces
        One per node, at least one.
    select : {"first", "margin"}, optional
        Which common point; see `intersect`.
    budget : int
        Subsets looked at, at most, after pairs and a first subset.
    """
    search = _Search(spaces, select, budget)
    found = search.greedy()
    for size in range(len(spaces), len(found.members), -1):
        for members in itertools.combinations(range(len(spaces)), size):
            if search.left <= 0:
                return dataclasses.replace(found, proved=False)
            met = search.solve(members)
            if met is not None and met.feasible:
                return Subset(members, met, proved=search.sure)
    return dataclasses.replace(found, proved=search.sure)


class _Search:
    def __init__(self, spaces: Sequence[Space], select: Select | None, budget: int) -> None:
        self.spaces, self.select, self.left = spaces, select, budget
        # Whether every subset that was passed over was proved to be empty.
        self.sure = True
        self.disjoint = {
            pair
            for pair in itertools.combinations(range(len(spaces)), 2)
            if self._intersect(pair).empty
        }

    def greedy(self) -> Subset:
        """Leave out the worst node until the rest meets; one space alone always does."""
        members = list(range(len(self.spaces)))
        while True:
            met = self._intersect(members)
            if met.feasible or len(members) == 1:
                return Subset(tuple(members), met, proved=False)
            # Whoever is disjoint from most others; of equals, the one that is violated most.
            alone = [
                sum({index} < set(p) <= set(members) for p in self.disjoint) for index in members
            ]
            worst = min(range(len(members)), key=lambda place: (-alone[place], met.margins[place]))
            del members[worst]

    def solve(self, members: tuple[int, ...]) -> Intersection | None:
        """Return what is known of a subset; None if two of its members are disjoint."""
        if any(pair in self.disjoint for pair in itertools.combinations(members, 2)):
            return None
        self.left -= 1
        met = self._intersect(members)
        self.sure = self.sure and (met.feasible or met.empty)
        return met

    def _intersect(self, members: Sequence[int]) -> Intersection:
        return intersect([self.spaces[index] for index in members], self.select)
