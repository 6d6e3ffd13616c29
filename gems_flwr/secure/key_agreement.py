"""Keys that two nodes agree on through a server that relays but cannot read.

X25519 and HKDF-SHA256; what is sealed is encrypted and authenticated by ChaCha20-Poly1305. All of
it is `cryptography`'s. A private key is made of a seed of 16 bytes, so that one share of
`gems_flwr.secure.secret_shares` holds it.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gems_flwr.errors import SecureSumError

SEED_BYTES = 16
KEY_BYTES = 32
# A sealed text is so much longer than what it holds.
TAG_BYTES = 16
# Every key seals one text, so the number that must not repeat may be constant.
_NONCE = bytes(12)


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

    Parameters
    ----------
    seed : bytes
        One's own.
    public : bytes
        The other's public key.
    label : bytes
        What the key is for; both sides must say the same.

    Raises
    ------
    SecureSumError
        If the public key is none.
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
    """Return what `sealed` was given.

    Raises
    ------
    SecureSumError
        If it was sealed with another key, or changed on the way.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, text, None)
    except InvalidTag:
        raise SecureSumError("a sealed text was changed on the way, or is another's") from None


def _private(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derived(seed, b"private key"))
