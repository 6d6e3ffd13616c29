"""When a run ends before its last round.

A stop rule looks at the rounds so far and returns a reason to stop, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gems_flwr.errors import OptionError
from gems_flwr.server.state import RoundRecord

Goal = Literal["max", "min"]


class StopRule(Protocol):
    """Anything that can tell from the history whether to stop.

    Examples
    --------
    A function will do:

    >>> from gems_flwr import FedAvg
    >>> def after_ten_megabytes(history):
    ...     up = sum(record.traffic.bytes_up for record in history)
    ...     return "the budget is used up" if up > 10_000_000 else None
    >>> strategy = FedAvg(stop_rules=[after_ten_megabytes])
    """

    def __call__(self, history: Sequence[RoundRecord]) -> str | None:
        """Return why to stop, or None to go on."""


@dataclass(frozen=True)
class TargetReached:
    """Stop when a metric reaches a value.

    Parameters
    ----------
    value : float
        The target.
    metric : str, default "accuracy"
        Which metric; the server's own evaluation comes first, then the nodes'.
    goal : {"max", "min"}
        Whether larger ("max") or smaller ("min") values are better.

    Examples
    --------
    >>> from gems_flwr import FedAvg, RoundRecord, TargetReached
    >>> strategy = FedAvg(stop_rules=[TargetReached(0.9)])
    >>> TargetReached(0.9)([RoundRecord(1, server_metrics={"accuracy": 0.95})])
    'accuracy 0.9500 reached the target 0.9'
    """

    value: float
    metric: str = "accuracy"
    goal: Goal = "max"

    def __post_init__(self) -> None:
        _check_goal(self.goal)

    def __call__(self, history: Sequence[RoundRecord]) -> str | None:
        """Return why to stop, or None to go on."""
        value = history[-1].metric(self.metric) if history else None
        if value is None:
            return None
        reached = value >= self.value if self.goal == "max" else value <= self.value
        return f"{self.metric} {value:.4f} reached the target {self.value}" if reached else None


@dataclass(frozen=True)
class PatienceExhausted:
    """Stop when a metric has not improved for some rounds.

    Parameters
    ----------
    rounds : int
        How many rounds without improvement are too many, at least 1.
    metric, goal
        As in `TargetReached`.

    Examples
    --------
    >>> from gems_flwr import PatienceExhausted, RoundRecord
    >>> rule = PatienceExhausted(rounds=2, metric="loss", goal="min")
    >>> rule([RoundRecord(n, server_metrics={"loss": 1.0}) for n in (1, 2, 3)])
    'loss has not improved for 2 rounds'
    """

    rounds: int
    metric: str = "accuracy"
    goal: Goal = "max"

    def __post_init__(self) -> None:
        _check_goal(self.goal)
        if self.rounds < 1:
            raise OptionError(f"rounds must be at least 1, got {self.rounds}")

    def __call__(self, history: Sequence[RoundRecord]) -> str | None:
        """Return why to stop, or None to go on."""
        values = [(r.round, r.metric(self.metric)) for r in history]
        known = [(number, value) for number, value in values if value is not None]
        if not known:
            return None
        sign = 1 if self.goal == "max" else -1
        # The earliest of equal values: standing still is no improvement.
        best_round = max(known, key=lambda pair: (sign * pair[1], -pair[0]))[0]
        waited = known[-1][0] - best_round
        if waited < self.rounds:
            return None
        return f"{self.metric} has not improved for {waited} rounds"


def _check_goal(goal: str) -> None:
    if goal not in ("max", "min"):
        raise OptionError(f"goal must be 'max' or 'min', got '{goal}'")
