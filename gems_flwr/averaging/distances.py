"""How far models are apart (Kamp et al. 2018, Section 3).

Distances are squared Euclidean distances over all parameters, added up in double precision. What
is no parameter does not count: integer arrays never do, and floating-point buffers (running means
of a batch norm, say), which plain arrays cannot tell from parameters, are named by the caller.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from gems_flwr.typing import Arrays


def squared_distance(one: Arrays, other: Arrays, ignore: Collection[str] = ()) -> float:
    """Return ‖one − other‖² over all parameters.

    Parameters
    ----------
    one, other : mapping from str to ndarray
        Models with the same names and shapes.
    ignore : collection of str
        Names of floating-point arrays that are no parameters.
    """
    total = 0.0
    for name, array in one.items():
        if array.dtype.kind == "f" and name not in ignore:
            gap = np.subtract(array, other[name], dtype=np.float64).ravel()
            total += float(gap @ gap)
    return total
