"""Errors of malformed spaces, and the checks that raise them.

The papers trust every node. A server cannot: one NaN radius makes the solution of
Eq. 2 (2019) NaN for everybody. Every space therefore checks itself when it is built,
and the error names the key, what was expected and what came, so that the caller can
reject that one node with a reason and go on with the others.

Decided here, as the papers say nothing: what is above a limit of `gems_flwr.bounds` is an error
of the sender, not a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems_flwr.bounds import MAX_WEIGHT as MAX_WEIGHT
from gems_flwr.errors import SpaceError

_SHOWN_CHARACTERS = 80


def shown(value: object) -> str:
    """Return a value as a short text, whatever it is: Python writes no integer of 5,000 digits."""
    try:
        text = repr(value) if isinstance(value, str) else str(value)
    except (ValueError, RecursionError):
        return f"{type(value).__name__} of great length"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def check_array(
    key: str,
    value: object,
    shape: Sequence[int | None],
    max_abs: float = MAX_WEIGHT,
    dtype: type[np.generic] = np.float32,
) -> NDArray[Any]:
    """Return ``value`` as a read-only finite array of the wanted shape and type.

    Parameters
    ----------
    key : str
        Name to blame in the error.
    value : object
        Anything NumPy turns into an array of numbers.
    shape : sequence of int or None
        Expected shape; ``None`` accepts any positive length on that axis.
    max_abs : float
        Largest absolute value accepted.
    dtype : numpy type
        Type of the returned array.

    Raises
    ------
    SpaceError
        If the shape, the type, or any value is not as expected.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise SpaceError(key, "an array of numbers", f"dtype {array.dtype}")
    wanted = "(" + ", ".join("any" if n is None else str(n) for n in shape) + ")"
    fits = array.ndim == len(shape) and all(
        have == want if want is not None else have > 0
        for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        raise SpaceError(key, f"shape {wanted}", f"shape {array.shape}")
    if not np.isfinite(array).all():
        raise SpaceError(key, "finite values", f"{int((~np.isfinite(array)).sum())} NaN or inf")
    largest = float(np.abs(array.astype(np.float64)).max(initial=0.0))
    if largest > max_abs:
        raise SpaceError(key, f"absolute values up to {max_abs:g}", f"{largest:g}")
    if np.issubdtype(dtype, np.integer) and array.dtype.kind == "f":
        raise SpaceError(key, "integers", f"dtype {array.dtype}")
    out = np.array(array, dtype=dtype)
    out.flags.writeable = False
    return out


def check_number(key: str, value: object, low: float, high: float) -> float:
    """Return ``value`` as a float within ``[low, high]``, or raise a `SpaceError`."""
    expected = f"a number in [{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise SpaceError(key, expected, shown(value))
    # Compared before it is converted: an integer of 400 digits has no float.
    if not low <= value <= high:
        raise SpaceError(key, expected, shown(value))
    return float(value)


def check_integer(key: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int within ``[low, high]``, or raise a `SpaceError`.

    What a node sends has an upper limit; a setting of ours need not.
    """
    expected = f"an integer of at least {low}" + (f", at most {high}" if high is not None else "")
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise SpaceError(key, expected, shown(value))
    if value < low or (high is not None and value > high):
        raise SpaceError(key, expected, shown(value))
    return int(value)


def take(mapping: Mapping[str, Any], key: str, what: str) -> Any:
    """Return ``mapping[key]``, or raise a `SpaceError` that says what is missing."""
    if key not in mapping:
        raise SpaceError(key, f"to be present in {what}", f"only {sorted(mapping)}")
    return mapping[key]


def check_keys(arrays: Mapping[str, Any], allowed: Sequence[str], what: str) -> None:
    """Raise a `SpaceError` if ``arrays`` has keys other than ``allowed``."""
    extra = sorted(set(arrays) - set(allowed))
    if extra:
        raise SpaceError(extra[0], f"only the keys {sorted(allowed)} in {what}", f"extra {extra}")
