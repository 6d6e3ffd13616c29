"""What `PrivateGems` keeps from round to round, as the arrays that a checkpoint has room for.

All of it is made of noisy totals: keeping it costs no privacy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.errors import CheckpointError
from gems_flwr.intersect.private_steps import Spread, Stepping
from gems_flwr.typing import Arrays, Float

_PREFIX = "private"


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateMemory:
    """The state between two rounds.

    Parameters
    ----------
    center : array of shape (D,)
        What inputs are centred by.
    clip : float
        Length to which they are shortened then.
    samples : float
        How many there are.
    spread : Spread
        Of centred inputs.
    stepping : Stepping
        The layer, and how it moves.
    """

    center: Float
    clip: float
    samples: float
    spread: Spread
    stepping: Stepping

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all of it as arrays."""
        parts = {
            "center": self.center,
            "numbers": np.array([self.clip, self.samples, self.stepping.damping]),
            "values": self.spread.values,
            "vectors": self.spread.vectors,
            "layer": self.stepping.layer,
            "momentum": self.stepping.momentum,
        }
        return {f"{_PREFIX}-{key}": part for key, part in parts.items()}

    @classmethod
    def of(cls, memory: Arrays) -> PrivateMemory:
        """Read what `to_arrays` returned.

        Raises
        ------
        CheckpointError
            If it is not there.
        """
        names = ("center", "numbers", "values", "vectors", "layer", "momentum")
        try:
            parts = {name: np.asarray(memory[f"{_PREFIX}-{name}"]) for name in names}
        except KeyError as error:
            raise CheckpointError(f"the checkpoint has no {error} of a private run") from error
        clip, samples, damping = (float(x) for x in parts["numbers"])
        return cls(
            parts["center"],
            clip,
            samples,
            Spread(parts["values"], parts["vectors"]),
            Stepping(parts["layer"], parts["momentum"], damping),
        )
