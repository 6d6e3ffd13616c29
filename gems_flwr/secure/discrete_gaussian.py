"""Whole numbers from the discrete Gaussian distribution, many at a time.

``P(x) ~ exp(-x^2 / (2 sigma^2))`` on the whole numbers (Canonne, Kamath and Steinke 2020, *The
Discrete Gaussian for Differential Privacy*). Noise of whole numbers on whole numbers has no lowest
bits that could tell anything, which floating-point noise has (Mironov 2012). Their Algorithm 3:
a discrete Laplace number of scale ``t = floor(sigma) + 1`` is taken with probability
``exp(-(|y| - sigma^2 / t)^2 / (2 sigma^2))``; it is ``u + t v`` with a uniform ``u`` below t,
taken with probability ``exp(-u / t)``, and a geometric ``v``.

Exact here: the support, the uniform numbers, the signs, and that draws are independent. In floating
point: the three exponentials, which are compared with 53 random bits, where the authors
compute with fractions. So each of these chances is off by some 2^-53, and a number's distribution
by less than 2^-50 in total variation. No account includes that; over the three million numbers of
ten nodes it is 3e-9.

Random bits are those of ChaCha20 under a key of the operating system's, or, for simulations, of
NumPy's PCG64 from a seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from gems_flwr.errors import OptionError

SMALLEST, LARGEST = 0.5, 2.0**40
# Candidates at a time: more would not fit a processor's cache.
_CHUNK = 2**17

_Source = Callable[[int], NDArray[np.uint64]]


def discrete_gaussian(size: int, sigma: float, seed: int | None = None) -> NDArray[np.int64]:
    """Return independent draws of the discrete Gaussian distribution around 0.

    Parameters
    ----------
    size : int
        How many, at least 0.
    sigma : float
        The parameter, which above 1 is the standard deviation to 7 digits; from 0.5 to 2^40.
    seed : int, optional
        For simulations: whoever knows it can subtract the noise. Without it nobody can.

    Raises
    ------
    OptionError
        If sigma is out of range.

    Examples
    --------
    >>> from gems_flwr.secure.discrete_gaussian import discrete_gaussian
    >>> numbers = discrete_gaussian(100_000, sigma=1000.0, seed=0)
    >>> bool(990 < numbers.std() < 1010)
    True
    """
    if not SMALLEST <= sigma <= LARGEST:
        raise OptionError(f"sigma must be from {SMALLEST:g} to {LARGEST:g}, got {sigma}")
    source = _secret_words() if seed is None else _seeded_words(seed)
    found: list[NDArray[np.int64]] = []
    lacking = size
    while lacking > 0:
        # About half of the candidates are taken.
        taken = _candidates(min(_CHUNK, 2 * lacking + 64), sigma, source)[:lacking]
        found.append(taken)
        lacking -= len(taken)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _candidates(count: int, sigma: float, source: _Source) -> NDArray[np.int64]:
    """Return those of some candidates that are taken."""
    scale = int(sigma) + 1
    below = _below(scale, count, source)
    below = below[_unit(source(len(below))) < np.exp(-below / scale)]
    # The whole part of an exponential number: geometric, with a ratio of 1 / e.
    above = np.floor(-np.log(_unit(source(len(below))))).astype(np.int64)
    length = below + scale * above
    # Lowest bits say the sign: what `_unit` reads are the upper 53.
    words = source(len(length))
    negative = (words & np.uint64(1)).astype(bool)
    chance = np.exp(-(((length - sigma**2 / scale) / sigma) ** 2) / 2)
    # 0 has two signs, and counts once.
    keep = (_unit(words) < chance) & ~(negative & (length == 0))
    return np.asarray(np.where(negative, -length, length)[keep], dtype=np.int64)


def _below(scale: int, count: int, source: _Source) -> NDArray[np.int64]:
    """Return uniform whole numbers below a scale, `count` at most: those that are too large go."""
    bits = max(1, (scale - 1).bit_length())
    drawn = (source(count) >> np.uint64(64 - bits)).astype(np.int64)
    return drawn[drawn < scale]


def _unit(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the upper 53 bits as numbers in (0, 1)."""
    return np.asarray(((words >> np.uint64(11)) + 0.5) * 2.0**-53, dtype=np.float64)


def _secret_words() -> _Source:
    stream = Cipher(ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()
    return lambda count: np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8")


def _seeded_words(seed: int) -> _Source:
    generator = np.random.PCG64(seed)
    return lambda count: np.asarray(generator.random_raw(count), dtype=np.uint64)
