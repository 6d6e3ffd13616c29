"""Shamir's shares of secrets of 16 bytes: some of them give the secret, fewer give nothing.

The arithmetic is pycryptodome's. Decided here: whoever puts shares together can tell by a digest
that its owner has published whether the secret is right, and if it is not, tries to find out whose
share is wrong.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping

from Crypto.Protocol.SecretSharing import Shamir

from gems_flwr.errors import SecureSumError

SHARE_BYTES = 16
# How many choices of shares are tried before a secret counts as lost.
_MOST_TRIES = 500


def split_secret(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Return as many shares as there are holders; any `threshold` of them give the secret."""
    return [share for _, share in Shamir.split(threshold, holders, secret, False)]


def join_shares(
    shares: Mapping[int, bytes], threshold: int, is_right: Callable[[bytes], bool]
) -> bytes:
    """Return the secret that shares belong to.

    Parameters
    ----------
    shares : mapping from int to bytes
        By position of their holders, from 0.
    threshold : int
        How many it takes.
    is_right : callable
        Tells the secret from others.

    Raises
    ------
    SecureSumError
        If there are too few shares, or too many of them are wrong.
    """
    if len(shares) < threshold:
        raise SecureSumError(f"{len(shares)} shares of a secret, it takes {threshold}")
    choices = itertools.combinations(sorted(shares), threshold)
    for chosen in itertools.islice(choices, _MOST_TRIES):
        points = [(position + 1, shares[position]) for position in chosen]
        try:
            secret = bytes(Shamir.combine(points, False))
        except ValueError:  # a share that is no number of the field
            continue
        if is_right(secret):
            return secret
    raise SecureSumError("the shares of a secret do not fit together: a node sent a wrong one")


def secret_digest(secret: bytes, label: bytes) -> bytes:
    """Return what may be published of a random secret: it tells it from others, and no more."""
    return hashlib.sha256(label + secret).digest()
