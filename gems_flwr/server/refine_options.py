"""How many rounds of refinement, and how: what `Gems(refine=…)` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from gems_flwr.errors import OptionError
from gems_flwr.intersect.refinement import RIDGE
from gems_flwr.wire.gradient_requests import GradientType

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Refine:
    """Rounds in which nodes send gradients, and the server steps towards the pooled optimum.

    ``Gems(refine=3)`` stands for ``Gems(refine=Refine(3))``.

    Parameters
    ----------
    rounds : int
        At most; at least 0.
    ridge : float, default 1e-4
        Weight of ``|W|^2``, and of the squared bias, in the loss that is minimised, on scaled
        features; above 0.
    tolerance : float, default 1e-4
        Refinement ends when a step gains, or would gain, a smaller share of the loss; at least 0.
    dtype : {"int8", "float16", "float32"}
        How nodes round their gradients.

    Examples
    --------
    >>> from gems_flwr import Cone, Gems, Refine
    >>> Gems(space=Cone(rank=20), refine=Refine(5, ridge=1e-3)).rounds_needed
    6
    >>> Refine(5, ridge=0)
    Traceback (most recent call last):
        ...
    gems_flwr.errors.OptionError: refine.ridge must be above 0, got 0
    """

    rounds: int
    ridge: float = RIDGE
    tolerance: float = TOLERANCE
    dtype: GradientType = "int8"

    def __post_init__(self) -> None:
        whole = isinstance(self.rounds, int) and not isinstance(self.rounds, bool)
        dtypes = list(get_args(GradientType))
        rules = {
            "rounds": (whole and self.rounds >= 0, "an integer from 0"),
            "ridge": (self.ridge > 0, "above 0"),
            "tolerance": (self.tolerance >= 0, "at least 0"),
            "dtype": (self.dtype in dtypes, f"one of {dtypes}"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise OptionError(f"refine.{name} must be {allowed}, got {getattr(self, name)!r}")


def as_refine(refine: Refine | int) -> Refine:
    """Return what a number of rounds stands for."""
    return refine if isinstance(refine, Refine) else Refine(refine)
