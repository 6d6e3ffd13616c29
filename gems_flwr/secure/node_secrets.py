"""The node's side of a session of secure sums: its secrets, and what it does with them.

A session serves several sums, so that keys are exchanged once. For every sum a node has two
secrets: the seed of a key from which it and each neighbour derive a mask that cancels in the sum,
and the seed of a mask of its own. Its neighbours hold shares of both. When the sum is opened they
give the share of one of them, never of both: of its own mask if its numbers are in the sum, of
the key if it has dropped out.

Values change by being replaced, and go to text and back: on a deployment every message is handled
by a new process.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gems_flwr.errors import SecureSumError
from gems_flwr.secure.advertised_keys import AdvertisedKeys, refuse_twins
from gems_flwr.secure.fixed_point import Layout, Words
from gems_flwr.secure.key_agreement import (
    agreed_key,
    derived,
    new_seed,
    public_key,
    sealed,
    unsealed,
)
from gems_flwr.secure.masks import mask
from gems_flwr.secure.neighbourhoods import shares_needed
from gems_flwr.secure.secret_shares import SHARE_BYTES, secret_digest, split_secret
from gems_flwr.secure.signatures import Signer, TrustedKeys

_OWN_MASK = b"own mask"


@dataclass(frozen=True)
class Slot:
    """One sum of a session: the node's two secrets for it, and how far it has come.

    Parameters
    ----------
    mask_seed, own_seed : bytes
        Of the masks with neighbours, and of the node's own; empty once they are of no more use.
    shares : mapping from int to pair of bytes
        What the node holds of the same secrets of its neighbours, and of itself.
    present : tuple of int
        The neighbours with whom it has masked its numbers.
    state : {"new", "masked", "revealed"}
        Numbers are masked once, and shares given once.
    """

    mask_seed: bytes
    own_seed: bytes
    shares: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict)
    present: tuple[int, ...] = ()
    state: str = "new"


@dataclass(frozen=True)
class NodeSecrets:
    """A node's part of a session; see the module's docstring.

    Parameters
    ----------
    session : str
        Which one.
    channel_seed : bytes
        Of the key for what is sealed.
    slots : tuple of Slot
        One for each sum.
    own : AdvertisedKeys
        What it has told of itself.
    index : int
        Its number in the session; -1 before it has one.
    peers : mapping from int to AdvertisedKeys
        Its neighbours.
    threshold : float
        Part of a node's neighbours and itself that can open its secrets, above a half.
    """

    session: str
    channel_seed: bytes
    slots: tuple[Slot, ...]
    own: AdvertisedKeys
    index: int = -1
    peers: Mapping[int, AdvertisedKeys] = field(default_factory=dict)
    threshold: float = 1.0

    @classmethod
    def begin(cls, session: str, sums: int, signer: Signer | None = None) -> NodeSecrets:
        """Draw the secrets of a session; what to advertise is `own`.

        Parameters
        ----------
        session : str
            Which one.
        sums : int
            How many there can be, at least 1.
        signer : Signer, optional
            The node's own key.
        """
        channel = new_seed()
        slots = tuple(Slot(new_seed(), new_seed()) for _ in range(sums))
        own = AdvertisedKeys(
            public_key(channel),
            tuple(public_key(slot.mask_seed) for slot in slots),
            tuple(secret_digest(slot.own_seed, _OWN_MASK) for slot in slots),
        )
        if signer is not None:
            signature = signer.sign(own.text(session))
            own = dataclasses.replace(own, signer=signer.fingerprint, signature=signature)
        return cls(session, channel, slots, own)

    def share(
        self,
        index: int,
        peers: Mapping[int, AdvertisedKeys],
        threshold: float,
        trusted: TrustedKeys | None = None,
    ) -> tuple[NodeSecrets, dict[int, bytes]]:
        """Take up neighbours, and return what is sealed for each: shares of all secrets.

        Parameters
        ----------
        index : int
            The number that the node has in the session.
        peers : mapping from int to AdvertisedKeys
            Its neighbours, by number.
        threshold : float
            See the class.
        trusted : TrustedKeys, optional
            Whose keys must have signed what neighbours advertise.

        Raises
        ------
        SecureSumError
            If neighbours are too few, the same twice, or not signed for; or if the node has
            given shares in this session before.
        """
        if self.index >= 0:
            raise SecureSumError("this node has given its shares in this session before")
        if not 0.5 < threshold <= 1:
            raise SecureSumError(f"the threshold must be above a half and at most 1: {threshold}")
        if index < 0 or index in peers or len(peers) < 2:
            raise SecureSumError(f"a secure sum takes two neighbours at least, got {len(peers)}")
        if any(len(peer.masks) != len(self.slots) for peer in peers.values()):
            raise SecureSumError("a neighbour has keys for another number of sums")
        refuse_twins([self.own, *peers.values()], signed=trusted is not None)
        if trusted is not None:
            for peer in peers.values():
                peer.check(self.session, trusted)
        holders = sorted([index, *peers])
        needed = shares_needed(threshold, len(holders))
        held: dict[int, bytearray] = {holder: bytearray() for holder in holders}
        slots = []
        for slot in self.slots:
            keys = split_secret(slot.mask_seed, needed, len(holders))
            masks = split_secret(slot.own_seed, needed, len(holders))
            for holder, key, own in zip(holders, keys, masks, strict=True):
                held[holder] += key + own
            position = holders.index(index)
            slots.append(
                dataclasses.replace(slot, shares={index: (keys[position], masks[position])})
            )
        letters = {
            peer: sealed(self._channel(keys.channel, index, peer), bytes(held[peer]))
            for peer, keys in peers.items()
        }
        after = dataclasses.replace(
            self, index=index, peers=dict(peers), threshold=threshold, slots=tuple(slots)
        )
        return after, letters

    def receive(self, letters: Mapping[int, bytes]) -> NodeSecrets:
        """Keep the shares that neighbours have sealed for this node.

        Raises
        ------
        SecureSumError
            If one is not from the neighbour that it is said to be from.
        """
        slots = list(self.slots)
        for peer, letter in letters.items():
            if peer not in self.peers:
                raise SecureSumError(f"shares of node {peer}, which is no neighbour")
            if peer in slots[0].shares:
                continue
            text = unsealed(self._channel(self.peers[peer].channel, peer, self.index), letter)
            if len(text) != 2 * SHARE_BYTES * len(slots):
                raise SecureSumError(f"node {peer} gave shares of another number of sums")
            parts = [text[i : i + SHARE_BYTES] for i in range(0, len(text), SHARE_BYTES)]
            for number, slot in enumerate(slots):
                pair = (parts[2 * number], parts[2 * number + 1])
                slots[number] = dataclasses.replace(slot, shares={**slot.shares, peer: pair})
        return dataclasses.replace(self, slots=tuple(slots))

    def masked(
        self, number: int, layout: Layout, words: Words, present: Sequence[int]
    ) -> tuple[NodeSecrets, Words]:
        """Return numbers under masks.

        Parameters
        ----------
        number : int
            Of the sum in the session, from 0.
        layout : Layout
            Of the numbers.
        words : array of uint64
            The numbers, as elements of the rings.
        present : sequence of int
            The neighbours that take part.

        Raises
        ------
        SecureSumError
            If the node has masked numbers for this sum before, or too few neighbours take part.
        """
        slot = self._slot(number, "new")
        unknown = sorted(set(present) - set(slot.shares))
        if unknown or self.index in present:
            raise SecureSumError(f"nodes {unknown} have given this node no shares")
        needed = shares_needed(self.threshold, len(self.peers) + 1)
        if len(set(present)) + 1 < needed:
            raise SecureSumError(
                f"{len(set(present))} neighbours take part, and with this node it takes {needed}"
            )
        total = words + mask(derived(slot.own_seed, _OWN_MASK), layout)
        for peer in sorted(set(present)):
            common = pair_mask(
                slot.mask_seed, self.own, self.peers[peer], self.session, number, layout
            )
            # The smaller number adds what the larger one takes away.
            total = total + common if self.index < peer else total - common
        used = dataclasses.replace(slot, present=tuple(sorted(set(present))), state="masked")
        # Its own seeds are of no more use to the node: its neighbours have the shares.
        used = dataclasses.replace(used, mask_seed=b"", own_seed=b"")
        return self._with(number, used), layout.reduced(total)

    def confirm(self, number: int, survivors: Sequence[int], signer: Signer) -> bytes:
        """Return the signature of the list of those whose numbers are in a sum."""
        self._check_survivors(self._slot(number, "masked"), survivors)
        return signer.sign(survivors_text(self.session, number, survivors))

    def reveal(
        self,
        number: int,
        survivors: Sequence[int],
        confirmations: Mapping[int, bytes] | None = None,
        trusted: TrustedKeys | None = None,
    ) -> tuple[NodeSecrets, dict[int, bytes]]:
        """Return the shares that open a sum: for each neighbour of one of its two secrets.

        Parameters
        ----------
        number : int
            Of the sum.
        survivors : sequence of int
            Numbers of all nodes, neighbours or not, whose masked numbers the server has.
        confirmations : mapping from int to bytes, optional
            By neighbour, its signature of the same list.
        trusted : TrustedKeys, optional
            Whose keys; then as many neighbours must have signed as it takes to open a secret.

        Raises
        ------
        SecureSumError
            If too few have survived, or the list is not the one that the others know.
        """
        slot = self._slot(number, "masked")
        there = self._check_survivors(slot, survivors)
        if trusted is not None:
            text = survivors_text(self.session, number, survivors)
            given = confirmations or {}
            for peer in sorted(there & given.keys() - {self.index}):
                trusted.check(self.peers[peer].signer, text, given[peer])
            signed = len(there & given.keys() - {self.index}) + 1
            if signed < shares_needed(self.threshold, len(self.peers) + 1):
                raise SecureSumError(
                    f"{signed} nodes of the neighbourhood have confirmed who is in the sum, which "
                    "is too few to open it"
                )
        shares = {
            peer: slot.shares[peer][1 if peer in there else 0]
            for peer in (self.index, *slot.present)
        }
        return self._with(number, Slot(b"", b"", {}, slot.present, "revealed")), shares

    def _check_survivors(self, slot: Slot, survivors: Sequence[int]) -> set[int]:
        there = set(survivors) & {self.index, *slot.present}
        if self.index not in there:
            raise SecureSumError("a sum without this node's numbers is none of its business")
        needed = shares_needed(self.threshold, len(self.peers) + 1)
        if len(there) < needed:
            raise SecureSumError(
                f"{len(there)} nodes of the neighbourhood are in the sum, it takes {needed}: "
                "nothing is opened"
            )
        return there

    def _slot(self, number: int, state: str) -> Slot:
        if not 0 <= number < len(self.slots) or self.index < 0:
            raise SecureSumError(f"there is no sum {number} in this session")
        slot = self.slots[number]
        if slot.state != state:
            done = {"new": "not masked", "masked": "masked", "revealed": "opened"}[slot.state]
            raise SecureSumError(f"sum {number} of this session is {done} on this node already")
        return slot

    def _with(self, number: int, slot: Slot) -> NodeSecrets:
        slots = [*self.slots[:number], slot, *self.slots[number + 1 :]]
        return dataclasses.replace(self, slots=tuple(slots))

    def _channel(self, public: bytes, sender: int, receiver: int) -> bytes:
        label = f"letter {self.session} {sender} {receiver}".encode()
        return agreed_key(self.channel_seed, public, label)

    # --- text -----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return all of it as text, for the node's own state; it holds secrets."""
        return json.dumps(dataclasses.asdict(self), default=_plain)

    @classmethod
    def from_json(cls, text: str) -> NodeSecrets:
        """Return what `to_json` wrote."""
        values = _restored(json.loads(text))
        values["own"] = AdvertisedKeys(**_tuples(values["own"]))
        values["peers"] = {
            int(peer): AdvertisedKeys(**_tuples(keys)) for peer, keys in values["peers"].items()
        }
        values["slots"] = tuple(
            Slot(
                slot["mask_seed"],
                slot["own_seed"],
                {int(peer): tuple(pair) for peer, pair in slot["shares"].items()},
                tuple(slot["present"]),
                slot["state"],
            )
            for slot in values["slots"]
        )
        return cls(**values)


def pair_mask(
    seed: bytes,
    own: AdvertisedKeys,
    peer: AdvertisedKeys,
    session: str,
    number: int,
    layout: Layout,
) -> Words:
    """Return the mask that two nodes have in common, from the seed of either."""
    both = hashlib.sha256(b"".join(sorted([own.masks[number], peer.masks[number]]))).hexdigest()
    label = f"mask {session} {number} {both}".encode()
    return mask(agreed_key(seed, peer.masks[number], label), layout)


def own_mask(seed: bytes, layout: Layout) -> Words:
    """Return the mask that a node has for itself, from its seed."""
    return mask(derived(seed, _OWN_MASK), layout)


def is_own_seed(seed: bytes, keys: AdvertisedKeys, number: int) -> bool:
    """Return whether a seed is that of a node's own mask."""
    return secret_digest(seed, _OWN_MASK) == keys.digests[number]


def is_mask_seed(seed: bytes, keys: AdvertisedKeys, number: int) -> bool:
    """Return whether a seed is that of a node's masks with its neighbours."""
    return public_key(seed) == keys.masks[number]


def survivors_text(session: str, number: int, survivors: Sequence[int]) -> bytes:
    """Return what nodes sign before a sum is opened."""
    listed = ",".join(map(str, sorted(set(survivors))))
    return f"survivors {session} {number} {listed}".encode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"b": base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} in the state of a secure sum")


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"b"}:
            return base64.b64decode(value["b"])
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
