"""An average for nodes that all have the same reference, with what earlier averages left unsaid.

Averaging models leaves their sum what it was (Kamp et al. 2018, Definition 2). An average that is
rounded on its way to k of m nodes moves the sum by k times what rounding took; that is kept, as a
share for each node, and added to later averages. So the mean of all models, and what is kept, stay
what they were, up to the rounding of floating-point sums.
"""

from __future__ import annotations

import numpy as np

from gems_flwr.compression.difference_coding import Encoded, Form, encode, halved, is_rounded
from gems_flwr.typing import Arrays


def encode_average(
    average: Arrays, reference: Arrays, form: Form, left_over: Arrays, share: float
) -> Encoded:
    """Return an average as a difference to the reference.

    Parameters
    ----------
    average : mapping from str to ndarray
        Of the models of some nodes.
    reference : mapping from str to ndarray
        What all of them have.
    form : {"float16", "int8", "int4", "int2"}
        How it travels.
    left_over : mapping from str to ndarray
        What is kept for each node; empty at first.
    share : float
        The part of the nodes that get the average, k / m, in (0, 1].

    Returns
    -------
    Encoded
        With what is kept from now on: the part that is added here counts for k of m nodes.
    """
    encoded = encode(average, reference, form, left_over)
    kept = {
        name: (rest if share == 1 else share * rest + (1 - share) * _before(left_over, name, rest))
        for name, rest in encoded.left_over.items()
    }
    return Encoded(encoded.packed, encoded.decoded, kept)


def _before(left_over: Arrays, name: str, like: np.ndarray) -> np.ndarray:
    return np.asarray(left_over[name]) if name in left_over else np.zeros_like(like)


def left_by_halving(model: Arrays) -> dict[str, np.ndarray]:
    """Return what is left over where nodes begin with `halved(model)` instead of `model`."""
    return {
        name: (np.asarray(model[name], np.float64) - half).astype(np.float32)
        for name, half in halved(model).items()
        if is_rounded(half)
    }
