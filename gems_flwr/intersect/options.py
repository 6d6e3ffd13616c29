"""What can be set about the objective of class-moment cones."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

RIDGE_FULL = 2e-3
RIDGE_LOW_RANK = 3e-4

ClassWeight = Literal["counts", "balanced"]


@dataclasses.dataclass(frozen=True)
class ConeOptions:
    """How the cone objective is minimised.

    Parameters
    ----------
    ridge : float
        Weight of ``|W|^2`` on scaled features, at least 0. If left out, 2e-3 with full
        moments and 3e-4 without: the inflated diagonal of a low-rank covariance already
        acts as a ridge (both were chosen on MNIST validation data).
    iterations : int
        L-BFGS steps at most.
    points : int
        Gauss-Hermite points.
    device : str
        Where the objective is evaluated.
    class_weight : {"counts", "balanced"}
        Whether a class counts by its samples, or all classes the same (for balanced accuracy
        on data with rare classes).
    """

    ridge: float | None = None
    iterations: int = 200
    points: int = 9
    device: str = "cpu"
    class_weight: ClassWeight = "counts"

    def __post_init__(self) -> None:
        if self.class_weight not in get_args(ClassWeight):
            allowed = list(get_args(ClassWeight))
            raise ValueError(f"class_weight: expected one of {allowed}, got {self.class_weight!r}")
        for name, low in (("ridge", 0), ("iterations", 1), ("points", 1)):
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ValueError(f"{name}: expected at least {low}, got {value}")
