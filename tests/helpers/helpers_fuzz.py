"""Guards around whatever may come in, and how bytes are mutated."""

from __future__ import annotations

import math
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from helpers_patience import patience

MEGABYTE = 2**20

# Per kind of file.
FILE_CASES = (6, 500)


@contextmanager
def guarded(data):
    """Fail on a hang, and on memory out of proportion to what came in."""
    with patience(f"using {data[:200]!r}"):
        tracemalloc.start()
        try:
            yield
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 16 * MEGABYTE + 50 * len(data)


@contextmanager
def may_refuse(kind, words=""):
    """Let one kind of error pass, if it says something."""
    try:
        yield
    except kind as error:
        if not str(error) or words not in str(error):
            pytest.fail(f"the error does not say what is wrong: {error!r}")


def mutated(data, rng):
    """Return bytes with one to four wounds."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        if not data:
            break
        at = int(rng.integers(len(data)))
        kind = rng.integers(7)
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            data[at] = int(rng.integers(256))
        elif kind == 2:
            del data[at : at + int(rng.integers(1, 40))]
        elif kind == 3:
            data[at:at] = rng.bytes(int(rng.integers(1, 20)))
        elif kind == 4:
            other = int(rng.integers(len(data)))
            data[at:at] = data[other : other + int(rng.integers(1, 60))]
        elif kind == 5:
            wild = (0.0, -1.0, math.nan, math.inf, 1e30, -1e30, 1e-40)
            width = (np.float32, np.float64)[int(rng.integers(2))]
            value = width(wild[int(rng.integers(len(wild)))]).tobytes()
            data[at : at + len(value)] = value
        else:
            # A digit of a header or a description.
            digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
            if digits:
                data[digits[int(rng.integers(len(digits)))]] = 48 + int(rng.integers(10))
    return bytes(data)


def finite(*arrays):
    """Assert that all numbers are finite."""
    assert all(np.isfinite(np.asarray(array, dtype=np.float64)).all() for array in arrays)
