"""The section ``multi_model`` of a run's config; the meaning of each value stands in `conf/`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
