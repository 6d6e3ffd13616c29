"""A radius that says how it was obtained.

The papers give a radius as a bare number (2019, Algorithm 2; 2018, Algorithm 1) although
it only means "p random models at this distance were good enough". In thousands of
dimensions random directions miss the bad ones, so a number without its method is not
honest. `Radius` keeps both, and a reader can tell a proof from an observation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from gems_flwr.bounds import MAX_DIRECTIONS, MAX_WEIGHT
from gems_flwr.errors import SpaceError
from gems_flwr.spaces.checks import check_integer, check_number, shown, take

Method = Literal["sampled", "worst", "certified", "bisection", "growing"]
METHODS: tuple[str, ...] = get_args(Method)


@dataclasses.dataclass(frozen=True)
class Radius:
    """Extent of a space and where the number comes from.

    Parameters
    ----------
    value : float
        Radius in units of the weights, at least 0.
    method : {"sampled", "worst", "certified", "bisection", "growing"}
        ``sampled``: exact along random directions; ``worst``: exact along the directions
        most likely to fail; ``certified``: holds in every direction; ``bisection`` and
        ``growing``: the searches of 2019 and 2018 over random models.
    epsilon : float
        Quality that was asked for: an accuracy or a loss, at least 0.
    directions : int
        Number of directions (or sampled models per step) looked at; 0 if all.
    """

    value: float
    method: Method
    epsilon: float = 0.0
    directions: int = 0

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "value", check_number("radius", self.value, 0.0, MAX_WEIGHT))
        if self.method not in METHODS:
            raise SpaceError("radius.method", f"one of {METHODS}", shown(self.method))
        set_(self, "epsilon", check_number("radius.epsilon", self.epsilon, 0.0, MAX_WEIGHT))
        set_(
            self,
            "directions",
            check_integer("radius.directions", self.directions, 0, MAX_DIRECTIONS),
        )

    def to_meta(self) -> dict[str, Any]:
        """Return the radius as plain numbers and text."""
        return dataclasses.asdict(self)

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Radius:
        """Build a radius from what `to_meta` returned, checking it again."""
        if not isinstance(meta, Mapping):
            raise SpaceError("radius", "a mapping with value and method", shown(meta))
        return cls(
            value=take(meta, "value", "radius"),
            method=take(meta, "method", "radius"),
            epsilon=meta.get("epsilon", 0.0),
            directions=meta.get("directions", 0),
        )
