"""Keys that two nodes agree on, shares of secrets among many, and signatures.

X25519 and HKDF-SHA256; what is sealed is encrypted and authenticated by ChaCha20-Poly1305. Secrets
are shared as Shamir 1979 does, by a polynomial over a prime field: some shares give the secret,
fewer give nothing. Up to tens of nodes all hold shares of all; among many each has a fixed number
of neighbours (Bell et al. 2020, Section 3), so that the cost of a node does not grow with all
nodes. Nodes sign with ordinary files: Ed25519, or ECDSA such as the P-384 keys with which
SuperNodes log in to a SuperLink; PEM or OpenSSH.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gems_flwr.errors import SecureSumError

# The least prime above 2^128: a seed is a number of its field, and a share takes one byte more.
_PRIME = 2**128 + 51
SEED_BYTES, KEY_BYTES, SHARE_BYTES = 16, 32, 17
# A sealed text is so much longer than what it holds.
TAG_BYTES = 16
# Every key seals one text, so the number that must not repeat may be constant.
_NONCE = bytes(12)

# From here on all with all would cost more than it protects, unless that is asked for.
MANY = 64
# With fewer neighbours a few colluders could be most of them.
FEWEST_NEIGHBOURS = 20
# How many choices of shares are tried before a secret counts as lost.
_MOST_TRIES = 500

_ECDSA = ECDSA(hashes.SHA384())
PublicKey = Ed25519PublicKey | EllipticCurvePublicKey
PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey


# --- two nodes ------------------------------------------------------------------------------


def new_seed() -> bytes:
    """Return a seed from the operating system's generator."""
    return secrets.token_bytes(SEED_BYTES)


def derived(material: bytes, label: bytes) -> bytes:
    """Return a key of 32 bytes that follows from other material, different for every label."""
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"gems-flwr " + label).derive(material)


def public_key(seed: bytes) -> bytes:
    """Return the public key that belongs to a seed."""
    return _private(seed).public_key().public_bytes_raw()


def agreed_key(seed: bytes, public: bytes, label: bytes) -> bytes:
    """Return the key that the owner of a seed has in common with the owner of a public key.

    X25519 takes any 32 bytes for a point of the curve or its twist, on which it is safe too; with a
    point of small order, such as zero, nothing would be secret, and it is refused for every seed.
    """
    try:
        shared = _private(seed).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise SecureSumError(f"a public key that was sent cannot be used: {error}") from error
    return derived(shared, label)


def sealed(key: bytes, text: bytes) -> bytes:
    """Return a text that only the owners of a key can read; a key may seal one text."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, None)


def unsealed(key: bytes, text: bytes) -> bytes:
    """Return what `sealed` was given."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, text, None)
    except InvalidTag:
        raise SecureSumError("a sealed text was changed on the way, or is another's") from None


def _private(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derived(seed, b"private key"))


# --- shares ---------------------------------------------------------------------------------


def split_secret(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Return as many shares as there are holders; any `threshold` of them give the secret."""
    numbers = [secrets.randbelow(_PRIME) for _ in range(threshold - 1)]
    shares = []
    for place in range(1, holders + 1):
        value = 0
        for number in (*numbers, int.from_bytes(secret)):
            value = (value * place + number) % _PRIME
        shares.append(value.to_bytes(SHARE_BYTES))
    return shares


def join_shares(
    shares: Mapping[int, bytes], threshold: int, digest_of: Callable[[bytes], bytes], digest: bytes
) -> tuple[bytes, list[int]]:
    """Return the secret that shares, by position of their holders from 0, belong to.

    The owner has published its digest, so wrong shares are left out: their positions are returned
    as well. Positions that come first are tried first.
    """
    if len(shares) < threshold:
        raise SecureSumError(f"{len(shares)} shares of a secret, it takes {threshold}")
    points = {position + 1: int.from_bytes(share) for position, share in shares.items()}
    choices = (
        [x for x in points if x not in out][:threshold]
        for spare in range(len(points) - threshold + 1)
        for out in itertools.combinations(points, spare)
    )
    for chosen in itertools.islice(choices, _MOST_TRIES):
        seen = [points[x] for x in chosen]
        value = _value_at(0, tuple(chosen), seen)
        secret = (value % 2**128).to_bytes(SEED_BYTES)
        if digest_of(secret) == digest:
            others = points.keys() - set(chosen)
            return secret, [x - 1 for x in others if _value_at(x, tuple(chosen), seen) != points[x]]
    raise SecureSumError("the shares of a secret do not fit together: a node sent a wrong one")


def _value_at(place: int, places: tuple[int, ...], values: Sequence[int]) -> int:
    """Return a value of the polynomial of least degree through some points."""
    parts = _lagrange(place, places)
    return sum(part * value for part, value in zip(parts, values, strict=True)) % _PRIME


@functools.lru_cache(maxsize=1024)
def _lagrange(place: int, places: tuple[int, ...]) -> tuple[int, ...]:
    """Return how much of each value there is in that at another place: its Lagrange polynomial."""
    parts = []
    for x in places:
        above = below = 1
        for other in places:
            if other != x:
                above, below = above * (place - other) % _PRIME, below * (x - other) % _PRIME
        parts.append(above * pow(below, -1, _PRIME) % _PRIME)
    return tuple(parts)


def draw_neighbours(
    nodes: Sequence[int], degree: int | None, seed: bytes
) -> dict[int, tuple[int, ...]]:
    """Return the neighbours of each node, in order, on a circle that follows from a seed.

    `degree` is how many, made even; by default all others up to 64 nodes, 64 among more.
    """
    half = math.ceil((MANY if degree is None else degree) / 2)
    if 2 * half >= len(nodes) - 1:
        return {node: tuple(sorted(set(nodes) - {node})) for node in nodes}
    # By digests: NumPy's generators may draw differently in another version on another node.
    circle = sorted(nodes, key=lambda node: hashlib.sha256(b"%s %d" % (seed, node)).digest())
    steps = [step for step in range(-half, half + 1) if step]
    return {
        node: tuple(sorted(circle[(place + step) % len(circle)] for step in steps))
        for place, node in enumerate(circle)
    }


def shares_needed(threshold: float, holders: int) -> int:
    """Return how many of some nodes it takes to open what they hold, and to be a sum.

    Always three and above a half: two sets that are large enough have at least ``2 needed -
    holders`` members in common, and that many colluders it takes to serve both.
    """
    # The tiny term keeps 2/3 of 3 from counting as 3.
    return max(3, holders // 2 + 1, math.ceil(threshold * holders - 1e-9))


# --- signatures -----------------------------------------------------------------------------


def _public_bytes(key: PublicKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.DER, form)


def is_signed(text: bytes, signature: bytes, public: bytes) -> bool:
    """Return whether the owner of a public key, in the form of DER, has signed a text."""
    try:
        key = serialization.load_der_public_key(public)
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, text)
        elif isinstance(key, EllipticCurvePublicKey):
            key.verify(signature, text, _ECDSA)
        else:
            return False
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


@dataclass(frozen=True, eq=False)
class Signer:
    """A node's own key."""

    key: PrivateKey

    @property
    def public(self) -> bytes:
        """The public key, in the form of DER."""
        return _public_bytes(self.key.public_key())

    def sign(self, text: bytes) -> bytes:
        """Return the signature of a text."""
        if isinstance(self.key, Ed25519PrivateKey):
            return self.key.sign(text)
        return self.key.sign(text, _ECDSA)

    @classmethod
    def load(cls, path: str | Path) -> Signer:
        """Read a private key without a password; an error names the file."""
        loaders = serialization.load_pem_private_key, serialization.load_ssh_private_key
        return cls(_loaded(path, loaders, PrivateKey, None))


def load_trusted(path: str | Path) -> frozenset[bytes]:
    """Read a public key, or all of a folder (files that end in ``.pub`` or ``.pem``)."""
    place = Path(path).expanduser()
    files = [place]
    if place.is_dir():
        files = sorted(p for p in place.iterdir() if p.suffix in (".pub", ".pem"))
    loaders = serialization.load_pem_public_key, serialization.load_ssh_public_key
    keys = frozenset(_public_bytes(_loaded(file, loaders, PublicKey)) for file in files)
    if not keys:
        raise SecureSumError(f"no public key (.pub, .pem) in {path}")
    return keys


def _loaded(path: str | Path, loaders: tuple[Any, Any], kinds: Any, *password: None) -> Any:
    """Return the key in a file, PEM or OpenSSH; an error names the file."""
    try:
        data = Path(path).expanduser().read_bytes()
        is_ssh = b"OPENSSH PRIVATE KEY" in data or data.startswith((b"ssh-", b"ecdsa-"))
        key = loaders[is_ssh](data, *password)
    except OSError as error:
        raise SecureSumError(f"the key {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SecureSumError(f"{path} holds no key that can be used: {error}") from error
    if not isinstance(key, kinds):
        raise SecureSumError(f"{path}: expected an Ed25519 or ECDSA key, got {type(key).__name__}")
    return key
