"""Types that stand in many signatures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
# A model: arrays by the names of its parameters.
Arrays = Mapping[str, NDArray]
# Inputs and their classes, as users hand them in; see `gems_flwr.samples` for what is made of it.
ArrayPair = tuple[NDArray, NDArray]
