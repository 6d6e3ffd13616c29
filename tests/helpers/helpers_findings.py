"""Findings of two seeds, made up."""

from simulations.reproduce.papers.findings import Findings


def findings(name="gems2019_convex", *parts, **more):
    """Return them under the name of a reproduction."""
    made = {
        "versions": {"torch": "1"},
        "commit": "abc",
        "date": "2026-01-01",
        "machine": "2 cores",
        "python": "3",
        "minutes": 1.0,
    }
    return Findings(name, False, False, [0, 1], list(parts), made=made, **more)
