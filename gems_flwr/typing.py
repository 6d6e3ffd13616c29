"""Types that stand in many signatures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
# A model: arrays by the names of its parameters.
Arrays = Mapping[str, NDArray]
