"""What a run reports of an intersection: how sure it is, how good for whom, and without whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gems_flwr.intersect.aggregate import Aggregate
from gems_flwr.spaces.curved_space import CurvedSpace, without_curve
from gems_flwr.spaces.space_files import Space

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
