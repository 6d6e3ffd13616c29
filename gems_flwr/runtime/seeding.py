"""Random numbers that depend on what they are for, never on when they are drawn.

Every random choice is made by a generator derived from the run's seed and a path of words
and numbers such as ``("choose", round)``. No generator is carried from round to round, so a
resumed run draws what the unbroken one would have drawn, whatever order replies came in.
"""

from __future__ import annotations

import hashlib

import numpy as np

from gems_flwr.errors import OptionError


def derive_seed(seed: int, *path: str | int) -> int:
    """Return a seed for one purpose.

    Parameters
    ----------
    seed : int
        The run's seed, at least 0.
    *path : str or int
        What the numbers are for, e.g. ``"train", 3, "node-1"``.

    Returns
    -------
    int
        A number below 2**63, which numpy, torch and Flower's records all accept.
    """
    if seed < 0:
        raise OptionError(f"seed must be at least 0, got {seed}")
    text = "/".join(f"{type(part).__name__}:{part}" for part in (seed, *path))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """Return the numpy generator for one purpose; see `derive_seed`."""
    return np.random.default_rng(derive_seed(seed, *path))
