"""What a node tells the others of itself before a session of secure sums."""

from __future__ import annotations

from dataclasses import dataclass

from gems_flwr.errors import SecureSumError
from gems_flwr.secure.key_agreement import KEY_BYTES
from gems_flwr.secure.signatures import TrustedKeys

DIGEST_BYTES = 32


@dataclass(frozen=True)
class AdvertisedKeys:
    """A node's public keys for one session.

    Parameters
    ----------
    channel : bytes
        For what is sealed between two nodes.
    masks : tuple of bytes
        For the masks that it has in common with its neighbours, one key for each sum.
    digests : tuple of bytes
        Of the seeds of its own masks, one for each sum.
    signer : str
        Fingerprint of the key that it signs with; empty where it does not.
    signature : bytes
        Of `text`.
    """

    channel: bytes
    masks: tuple[bytes, ...]
    digests: tuple[bytes, ...]
    signer: str = ""
    signature: bytes = b""

    def __post_init__(self) -> None:
        keys = (self.channel, *self.masks)
        fits = all(len(key) == KEY_BYTES for key in keys) and all(
            len(digest) == DIGEST_BYTES for digest in self.digests
        )
        if not fits or len(self.masks) != len(self.digests) or not self.masks:
            raise SecureSumError("the keys that a node advertises do not have the right lengths")
        if len(set(keys)) < len(keys):
            raise SecureSumError("a node advertises the same key twice")

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All of its public keys."""
        return (self.channel, *self.masks)

    def text(self, session: str) -> bytes:
        """Return what the signature is of."""
        return b"".join([b"keys ", session.encode(), *self.keys, *self.digests])

    def check(self, session: str, trusted: TrustedKeys) -> None:
        """Refuse keys that nobody who is trusted has signed for this session."""
        trusted.check(self.signer, self.text(session), self.signature)


def refuse_twins(peers: list[AdvertisedKeys], *, signed: bool) -> None:
    """Refuse keys that occur twice, and where they are signed, signers: one would count as two."""
    keys = [key for peer in peers for key in peer.keys]
    if len(set(keys)) < len(keys):
        raise SecureSumError("two nodes advertise the same key")
    signers = [peer.signer for peer in peers]
    if signed and len(set(signers)) < len(signers):
        raise SecureSumError("two nodes sign with the same key")
