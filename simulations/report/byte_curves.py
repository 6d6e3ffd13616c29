"""Accuracy against the bytes that a node has sent, and by what factor one method is ahead.

A method's curve has a point for every round whose model was scored. What a method can do with a
number of bytes is the best that it has reached with no more than these; so "bytes until an
accuracy" are those of the first round that reaches it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulations.report.runs import Run


class CurvePoint(NamedTuple):
    """A scored model: the round, what a node has sent up so far, how often the model is right."""

    round: int
    bytes_up: float
    accuracy: float


@dataclass(frozen=True)
class ByteCurve:
    """What one method reaches with how many bytes.

    Parameters
    ----------
    name : str
        The method.
    family : str
        What it is counted among.
    points : tuple of CurvePoint
        In order of rounds, at least one; round 0, before anything is sent, is none of them.
    """

    name: str
    family: str
    points: tuple[CurvePoint, ...]

    @property
    def last(self) -> CurvePoint:
        """The final model."""
        return self.points[-1]

    def at_its_end(self) -> ByteCurve:
        """Return the curve of the final model alone."""
        return dataclasses.replace(self, points=self.points[-1:])

    def bytes_until(self, accuracy: float) -> float | None:
        """Return what a node has sent when the model is first as good; None if it never is."""
        reached = (point.bytes_up for point in self.points if point.accuracy >= accuracy)
        return next(reached, None)


@dataclass(frozen=True)
class Lead:
    """How far a method is ahead of others.

    Parameters
    ----------
    curve : ByteCurve
        The method.
    rival : str, optional
        The first of the others to be as good, by bytes; None if none of them ever is.
    rival_bytes : float, optional
        What a node has sent by then.
    """

    curve: ByteCurve
    rival: str | None = None
    rival_bytes: float | None = None

    @property
    def factor(self) -> float | None:
        """Bytes of the rival for one of the method's; None where none of them is as good."""
        return None if self.rival_bytes is None else self.rival_bytes / self.curve.last.bytes_up


def curve_of(run: Run, name: str, family: str) -> ByteCurve | None:
    """Return the curve of a run; None if no model of it was scored."""
    sent, points = 0, []
    for each in run.history:
        sent += each.bytes_up
        if each.number and each.accuracy is not None:
            points.append(CurvePoint(each.number, sent / run.setting.nodes, each.accuracy))
    return ByteCurve(name, family, tuple(points)) if points else None


def lead(curve: ByteCurve, rivals: Iterable[ByteCurve]) -> Lead:
    """Return by what factor a method's last model is cheaper than equals of others.

    Parameters
    ----------
    curve : ByteCurve
        The method, judged by its last point.
    rivals : iterable of ByteCurve
        The others, each taken at its cheapest.
    """
    needs = [
        (needed, rival.name)
        for rival in rivals
        if (needed := rival.bytes_until(curve.last.accuracy)) is not None
    ]
    if not needs:
        return Lead(curve)
    needed, name = min(needs)
    return Lead(curve, name, needed)


def marked_rounds(points: Sequence[CurvePoint], dense_until: int = 10) -> list[int]:
    """Return indices of the points to mark: all of a few, else rounds 1, 2, 5, 10, 20 …."""
    if len(points) <= dense_until:
        return list(range(len(points)))
    wanted = {base * 10**power for base in (1, 2, 5) for power in range(6)}
    chosen = [index for index, point in enumerate(points) if point.round in wanted]
    last = len(points) - 1
    return chosen if last in chosen else [*chosen, last]
