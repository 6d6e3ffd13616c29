"""Types that stand in many signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
# A model: arrays by the names of its parameters.
Arrays = Mapping[str, NDArray]
# What nodes and servers tell of a round: numbers, and lists of numbers, by name.
Metrics = Mapping[str, float | list[int] | list[float]]
# How many directions of a class's covariance a cone has; see `moments.cone_building`.
Rank = int | Literal["auto", "full"]
# Inputs and their classes, as users hand them in; see `gems_flwr.samples` for what is made of it.
ArrayPair = tuple[NDArray, NDArray]
