"""The loss of a driver in closed loop (Kamp et al. 2018, A.4), from plain numbers.

    L_dd = λ (t_max − t) / t_max + μ c / c_max + (1 − λ − μ) t_line / t

with λ = 0.8 and μ = 0.15: t is the time on the road, c the crossings of a sideline per time, t_line
the time on one. t_max is the time of two laps or the longest of all models, c_max the largest c.
Both are of the models that are compared, so a loss means nothing without them.

Where the paper is silent:

- *Several tracks* are one long drive: times and crossings are added up, and so are the t_max of the
  tracks. With one track that is the paper's formula.
- *Who comes to the end of the last lap* has t = t_max on that track. At one speed for all, those
  who cut corners are there earlier, and that is no failure.
- If no car crosses a line, c / c_max is 0. Of a car that was on the road for no time at all,
  t_line / t is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gems_flwr.errors import OptionError

TIME_WEIGHT = 0.8
CROSSINGS_WEIGHT = 0.15


@dataclass(frozen=True)
class Drive:
    """What counts of one drive: t, crossings, t_line, and whether it drove all laps.

    The time on the road ends where the car left it; touches of a sideline count until then.
    """

    on_road_seconds: float
    crossings: int
    on_line_seconds: float
    is_finished: bool


@dataclass(frozen=True)
class DrivingLoss:
    """The three shares of the loss, each in [0, 1], and their weighted sum."""

    time_lost: float
    """(t_max − t) / t_max."""
    crossings: float
    """c / c_max."""
    on_line: float
    """t_line / t."""

    @property
    def total(self) -> float:
        """L_dd."""
        line_weight = 1 - TIME_WEIGHT - CROSSINGS_WEIGHT
        parts = (TIME_WEIGHT * self.time_lost, CROSSINGS_WEIGHT * self.crossings)
        return math.fsum((*parts, line_weight * self.on_line))


def driving_losses(drives: Mapping[str, Sequence[Drive]]) -> dict[str, DrivingLoss]:
    """Return the loss of every model, from its drives on the same tracks in the same order."""
    tracks = {len(each) for each in drives.values()}
    if len(tracks) != 1 or tracks == {0}:
        numbers = {name: len(each) for name, each in drives.items()}
        raise OptionError(f"models are compared on the same tracks, at least one; got {numbers}")
    longest = [max(d.on_road_seconds for d in each) for each in zip(*drives.values(), strict=True)]
    frequencies = {name: _frequency(each) for name, each in drives.items()}
    highest = max(frequencies.values())
    losses = {}
    for name, each in drives.items():
        lost = [
            0.0 if drive.is_finished else limit - drive.on_road_seconds
            for drive, limit in zip(each, longest, strict=True)
        ]
        seconds = math.fsum(drive.on_road_seconds for drive in each)
        on_line = math.fsum(drive.on_line_seconds for drive in each)
        losses[name] = DrivingLoss(
            time_lost=math.fsum(lost) / math.fsum(longest) if any(longest) else 1.0,
            crossings=frequencies[name] / highest if highest > 0 else 0.0,
            on_line=on_line / seconds if seconds > 0 else 1.0,
        )
    return losses


def _frequency(drives: Sequence[Drive]) -> float:
    """Return crossings per second; none of a car that was never on the road."""
    seconds = math.fsum(drive.on_road_seconds for drive in drives)
    return sum(drive.crossings for drive in drives) / seconds if seconds > 0 else 0.0
