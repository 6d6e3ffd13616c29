"""The sections ``stream`` and ``multi_model`` of a run's config.

The meaning of each value stands in `conf/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

_KEYS = ("name", "dataset", "model", "share")


@dataclass
class MultiModelConfig:
    """Which models are trained, and on what nodes."""

    tasks: list[dict[str, Any]] = field(default_factory=list)
    capacities: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.25])
    lacking: float = 0.0

    def __post_init__(self) -> None:
        for number, task in enumerate(self.tasks):
            unknown = sorted(set(task) - set(_KEYS))
            if unknown:
                raise ValueError(
                    f"multi_model.tasks[{number}] has {unknown}, allowed are {list(_KEYS)}"
                )
            share = task.get("share", 1.0)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise ValueError(
                    f"multi_model.tasks[{number}].share must be in (0, 1], got {share!r}"
                )
        names = [self.name_of(number) for number in range(len(self.tasks))]
        if len(set(names)) < len(names):
            raise ValueError(f"multi_model.tasks must have different names, got {names}")
        shares = self.capacities
        if not shares or min(shares) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ValueError(
                "multi_model.capacities must be shares of the nodes that sum to 1: of those that "
                f"train up to one model in a round, up to two, …; got {shares}"
            )
        if not 0 <= self.lacking <= 1:
            raise ValueError(f"multi_model.lacking must be between 0 and 1, got {self.lacking}")

    def name_of(self, number: int) -> str:
        """Return what a task's model is called: ``task-1`` and so on unless it has a name."""
        return str(self.tasks[number].get("name") or f"task-{number + 1}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MultiModelConfig:
        """Return the config that `dataclasses.asdict` took apart."""
        return cls(**values)


SOURCES = ("share", "pool")
KINDS = ("labels", "pixels")


@dataclass
class DriftConfig:
    """When and how the concept changes."""

    rounds: list[int] = field(default_factory=list)
    probability: float = 0.0
    kind: str = "labels"

    def __post_init__(self) -> None:
        _require("drift.rounds", self.rounds, all(r >= 1 for r in self.rounds), "at least 1 each")
        allowed = 0 <= self.probability <= 1
        _require("drift.probability", self.probability, allowed, "between 0 and 1")
        _require("drift.kind", self.kind, self.kind in KINDS, f"one of {', '.join(KINDS)}")


@dataclass
class StreamConfig:
    """What nodes see."""

    batches_per_round: Optional[int] = None  # noqa: UP045 - omegaconf reads Optional
    source: str = "share"
    rate_spread: float = 0.0
    initial_noise: float = 0.0
    drift: DriftConfig = field(default_factory=DriftConfig)

    def __post_init__(self) -> None:
        batches = self.batches_per_round
        _require(
            "batches_per_round", batches, batches is None or batches >= 1, "at least 1, or null"
        )
        _require("source", self.source, self.source in SOURCES, f"one of {', '.join(SOURCES)}")
        _require("rate_spread", self.rate_spread, 0 <= self.rate_spread < 1, "in [0, 1)")
        _require("initial_noise", self.initial_noise, self.initial_noise >= 0, "at least 0")

    @property
    def is_on(self) -> bool:
        """Whether nodes learn from a stream at all."""
        return self.batches_per_round is not None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StreamConfig:
        """Return the config that `dataclasses.asdict` took apart."""
        return cls(**{**values, "drift": DriftConfig(**values["drift"])})


def _require(key: str, value: Any, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"stream.{key} must be {allowed}, got {value!r}")
