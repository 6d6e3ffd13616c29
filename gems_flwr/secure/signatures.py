"""Signatures by which nodes know each other through a server that they do not trust.

Keys are ordinary files: Ed25519, or ECDSA such as the P-384 keys with which SuperNodes log in to a
SuperLink; PEM or OpenSSH. `cryptography` does the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gems_flwr.errors import SecureSumError

_ECDSA = ECDSA(hashes.SHA384())
PublicKey = Ed25519PublicKey | EllipticCurvePublicKey
PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey


def fingerprint(key: PublicKey) -> str:
    """Return what a public key is called: 32 hexadecimal digits of its digest."""
    raw = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(raw).hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class Signer:
    """A node's own key."""

    key: PrivateKey

    @property
    def fingerprint(self) -> str:
        """What the public key is called."""
        return fingerprint(self.key.public_key())

    def sign(self, text: bytes) -> bytes:
        """Return the signature of a text."""
        if isinstance(self.key, Ed25519PrivateKey):
            return self.key.sign(text)
        return self.key.sign(text, _ECDSA)

    @classmethod
    def load(cls, path: str | Path) -> Signer:
        """Read a private key without a password.

        Raises
        ------
        SecureSumError
            Names the file.
        """
        data = _read(path)
        load: Any = serialization.load_pem_private_key
        if b"OPENSSH PRIVATE KEY" in data:
            load = serialization.load_ssh_private_key
        return cls(_loaded(lambda: load(data, None), path, PrivateKey))


@dataclass(frozen=True, eq=False)
class TrustedKeys:
    """The public keys of the nodes that one believes in, by fingerprint."""

    keys: Mapping[str, PublicKey]

    def check(self, name: str, text: bytes, signature: bytes) -> None:
        """Refuse a signature that is not by the key of that fingerprint.

        Raises
        ------
        SecureSumError
            Says which key, and what is wrong.
        """
        key = self.keys.get(name)
        if key is None:
            raise SecureSumError(f"the key {name!r} is not among the {len(self.keys)} trusted ones")
        try:
            if isinstance(key, Ed25519PublicKey):
                key.verify(signature, text)
            else:
                key.verify(signature, text, _ECDSA)
        except InvalidSignature:
            raise SecureSumError(f"a signature is not by the key {name}") from None

    @classmethod
    def load(cls, path: str | Path) -> TrustedKeys:
        """Read a public key, or all of a folder (files that end in ``.pub`` or ``.pem``).

        Raises
        ------
        SecureSumError
            If there is none, or one cannot be read.
        """
        place = Path(path).expanduser()
        files = [place]
        if place.is_dir():
            files = sorted(p for p in place.iterdir() if p.suffix in (".pub", ".pem"))
        keys = [_public(file) for file in files]
        if not keys:
            raise SecureSumError(f"no public key (.pub, .pem) in {path}")
        return cls({fingerprint(key): key for key in keys})


def _public(path: Path) -> PublicKey:
    data = _read(path)
    load: Any = serialization.load_pem_public_key
    if data.startswith((b"ssh-", b"ecdsa-")):
        load = serialization.load_ssh_public_key
    key: PublicKey = _loaded(lambda: load(data), path, PublicKey)
    return key


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise SecureSumError(f"the key {path} cannot be read: {error.strerror}") from error


def _loaded(load: Any, path: str | Path, kinds: Any) -> Any:
    try:
        key = load()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SecureSumError(f"{path} holds no key that can be used: {error}") from error
    if not isinstance(key, kinds):
        raise SecureSumError(f"{path}: expected an Ed25519 or ECDSA key, got {type(key).__name__}")
    return key
