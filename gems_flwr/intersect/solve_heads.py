"""A head from class moments as the result of an intersection.

The cone objective looks for the layer with the smallest expected loss; the heads of
`gems_flwr.intersect.moment_heads` are closed forms of the same moments. Whichever it is, the answer
says whether the layer lies in every node's cone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from gems_flwr.errors import OptionError
from gems_flwr.intersect.cone_objective import ConeOptions
from gems_flwr.intersect.cones import solve_cones
from gems_flwr.intersect.head_moments import HeadMoments
from gems_flwr.intersect.moment_heads import SHRINKAGE, HeadOptions, linear_head
from gems_flwr.intersect.result import Intersection, in_all, node_margins
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.output_layer import flatten_linear
from gems_flwr.typing import Float

# The usual one first: of candidates that cannot be told apart the first is taken.
SHRINKAGES = (SHRINKAGE, 0.01, 0.2)
# Beside the one that was asked for, where all classes are to count the same.
PRIORS = (0.5, "uniform")


def solve_head(
    cones: Sequence[ClassMomentCone],
    head: HeadOptions,
    cone_options: ConeOptions | None = None,
    start: Float | None = None,
) -> Intersection:
    """Return a head's layer, and whether it lies in every cone.

    Parameters
    ----------
    cones : sequence of ClassMomentCone
        One per node.
    head : HeadOptions
        Which head; ``auto`` is the cone's here, for choosing is the nodes' business.
    cone_options : ConeOptions, optional
        How the objective of cones is minimised.
    start : array, optional
        Where that starts from.

    Raises
    ------
    OptionError
        If the head is no linear layer.
    """
    if head.name in ("cone", "auto"):
        return solve_cones(cones, cone_options, start=start)
    if head.name == "qda":
        raise OptionError(NOT_LINEAR)
    began = time.perf_counter()
    return _as_intersection(cones, HeadMoments.of(cones), head, began)


NOT_LINEAR = (
    "head='qda' is no linear layer, and the model's output layer is one: write head='lda', or "
    "compare gems_flwr.intersect.moment_heads.quadratic_scores on inputs of your own"
)


def candidate_heads(
    cones: Sequence[ClassMomentCone],
    cone: Intersection,
    head: HeadOptions,
    cone_options: ConeOptions,
) -> dict[str, Intersection]:
    """Return the layers among which nodes may choose, by name; the cone's comes first.

    Parameters
    ----------
    cones : sequence of ClassMomentCone
        One per node.
    cone : Intersection
        The layer of the cone objective.
    head : HeadOptions
        Prior and, where one is given, shrinkage of the others.
    cone_options : ConeOptions
        How the cone objective was minimised. If all classes count the same there, other priors
        are tried as well.
    """
    began = time.perf_counter()
    moments = HeadMoments.of(cones)
    balanced = cone_options.class_weight == "balanced"
    priors = list(dict.fromkeys([head.prior, *(PRIORS if balanced else ())]))
    shrinkages = SHRINKAGES if head.shrinkage is None else (head.shrinkage,)
    where = cone_options.device
    heads = [
        HeadOptions("lda", prior, shrinkage, device=where)
        for prior in priors
        for shrinkage in shrinkages
    ]
    heads += [HeadOptions("ridge", prior, device=where) for prior in priors]
    heads.append(HeadOptions("nearest_mean"))
    found = {"cone": cone}
    if balanced:
        plain = dataclasses.replace(cone_options, class_weight="counts")
        found["cone, by counts"] = solve_cones(cones, plain, start=cone.point)
    for each in heads:
        found[each.describe()] = _as_intersection(cones, moments, each, began)
    return found


def _as_intersection(
    cones: Sequence[ClassMomentCone], moments: HeadMoments, head: HeadOptions, began: float
) -> Intersection:
    point = flatten_linear(*linear_head(moments, head))
    inside = in_all(cones, point)
    return Intersection(
        status="feasible" if inside else "undecided",
        point=point,
        margins=node_margins(cones, point),
        lower_bound=-np.inf,
        upper_bound=0.0 if inside else np.inf,
        is_average=False,
        method=f"head: {head.describe()}",
        iterations=0,
        seconds=time.perf_counter() - began,
        choice=(0,) * len(cones),
    )
