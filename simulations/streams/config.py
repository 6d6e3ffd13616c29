"""The section ``stream`` of a run's config; the meaning of each value stands in `conf/`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

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
