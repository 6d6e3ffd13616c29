"""How many held-out samples models classify correctly, as a sum over nodes."""

from __future__ import annotations

from gems_flwr.bounds import MAX_EXAMPLES
from gems_flwr.secure.fixed_point import Section
from gems_flwr.server.summing import Total
from gems_flwr.wire.choice_messages import Counts
from gems_flwr.wire.keys import RIGHT, SEEN

_BITS = 64


def count_sections(models: int = 1, groups: int = 1) -> list[Section]:
    """Return the sections of counts: samples seen, and right answers of each model.

    Parameters
    ----------
    models : int
        How many models are judged.
    groups : int
        Classes that are counted apart, or 1.
    """
    most = float(MAX_EXAMPLES)
    return [Section(SEEN, (groups,), most, _BITS), Section(RIGHT, (models, groups), most, _BITS)]


def counts_of(total: Total) -> Counts:
    """Return the counts of all nodes together."""
    return Counts(total.values[SEEN].round(), total.values[RIGHT].round())


def score_of(total: Total) -> float | None:
    """Return the accuracy of one model over all nodes; None if there was nothing to judge by."""
    counts = counts_of(total)
    return float(counts.right.sum() / counts.seen.sum()) if counts.seen.sum() > 0 else None
