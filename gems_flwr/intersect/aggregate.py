"""From the spaces of all nodes to one layer: the server's side in one call.

`intersect` answers whether the spaces meet. This module adds what the papers leave to the
operator: an epsilon chosen by the server (the largest at which all spaces meet), what to do if
they do not, and fine-tuning on a public sample. Used by the strategy and by the command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gems_flwr.errors import EmptyIntersectionError
from gems_flwr.intersect.cone_objective import ConeOptions
from gems_flwr.intersect.intersect import intersect
from gems_flwr.intersect.moment_heads import HeadOptions
from gems_flwr.intersect.result import Intersection, Select, node_margins
from gems_flwr.intersect.small_classes import missing_classes
from gems_flwr.intersect.solve_heads import solve_head
from gems_flwr.intersect.subsets import largest_subset
from gems_flwr.intersect.tuning import fine_tune_linear, tune_cones
from gems_flwr.samples import Samples
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.curved_space import CurvedSpace, without_curve
from gems_flwr.spaces.space_files import Space
from gems_flwr.typing import Float

OnEmpty = Literal["least", "relax", "fail", "retrain", "subset"]


@dataclasses.dataclass(frozen=True, eq=False)
class Aggregate:
    """One layer, and what is known of it.

    Parameters
    ----------
    point : array of shape (d,)
        The layer, flat.
    intersection : Intersection
        What intersecting found, before any fine-tuning.
    epsilon : float, optional
        The epsilon that the server chose, where it did.
    tuned_on : int
        Size of the public sample that was used.
    left_out : tuple of int
        Indices of the spaces that the rest could only meet without.
    proved : bool
        Whether no fewer could have been left out.
    """

    point: Float
    intersection: Intersection
    epsilon: float | None = None
    tuned_on: int = 0
    left_out: tuple[int, ...] = ()
    proved: bool = True


def aggregate_spaces(
    spaces: Sequence[Space | CurvedSpace],
    *,
    select: Select | None = None,
    auto_epsilon: bool = False,
    on_empty: OnEmpty = "least",
    cone_options: ConeOptions | None = None,
    public: Samples | None = None,
    rate: float = 1e-3,
    start: Float | None = None,
    seed: int = 0,
    head: HeadOptions | None = None,
) -> Aggregate:
    """Aggregate the spaces of all nodes.

    Parameters
    ----------
    spaces : sequence of spaces
        One per node; with curves if the server is to choose epsilon.
    select : {"first", "margin", "objective"}, optional
        Which point of the intersection; see `intersect`.
    auto_epsilon : bool
        Whether epsilon is the largest one at which all spaces meet (needs curves).
    on_empty : {"least", "relax", "fail", "retrain", "subset"}
        If the spaces do not meet: the least violating point, a smaller epsilon (needs curves),
        an error, or a point of the largest subset that meets. ``retrain`` returns what ``least``
        does; sending the nodes back to work is the caller's business.
    cone_options : ConeOptions, optional
        How the objective of cones is minimised, and the device of it and of fine-tuning.
    public : Public, optional
        Sample for fine-tuning.
    rate : float
        Adam's rate in it; the objective of cones has none.
    start : array, optional
        Where the objective of cones starts from, such as the layer without a late node.
    seed : int
        Source of the order of public samples.
    head : HeadOptions, optional
        Which function of class moments, where there are only cones; that of the cone objective if
        left out.

    Raises
    ------
    EmptyIntersectionError
        If `on_empty` is ``fail`` and the spaces do not meet.
    ValueError
        If curves are needed and a space has none, or the spaces do not fit together.
    """
    plain = [s.space if isinstance(s, CurvedSpace) else s for s in spaces]
    cones = [space for space in plain if isinstance(space, ClassMomentCone)]
    objective = len(cones) == len(plain) and select in (None, "objective")
    epsilon = None
    if auto_epsilon:
        found, epsilon = largest_epsilon(spaces, select)
    elif objective:
        found = solve_head(cones, head or HeadOptions(), cone_options, start)
    else:
        found = intersect(plain, select)
    if not found.feasible and on_empty == "relax" and epsilon is None and not objective:
        found, epsilon = largest_epsilon(spaces, select)
    if not found.feasible and on_empty == "fail":
        proof = "is proved to be empty" if found.empty else "was not found"
        raise EmptyIntersectionError(
            f"the intersection of {len(plain)} spaces {proof}; lower epsilon, choose another "
            "space, or another on_empty"
        )
    left_out: tuple[int, ...] = ()
    proved = True
    if not found.feasible and on_empty == "subset" and not objective:
        found, left_out, proved = _without_some(plain, found, select)
    if public is None:
        return Aggregate(found.point, found, epsilon, 0, left_out, proved)
    if objective:
        tuned = tune_cones(cones, public.inputs, public.labels, cone_options, start=found.point)
        return Aggregate(tuned.point, found, epsilon, len(public.labels))
    features = public.inputs.shape[1]
    classes = found.point.size // (features + 1)
    device = (cone_options or ConeOptions()).device
    point = fine_tune_linear(
        found.point, public.inputs, public.labels, classes, rate=rate, seed=seed, device=device
    )
    return Aggregate(point, found, epsilon, len(public.labels), left_out, proved)


def _without_some(
    spaces: Sequence[Space], whole: Intersection, select: Select | None
) -> tuple[Intersection, tuple[int, ...], bool]:
    """Return the verdict on all spaces with a point of the largest subset, and who is not in it."""
    subset = largest_subset(spaces, select)
    met = subset.intersection
    found = dataclasses.replace(
        whole,
        point=met.point,
        margins=node_margins(spaces, met.point),
        is_average=False,
        method=f"largest subset: {met.method}",
        seconds=whole.seconds + met.seconds,
    )
    left_out = tuple(i for i in range(len(spaces)) if i not in subset.members)
    return found, left_out, subset.proved


def largest_epsilon(
    spaces: Sequence[Space | CurvedSpace], select: Select | None = None
) -> tuple[Intersection, float]:
    """Return the largest epsilon at which all spaces meet, and where.

    Radii fall as epsilon grows, so the epsilons at which the spaces meet are an interval from
    0, and bisection over the points of the curves finds its end. If they do not meet even at
    the smallest, the least violating point for that one is returned.

    Raises
    ------
    ValueError
        If a space has no curve.
    """
    curved = [space for space in spaces if isinstance(space, CurvedSpace)]
    if len(curved) < len(spaces):
        raise ValueError(
            f"choosing epsilon needs the radius curves of all {len(spaces)} spaces, "
            f"{len(curved)} have one"
        )
    steps = min(space.curve.size for space in curved) - 1
    top = int(min(space.largest_epsilon for space in curved) * steps + 1e-9)

    def meet(step: int) -> Intersection:
        return intersect([space.at(step / steps) for space in curved], select)

    low, high = 1, top + 1
    best = meet(low)
    if not best.feasible:
        return best, low / steps
    while high - low > 1:
        middle = (low + high) // 2
        there = meet(middle)
        if there.feasible:
            low, best = middle, there
        else:
            high = middle
    return best, low / steps


Spaces = Mapping[str, Space | CurvedSpace]


def intersection_details(
    kind: str, found: Aggregate, spaces: Spaces, scores: Mapping[str, float]
) -> dict[str, Any]:
    """Return what was found, how sure that is, and for whom it is how good.

    Parameters
    ----------
    kind : str
        The spaces' kind.
    found : Aggregate
        The layer.
    spaces : mapping from str to space
        What it was made from, by node.
    scores : mapping from str to float
        Each node's accuracy with it; empty where the nodes were not asked.
    """
    met = found.intersection
    details: dict[str, Any] = {
        "space": kind,
        "status": met.status,
        "empty": met.empty,
        "is_average": met.is_average and not found.tuned_on,
        "margins": dict(zip(spaces, met.margins, strict=True)),
        "gap": met.gap if np.isfinite(met.gap) else None,
        "method": met.method,
        "intersection_seconds": met.seconds,
        "epsilon": found.epsilon,
        "tuned_on": found.tuned_on,
        "node_scores": dict(scores),
    }
    plain: dict[str, Any] = {
        node: space.at(found.epsilon)
        if isinstance(space, CurvedSpace) and found.epsilon
        else without_curve(space)
        for node, space in spaces.items()
    }
    details["radii"] = {n: s.radius.to_meta() for n, s in plain.items() if hasattr(s, "radius")}
    cones = {n: s for n, s in plain.items() if isinstance(s, ClassMomentCone)}
    small = {n: sorted(set(c.labels[c.lacking].tolist())) for n, c in cones.items()}
    details["means_only"] = {n: classes for n, classes in small.items() if classes}
    details["missing_classes"] = list(missing_classes(list(cones.values()))) if cones else []
    if details["missing_classes"] and met.feasible:
        # In every space that was sent; but nobody spoke for these classes.
        details["status"] = "incomplete"
    details["withheld"] = {
        n: list(s.withheld) for n, s in plain.items() if getattr(s, "withheld", ())
    }
    return details


def left_out_details(
    found: Aggregate,
    spaces: Spaces,
    notes: Mapping[str, str],
    convicted: Mapping[str, float],
) -> dict[str, Any]:
    """Return who does not count, or counts for less than it claims, and why.

    Parameters
    ----------
    found : Aggregate
        The layer.
    spaces : mapping from str to space
        What it was made from, by node.
    notes : mapping from str to str
        What the screening held against nodes.
    convicted : mapping from str to float
        What the others gain without a node that the audit convicted.
    """
    gone = {node: reason for node, reason in notes.items() if node not in spaces}
    names = list(spaces)
    others = "it does not meet the others"
    gone |= {names[index]: others for index in found.left_out}
    gone |= {n: f"the others gain {g:.3f} accuracy without it" for n, g in convicted.items()}
    details: dict[str, Any] = {"left_out": gone}
    details["adjusted"] = {node: reason for node, reason in notes.items() if node in spaces}
    if found.left_out:
        details["subset_proved"] = found.proved
    return details
