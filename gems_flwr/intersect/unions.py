"""The intersection of unions: one ball out of each node's set.

2018, Section 4.1: every failed round adds a ball to each node's set, and h_G is found as
soon as some choice of one ball per node has a common point. The paper has two learners and
tries all pairs; with K nodes the choices are a product, so this is a depth-first search:

- nodes with few balls first; at each node the balls nearest to the centre so far first;
- a ball that misses any chosen one (``|c - c'| > r + r'``) is pruned at once;
- from three balls on the ball dual may prove the partial choice empty.

If every branch ends in a proof, so does the whole: ``empty``. If the budget of solved
problems runs out first: ``undecided``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from gems_flwr.intersect.balls import intersect_balls
from gems_flwr.intersect.mixed import Convex, intersect_convex
from gems_flwr.intersect.result import Intersection, Select, Status
from gems_flwr.spaces.ball import BallSet, BallSpace
from gems_flwr.spaces.space_files import Space


def intersect_unions(
    spaces: Sequence[Space], select: Select = "first", budget: int = 2000
) -> Intersection:
    """Return a point in at least one ball of every node, or a proof that there is none.

    Parameters
    ----------
    spaces : sequence of spaces
        Some of them sets of balls; other spaces are sets of one.
    select : {"first", "margin"}
        Which point of the first choice that has one.
    budget : int
        Problems solved at most.
    """
    began = time.perf_counter()
    search = _Search(spaces, select, budget)
    found = search.descend(0, [])
    result = found or search.nearest
    if result is None:
        # Every pair was pruned before anything was solved: the first choice says how far.
        result = search.solve([0] * len(spaces))
    status: Status = "feasible" if found else ("empty" if not search.unsure else "undecided")
    choice = [0] * len(spaces)
    for place, node in enumerate(search.order):
        choice[node] = result.choice[place]
    ordered = [result.margins[search.order.index(node)] for node in range(len(spaces))]
    return dataclasses.replace(
        result,
        status=status,
        margins=tuple(ordered),
        choice=tuple(choice),
        iterations=search.solved,
        method=f"unions: {result.method}",
        seconds=time.perf_counter() - began,
    )


class _Search:
    def __init__(self, spaces: Sequence[Space], select: Select, budget: int) -> None:
        self.sets: list[tuple[Convex, ...]] = [
            space.balls if isinstance(space, BallSet) else (space,) for space in spaces
        ]
        self.order = sorted(range(len(spaces)), key=lambda node: len(self.sets[node]))
        self.select, self.left, self.solved = select, budget, 0
        self.unsure = False
        self.nearest: Intersection | None = None

    def chosen(self, picks: Sequence[int]) -> list[Convex]:
        return [self.sets[self.order[i]][pick] for i, pick in enumerate(picks)]

    def solve(self, picks: list[int], select: Select | None = None) -> Intersection:
        self.solved += 1
        self.left -= 1
        spaces = self.chosen(picks)
        balls = [space for space in spaces if isinstance(space, BallSpace)]
        if len(balls) == len(spaces):
            result = intersect_balls(balls, select or self.select)
        else:
            result = intersect_convex(spaces, select or self.select)
        return dataclasses.replace(result, choice=tuple(picks))

    def descend(self, depth: int, picks: list[int]) -> Intersection | None:
        """Try every ball of the node at this depth; return the first full choice that works."""
        if depth == len(self.order):
            result = self.solve(picks)
            if result.feasible:
                return result
            self.unsure = self.unsure or not result.empty
            if self.nearest is None or min(result.margins) > min(self.nearest.margins):
                self.nearest = result
            return None
        for pick in self._ranked(depth, picks):
            if self.left <= 0:
                self.unsure = True
                return None
            extended = [*picks, pick]
            if not self._may_meet(extended):
                continue
            found = self.descend(depth + 1, extended)
            if found is not None:
                return found
        return None

    def _ranked(self, depth: int, picks: Sequence[int]) -> list[int]:
        """Return the balls of a node, nearest to those chosen so far first."""
        options = self.sets[self.order[depth]]
        before = [s.center for s in self.chosen(picks) if isinstance(s, BallSpace)]
        if not before or len(options) == 1:
            return list(range(len(options)))
        middle = np.mean(before, axis=0)
        return sorted(range(len(options)), key=lambda i: -options[i].margin(middle))

    def _may_meet(self, picks: list[int]) -> bool:
        """Return False only with a proof that the partial choice has no common point."""
        spaces = self.chosen(picks)
        last = spaces[-1]
        if isinstance(last, BallSpace):
            for other in spaces[:-1]:
                if isinstance(other, BallSpace):
                    apart = -other.margin(last.center) - last.radius.value
                    if apart > 1e-9 * (1 + other.radius.value + last.radius.value):
                        return False
        if len(picks) < 3 or len(picks) == len(self.order):
            return True
        return not self.solve(picks, "first").empty
