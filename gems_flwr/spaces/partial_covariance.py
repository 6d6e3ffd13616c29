"""Covariances of which some components have none: those were sent as count and mean alone.

Nothing stands in their place, neither on the wire nor in memory: a node could make a server fill
its memory with zeros otherwise. Servers that do not know these forms refuse them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import SpaceError
from gems_flwr.spaces.checks import check_array, take
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance

# Forms in which all or some components have a mean alone.
MEANS, AND_MEANS = "means", "+means"
KEY = "means_only"


@dataclasses.dataclass(frozen=True, eq=False)
class PartialCovariance:
    """Covariances of some components.

    Parameters
    ----------
    own : FullCovariance or LowRankCovariance, optional
        Of those that have one, in order; none if no component has.
    lacking : bool array of shape (components,)
        Which components have none.
    features : int
        D.

    Raises
    ------
    SpaceError
        If these do not fit together.
    """

    keys: ClassVar[tuple[str, ...]] = (KEY,)
    own: FullCovariance | LowRankCovariance | None
    lacking: NDArray[np.bool_]
    features: int

    def __post_init__(self) -> None:
        having = int(np.count_nonzero(~self.lacking))
        given = (0, self.features) if self.own is None else self.own.shape
        if given != (having, self.features):
            raise SpaceError("covariance", f"shape {(having, self.features)}", given)

    @classmethod
    def none(cls, components: int, features: int) -> PartialCovariance:
        """Return what stands for no covariance at all."""
        return cls(None, np.ones(components, dtype=bool), features)

    @property
    def form(self) -> str:
        """What messages and files call it."""
        return MEANS if self.own is None else self.own.form + AND_MEANS

    @property
    def shape(self) -> tuple[int, int]:
        """Components and features."""
        return len(self.lacking), self.features

    @property
    def size_bytes(self) -> int:
        """Bytes as stored."""
        return len(self.lacking) + (0 if self.own is None else self.own.size_bytes)

    def place(self, index: int) -> int | None:
        """Return where a component's covariance is in `own`; None if it has none."""
        return None if self.lacking[index] else int(np.count_nonzero(~self.lacking[:index]))

    def dense_matrix(self, index: int) -> NDArray[np.float64]:
        """Return one component's covariance, zero if it has none."""
        place = self.place(index)
        if place is None or self.own is None:
            return np.zeros((self.features, self.features))
        return self.own.dense_matrix(place)

    def select(self, keep: NDArray[np.bool_]) -> Covariance:
        """Return some of the components."""
        lacking, chosen = self.lacking[keep], keep[~self.lacking]
        own = self.own.select(chosen) if self.own is not None and chosen.any() else None
        if own is not None and not lacking.any():
            return own
        return PartialCovariance(own, lacking, self.features)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the stored arrays, and which components they leave out."""
        flags = {KEY: self.lacking.astype(np.uint8)}
        return flags if self.own is None else flags | self.own.to_arrays()

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], form: str, features: int) -> PartialCovariance:
        """Rebuild from what `to_arrays` returned."""
        flags = check_array(KEY, take(arrays, KEY, "the cone's arrays"), (None,), 1, np.int64)
        lacking = flags.astype(bool)
        if not lacking.any() or (form == MEANS) != bool(lacking.all()):
            raise SpaceError(KEY, f"flags that fit the form {form}", "others")
        own: FullCovariance | LowRankCovariance | None = None
        if form == FullCovariance.form + AND_MEANS:
            own = FullCovariance.from_arrays(arrays, features)
        elif form == LowRankCovariance.form + AND_MEANS:
            own = LowRankCovariance.from_arrays(arrays)
        return cls(own, lacking, features)


Covariance = FullCovariance | LowRankCovariance | PartialCovariance

# What arrays there are in each form.
FORM_KEYS: dict[str, tuple[str, ...]] = {
    kind.form: kind.keys for kind in (FullCovariance, LowRankCovariance)
}
FORM_KEYS |= {form + AND_MEANS: (*keys, KEY) for form, keys in FORM_KEYS.items()}
FORM_KEYS[MEANS] = (KEY,)


def covariance_from_arrays(
    arrays: Mapping[str, Any], form: str, features: int
) -> FullCovariance | LowRankCovariance | PartialCovariance:
    """Rebuild the covariances of any form."""
    if form == FullCovariance.form:
        return FullCovariance.from_arrays(arrays, features)
    if form == LowRankCovariance.form:
        return LowRankCovariance.from_arrays(arrays)
    return PartialCovariance.from_arrays(arrays, form, features)
