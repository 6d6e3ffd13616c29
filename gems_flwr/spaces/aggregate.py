"""From the spaces of all nodes to one layer: the server's side in one call.

`intersect` answers whether spaces meet, and where: the first point in all of them on the way from
the average (the papers'), or for cones the smallest expected loss under the moments.
`aggregate_spaces` adds an epsilon that the server chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gems_flwr.errors import EmptyIntersectionError, OptionError
from gems_flwr.spaces.ball.ball import BallSpace, CenteredSpace
from gems_flwr.spaces.ball.intersect import intersect_balls, intersect_convex
from gems_flwr.spaces.cone.cone import ClassMomentCone
from gems_flwr.spaces.cone.heads import HeadOptions, solve_head
from gems_flwr.spaces.cone.solve import ConeOptions, missing_classes, solve_cones
from gems_flwr.spaces.convex import Intersection, Space
from gems_flwr.typing import Float

OnEmpty = Literal["least", "fail"]


def intersect(
    spaces: Sequence[Space],
    *,
    cone_options: ConeOptions | None = None,
    head: HeadOptions | None = None,
    start: Float | None = None,
) -> Intersection:
    """Return a model in the spaces of all nodes, or a proof that there is none.

    All spaces are cones or none is. For cones, `cone_options` is how the objective is minimised,
    `head` a closed form in its place, `start` where it starts from.
    """
    cones = [space for space in spaces if isinstance(space, ClassMomentCone)]
    others = [space for space in spaces if not isinstance(space, ClassMomentCone)]
    if cones and others:
        raise OptionError(f"spaces: expected only cones or none, got {len(cones)} of {len(spaces)}")
    if cones and (head is not None or all(cone.has_only_common for cone in cones)):
        return solve_head(cones, head or HeadOptions(), cone_options, start)
    if cones:
        return solve_cones(cones, cone_options, start=start)
    balls = [space for space in others if isinstance(space, BallSpace)]
    return intersect_balls(balls) if len(balls) == len(spaces) else intersect_convex(others)


@dataclasses.dataclass(frozen=True, eq=False)
class Aggregate:
    """One layer, and what is known of it."""

    point: Float  # the layer, flat (d,)
    intersection: Intersection  # what intersecting found, before any fine-tuning
    epsilon: float | None = None  # the one that the server chose, where it did
    tuned_on: int = 0  # size of the public sample that was used


def aggregate_spaces(
    spaces: Sequence[Space],
    *,
    auto_epsilon: bool = False,
    on_empty: OnEmpty = "least",
    **cone_options: Any,
) -> Aggregate:
    """Aggregate the spaces of all nodes.

    Parameters
    ----------
    spaces, cone_options
        See `intersect`; spaces have curves if the server is to choose epsilon.
    auto_epsilon : bool
        Whether epsilon is the largest one at which all spaces meet (needs curves).
    on_empty : {"least", "fail"}
        If the spaces do not meet: the point that violates them least, or an error.
    """
    epsilon = None
    if auto_epsilon:
        found, epsilon = largest_epsilon(spaces)
    else:
        found = intersect(spaces, **cone_options)
    if not found.feasible and on_empty == "fail":
        proof = "is proved to be empty" if found.empty else "was not found"
        raise EmptyIntersectionError(
            f"the intersection of {len(spaces)} spaces {proof}; lower epsilon, or choose another "
            "space"
        )
    return Aggregate(found.point, found, epsilon)


def largest_epsilon(spaces: Sequence[Space]) -> tuple[Intersection, float]:
    """Return the largest epsilon at which all spaces meet, and where; ValueError without curves.

    Radii fall as epsilon grows, so the epsilons at which the spaces meet are an interval from
    0, and bisection over the points of the curves finds its end. If they do not meet even at
    the smallest, the least violating point for that one is returned.
    """
    curved = [s for s in spaces if isinstance(s, CenteredSpace) and s.curve is not None]
    if len(curved) < len(spaces):
        raise ValueError(
            f"choosing epsilon needs the radius curves of all {len(spaces)} spaces, "
            f"{len(curved)} have one"
        )
    steps = min(space.curve.size for space in curved if space.curve is not None) - 1
    top = int(min(space.largest_epsilon for space in curved) * steps + 1e-9)

    def meet(step: int) -> Intersection:
        return intersect([space.at(step / steps) for space in curved])  # type: ignore[misc]

    low, high = 1, top + 1
    best = meet(low)
    while best.feasible and high - low > 1:
        middle = (low + high) // 2
        there = meet(middle)
        if there.feasible:
            low, best = middle, there
        else:
            high = middle
    return best, low / steps


def intersection_details(
    kind: str, found: Aggregate, spaces: Mapping[str, Any], notes: Mapping[str, str]
) -> dict[str, Any]:
    """Return what was found, how sure that is, and which nodes do not count, or count for less.

    `spaces` are those of the layer, of one `kind`, by node; `notes` the screening's findings.
    """
    met, names = found.intersection, list(spaces)
    if found.epsilon:
        spaces = {node: space.at(found.epsilon) for node, space in spaces.items()}
    cones = {n: s for n, s in spaces.items() if isinstance(s, ClassMomentCone)}
    small = {n: sorted(set(c.labels[c.lacking].tolist())) for n, c in cones.items()}
    missing = list(missing_classes(list(cones.values()))) if cones else []
    left_out = {node: reason for node, reason in notes.items() if node not in spaces}
    return {
        "space": kind,
        # In every space that was sent may not be enough: no node spoke for missing classes.
        "status": "incomplete" if missing and met.feasible else met.status,
        "empty": met.empty,
        "is_average": met.is_average and not found.tuned_on,
        "margins": dict(zip(names, met.margins, strict=True)),
        "gap": met.gap if np.isfinite(met.gap) else None,
        "method": met.method,
        "intersection_seconds": met.seconds,
        "epsilon": found.epsilon,
        "tuned_on": found.tuned_on,
        "node_scores": {},
        "radii": {n: s.radius.to_meta() for n, s in spaces.items() if isinstance(s, CenteredSpace)},
        "means_only": {n: classes for n, classes in small.items() if classes},
        "missing_classes": missing,
        "withheld": {n: list(c.withheld) for n, c in cones.items() if c.withheld},
        "left_out": left_out,
        "adjusted": {node: reason for node, reason in notes.items() if node in spaces},
    }
