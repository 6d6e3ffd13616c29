"""A session of secure sums, both sides: the secrets of a node, and how the server opens a sum.

Bonawitz et al. 2017, with the sparse graph of Bell et al. 2020. A session serves several sums, so
that keys are exchanged once. For every sum a node has two secrets: the seed of a key from which it
and each neighbour derive a mask that cancels in the sum, and the seed of a mask of its own. Its
neighbours hold shares of both. To open the sum they give the share of one of them, never of both:
of its own mask if its numbers are in the sum, of the key if it has dropped out. What is left when
the server takes these masks away is the sum. A node's values go to text and back, since on a
deployment every message is handled by a new process.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from gems_flwr.errors import SecureSumError
from gems_flwr.secure.fixed_point import Layout, Words
from gems_flwr.secure.keys import (
    KEY_BYTES,
    SHARE_BYTES,
    TAG_BYTES,
    Neighbours,
    Signer,
    TrustedKeys,
    agreed_key,
    derived,
    draw_neighbours,
    join_shares,
    new_seed,
    not_to_be_opened,
    public_key,
    sealed,
    shares_needed,
    split_secret,
    unsealed,
)

MAX_SIGNATURE_BYTES = 200
# Of a node's two secrets for a sum.
PAIR_BYTES = 2 * SHARE_BYTES
_OWN_MASK = b"own mask"
# Every key makes one mask.
_NONCE = bytes(16)


# --- masks ----------------------------------------------------------------------------------


def mask(key: bytes, layout: Layout) -> Words:
    """Return the mask of a key of 32 bytes: uniform elements of the sections' rings."""
    stream = Cipher(ChaCha20(key, _NONCE), mode=None).encryptor()
    parts = []
    for section in layout.sections:
        width = next(size for size in (1, 2, 4, 8) if 8 * size >= section.bits)
        drawn = stream.update(bytes(width * section.size))
        parts.append(np.frombuffer(drawn, dtype=f"<u{width}").astype(np.uint64))
    return layout.reduced(np.concatenate(parts))


def _own_mask(seed: bytes, layout: Layout) -> Words:
    return mask(derived(seed, _OWN_MASK), layout)


def _pair_mask(
    seed: bytes, own: bytes, peer: bytes, session: str, number: int, layout: Layout
) -> Words:
    """Return the mask that two nodes have in common for a sum, from the seed of either."""
    both = hashlib.sha256(b"".join(sorted([own, peer]))).hexdigest()
    label = f"mask {session} {number} {both}".encode()
    return mask(agreed_key(seed, peer, label), layout)


def _digest(seed: bytes) -> bytes:
    """Return what may be published of a random seed."""
    return hashlib.sha256(_OWN_MASK + seed).digest()


def _survivors_text(session: str, number: int, survivors: Sequence[int]) -> bytes:
    """Return what nodes sign before a sum is opened."""
    listed = ",".join(map(str, sorted(set(survivors))))
    return f"survivors {session} {number} {listed}".encode()


# --- a node ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdvertisedKeys:
    """What a node publishes before a session."""

    # Public key for what is sealed between two nodes; for each sum, that of the masks in common
    # with neighbours, and the digest of the seed of the node's own mask.
    channel: bytes
    masks: tuple[bytes, ...]
    digests: tuple[bytes, ...]
    # Fingerprint of the key that it signs with, and the signature of `signed_text`; or empty.
    signer: str = ""
    signature: bytes = b""

    def __post_init__(self) -> None:
        fits = {*map(len, self.keys), *map(len, self.digests)} == {KEY_BYTES}
        signed = len(self.signer) <= 64 and len(self.signature) <= MAX_SIGNATURE_BYTES
        if not (fits and signed) or len(self.masks) != len(self.digests) or not self.masks:
            raise SecureSumError("the keys that a node advertises do not have the right lengths")

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All of its public keys."""
        return (self.channel, *self.masks)

    def signed_text(self, session: str) -> bytes:
        """Return what the signature is of."""
        return b"".join([b"keys ", session.encode(), *self.keys, *self.digests])

    def to_text(self) -> str:
        """Return all of it as text."""
        parts = (b"".join([*self.keys, *self.digests]), self.signer.encode(), self.signature)
        return ".".join(base64.b64encode(part).decode() for part in parts)

    @classmethod
    def from_text(cls, text: str) -> AdvertisedKeys:
        """Return what `to_text` wrote."""
        try:
            data, signer, signature = (base64.b64decode(p, validate=True) for p in text.split("."))
            name = signer.decode("ascii")
        except (ValueError, AttributeError) as error:
            raise SecureSumError(f"the keys of a node cannot be read: {error}") from error
        each = [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
        half = 1 + len(each) // 2
        return cls(b"".join(each[:1]), tuple(each[1:half]), tuple(each[half:]), name, signature)


@dataclass(frozen=True)
class Slot:
    """One sum of a session: the node's two secrets for it, and how far it has come."""

    # Of the masks with neighbours, and of the node's own; empty once they are of no more use.
    mask_seed: bytes
    own_seed: bytes
    # The node's shares of the same two secrets, joined, of each neighbour and of itself.
    shares: Mapping[int, bytes] = field(default_factory=dict)
    # The neighbours with whom it has masked its numbers.
    present: tuple[int, ...] = ()
    # new, masked, opened: numbers are masked once, and shares given once.
    state: str = "new"


@dataclass(frozen=True)
class NodeSecrets:
    """A node's part of a session; it changes by being replaced, and refuses by SecureSumErrors."""

    session: str
    channel_seed: bytes
    # One for each sum, and what it has published.
    slots: tuple[Slot, ...]
    own: AdvertisedKeys
    # Its number in the session, and its neighbours by number; none before they are known.
    index: int = -1
    peers: Mapping[int, AdvertisedKeys] = field(default_factory=dict)
    # Part of a node's neighbours and itself that can open its secrets, above a half.
    threshold: float = 1.0

    @classmethod
    def begin(cls, session: str, sums: int, signer: Signer | None = None) -> NodeSecrets:
        """Draw the secrets of a session for so many sums."""
        channel = new_seed()
        slots = tuple(Slot(new_seed(), new_seed()) for _ in range(sums))
        own = AdvertisedKeys(
            public_key(channel),
            tuple(public_key(slot.mask_seed) for slot in slots),
            tuple(_digest(slot.own_seed) for slot in slots),
        )
        if signer is not None:
            signature = signer.sign(own.signed_text(session))
            own = dataclasses.replace(own, signer=signer.fingerprint, signature=signature)
        return cls(session, channel, slots, own)

    @property
    def needed(self) -> int:
        """How many of the node and its neighbours it takes to open a secret of its own."""
        return shares_needed(self.threshold, len(self.peers) + 1)

    def share(
        self,
        index: int,
        peers: Mapping[int, AdvertisedKeys],
        threshold: float,
        trusted: TrustedKeys | None = None,
    ) -> tuple[NodeSecrets, dict[int, bytes]]:
        """Take up neighbours, and return what is sealed for each: shares of all secrets."""
        if self.peers:
            raise SecureSumError("this node has given its shares in this session before")
        if not 0.5 < threshold <= 1:
            raise SecureSumError(f"the threshold must be above a half and at most 1: {threshold}")
        if index in peers or len(peers) < 2:
            raise SecureSumError(f"a secure sum takes two neighbours at least, got {len(peers)}")
        self._check_keys(list(peers.values()), trusted)
        joined = dataclasses.replace(self, index=index, peers=dict(peers), threshold=threshold)
        holders = sorted([index, *peers])
        held, slots = dict.fromkeys(holders, b""), list[Slot]()
        for slot in self.slots:
            seeds = slot.mask_seed, slot.own_seed
            split = (split_secret(seed, joined.needed, len(holders)) for seed in seeds)
            pairs = {h: key + own for h, key, own in zip(holders, *split, strict=True)}
            held = {holder: data + pairs[holder] for holder, data in held.items()}
            slots.append(dataclasses.replace(slot, shares={index: pairs[index]}))
        letters = {
            peer: sealed(self._channel(keys.channel, index, peer), held[peer])
            for peer, keys in peers.items()
        }
        return dataclasses.replace(joined, slots=tuple(slots)), letters

    def _check_keys(self, peers: list[AdvertisedKeys], trusted: TrustedKeys | None) -> None:
        """Refuse keys that are not signed for, or by which one node would count as two."""
        if any(len(peer.masks) != len(self.slots) for peer in peers):
            raise SecureSumError("a neighbour has keys for another number of sums")
        every = [self.own, *peers]
        keys = [key for each in every for key in each.keys]
        if len(set(keys)) < len(keys):
            raise SecureSumError("two nodes advertise the same key")
        if trusted is None:
            return
        signers = [each.signer for each in every]
        if len(set(signers)) < len(signers):
            raise SecureSumError("two nodes sign with the same key")
        for peer in peers:
            trusted.check(peer.signer, peer.signed_text(self.session), peer.signature)

    def receive(self, letters: Mapping[int, bytes]) -> NodeSecrets:
        """Keep the shares that neighbours have sealed for this node, if they are theirs."""
        slots = list(self.slots)
        for peer, letter in letters.items():
            if peer not in self.peers:
                raise SecureSumError(f"shares of node {peer}, which is no neighbour")
            if peer in slots[0].shares:
                continue
            text = unsealed(self._channel(self.peers[peer].channel, peer, self.index), letter)
            if len(text) != PAIR_BYTES * len(slots):
                raise SecureSumError(f"node {peer} gave shares of another number of sums")
            for number, slot in enumerate(slots):
                pair = text[PAIR_BYTES * number : PAIR_BYTES * (number + 1)]
                slots[number] = dataclasses.replace(slot, shares={**slot.shares, peer: pair})
        return dataclasses.replace(self, slots=tuple(slots))

    def masked(
        self, number: int, layout: Layout, words: Words, present: Sequence[int]
    ) -> tuple[NodeSecrets, Words]:
        """Return numbers under masks, once for each sum, if enough neighbours are present."""
        slot = self._slot(number, "new")
        there = tuple(sorted(set(present)))
        unknown = sorted(set(there) - set(slot.shares))
        if unknown or self.index in there:
            raise SecureSumError(f"nodes {unknown} have given this node no shares")
        if len(there) + 1 < self.needed:
            few = f"{len(there)} neighbours take part"
            raise SecureSumError(f"{few}, and with this node it takes {self.needed}")
        total = words + _own_mask(slot.own_seed, layout)
        own = self.own.masks[number]
        for peer in there:
            public = self.peers[peer].masks[number]
            common = _pair_mask(slot.mask_seed, own, public, self.session, number, layout)
            # The smaller number adds what the larger one takes away.
            total = total + common if self.index < peer else total - common
        # Its own seeds are of no more use to the node: its neighbours have the shares.
        used = Slot(b"", b"", slot.shares, there, "masked")
        return self._with(number, used), layout.reduced(total)

    def confirm(self, number: int, survivors: Sequence[int], signer: Signer) -> bytes:
        """Return the signature of the list of those whose numbers are in a sum."""
        self._check_survivors(self._slot(number, "masked"), survivors)
        return signer.sign(_survivors_text(self.session, number, survivors))

    def reveal(
        self,
        number: int,
        survivors: Sequence[int],
        confirmations: Mapping[int, bytes] | None = None,
        trusted: TrustedKeys | None = None,
    ) -> tuple[NodeSecrets, dict[int, bytes]]:
        """Return the shares that open a sum: of the node and each neighbour one of two secrets.

        Where keys are trusted, as many neighbours must have confirmed the list of all survivors by
        their signatures as it takes to open a secret.
        """
        slot = self._slot(number, "masked")
        there = self._check_survivors(slot, survivors)
        if trusted is not None:
            text, given = _survivors_text(self.session, number, survivors), confirmations or {}
            signed = sorted(there & given.keys() - {self.index})
            for peer in signed:
                trusted.check(self.peers[peer].signer, text, given[peer])
            if (count := len(signed) + 1) < self.needed:
                few = f"{count} nodes of the neighbourhood have confirmed who is in the sum"
                raise SecureSumError(f"{few}, it takes {self.needed} to open it")
        pairs = {peer: slot.shares[peer] for peer in (self.index, *slot.present)}
        shares = {p: x[SHARE_BYTES:] if p in there else x[:SHARE_BYTES] for p, x in pairs.items()}
        return self._with(number, Slot(b"", b"", {}, slot.present, "opened")), shares

    def _check_survivors(self, slot: Slot, survivors: Sequence[int]) -> set[int]:
        there = set(survivors) & {self.index, *slot.present}
        if self.index not in there:
            raise SecureSumError("this node's numbers are not in that sum, so it opens nothing")
        if len(there) < self.needed:
            few = f"{len(there)} nodes of the neighbourhood are in the sum"
            raise SecureSumError(f"{few}, it takes {self.needed}: nothing is opened")
        return there

    def _slot(self, number: int, state: str) -> Slot:
        if not 0 <= number < len(self.slots) or not self.peers:
            raise SecureSumError(f"there is no sum {number} in this session")
        slot = self.slots[number]
        if slot.state != state:
            done = "not masked" if slot.state == "new" else slot.state
            raise SecureSumError(f"sum {number} of this session is {done} on this node already")
        return slot

    def _with(self, number: int, slot: Slot) -> NodeSecrets:
        slots = [*self.slots[:number], slot, *self.slots[number + 1 :]]
        return dataclasses.replace(self, slots=tuple(slots))

    def _channel(self, public: bytes, sender: int, receiver: int) -> bytes:
        label = f"letter {self.session} {sender} {receiver}".encode()
        return agreed_key(self.channel_seed, public, label)

    def to_json(self) -> str:
        """Return all of it as text, for the node's own state; it holds secrets."""
        slots = []
        for slot in self.slots:
            shares = {peer: pair.hex() for peer, pair in slot.shares.items()}
            seeds = (slot.mask_seed.hex(), slot.own_seed.hex())
            slots.append((*seeds, shares, slot.present, slot.state))
        peers = {peer: keys.to_text() for peer, keys in self.peers.items()}
        plain = (self.session, self.channel_seed.hex(), self.index, self.threshold)
        return json.dumps([plain, self.own.to_text(), peers, slots])

    @classmethod
    def from_json(cls, text: str) -> NodeSecrets:
        """Return what `to_json` wrote."""
        (session, channel, index, threshold), own, peers, listed = json.loads(text)
        slots = []
        for mask_seed, own_seed, pairs, present, state in listed:
            shares = {int(peer): bytes.fromhex(pair) for peer, pair in pairs.items()}
            seeds = bytes.fromhex(mask_seed), bytes.fromhex(own_seed)
            slots.append(Slot(*seeds, shares, tuple(present), state))
        known = {int(peer): AdvertisedKeys.from_text(keys) for peer, keys in peers.items()}
        mine = AdvertisedKeys.from_text(own)
        return cls(session, bytes.fromhex(channel), tuple(slots), mine, index, known, threshold)


# --- the server -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SumSession:
    """A session as the server knows it; nodes have numbers."""

    session: str
    # Part of a neighbourhood that can open a secret, in (0.5, 1].
    threshold: float
    keys: Mapping[int, AdvertisedKeys]
    neighbours: Neighbours
    # By sender and receiver, the sealed shares; who takes part in the next sum; sums so far.
    letters: Mapping[int, Mapping[int, bytes]] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    used: int = 0

    @classmethod
    def begin(
        cls,
        session: str,
        keys: Mapping[int, AdvertisedKeys],
        threshold: float,
        degree: int | None = None,
    ) -> SumSession:
        """Draw the neighbours of those who have advertised keys."""
        # The sum of two shows each the other's numbers.
        if len(keys) < 3:
            raise SecureSumError(f"a secure sum takes three nodes at least, got {len(keys)}")
        rng = np.random.default_rng(list(session.encode()))
        return cls(session, threshold, dict(keys), draw_neighbours(sorted(keys), degree, rng))

    @property
    def letter_bytes(self) -> int:
        """Bytes of a letter: shares of two secrets for each sum, sealed."""
        return PAIR_BYTES * len(next(iter(self.keys.values())).masks) + TAG_BYTES

    def with_letters(self, letters: Mapping[int, Mapping[int, bytes]]) -> SumSession:
        """Keep what nodes have sealed for each of their neighbours; who has sent it takes part."""
        return dataclasses.replace(self, letters=dict(letters)).with_members(letters)

    def with_members(self, nodes: Collection[int]) -> SumSession:
        """Go on with some nodes, without those whose neighbours are too few."""
        members = set(nodes) & self.letters.keys()
        while lonely := not_to_be_opened(members, members, self.neighbours, self.threshold):
            members -= set(lonely)
        return dataclasses.replace(self, members=tuple(sorted(members)))

    def letters_for(self, node: int) -> dict[int, bytes]:
        """Return what other members have sealed for a node."""
        return {peer: self.letters[peer][node] for peer in self.present_for(node)}

    def present_for(self, node: int) -> tuple[int, ...]:
        """Return the neighbours of a node that take part."""
        return tuple(peer for peer in self.neighbours[node] if peer in self.members)

    def is_quorum(self, survivors: Collection[int]) -> bool:
        """Return whether enough nodes are left to open a sum."""
        lacking = not_to_be_opened(survivors, self.members, self.neighbours, self.threshold)
        enough = shares_needed(self.threshold, len(self.letters))
        return len(survivors) >= max(3, enough) and not lacking

    def opened(
        self,
        number: int,
        layout: Layout,
        masked: Mapping[int, Words],
        shares: Mapping[int, Mapping[int, bytes]],
    ) -> Words:
        """Return the sum of what the survivors sent; shares are by holder and by whose they are."""
        total = layout.add(list(masked.values()))
        for node in self.members:
            if node in masked:
                total = total - _own_mask(self._secret(number, node, shares), layout)
            elif there := [peer for peer in self.present_for(node) if peer in masked]:
                seed = self._secret(number, node, shares, dropped=True)
                own = self.keys[node].masks[number]
                for peer in there:
                    public = self.keys[peer].masks[number]
                    common = _pair_mask(seed, own, public, self.session, number, layout)
                    # What the one who is left has added, or taken away.
                    total = total - common if peer < node else total + common
        return layout.reduced(total)

    def _secret(
        self,
        number: int,
        node: int,
        shares: Mapping[int, Mapping[int, bytes]],
        *,
        dropped: bool = False,
    ) -> bytes:
        """Return the seed of a node's own mask, or of its masks with others if it dropped out."""
        keys, holders = self.keys[node], sorted([node, *self.neighbours[node]])

        def is_right(seed: bytes) -> bool:
            if dropped:
                return public_key(seed) == keys.masks[number]
            return _digest(seed) == keys.digests[number]

        of_each = [shares.get(holder, {}).get(node) for holder in holders]
        given = {place: share for place, share in enumerate(of_each) if share is not None}
        try:
            return join_shares(given, shares_needed(self.threshold, len(holders)), is_right)
        except SecureSumError as error:
            raise SecureSumError(f"what node {node} has masked cannot be opened: {error}") from None
