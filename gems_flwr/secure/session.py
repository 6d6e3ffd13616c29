"""A session of secure sums, both sides: the secrets of a node, and how the server opens a sum.

Bonawitz et al. 2017, with the sparse graph of Bell et al. 2020, in fewer messages. Every two
neighbours have a key in common, from which for each sum a mask follows that cancels in it. Beside
it a node has a mask of its own, of whose seed its neighbours hold shares. Masked numbers go out
together with these shares, for all who have published keys. If one of them is lost before its
numbers came in, the others agree to a shorter list and give the masks that they have in common with
it. When all on the list have done so they give their shares of the own masks of those on it; what
is left when the server takes all of these away is the sum.

What protects a node from a server that lies is what it agrees to (`agreed`, `check_opening`), and
that all keys of a session derive from one digest of everything in it; docs/secure-sums.md has why.

A node's values go to text and back, since on a deployment every message is handled by a new
process.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from gems_flwr.errors import SecureSumError
from gems_flwr.secure.fixed_point import Layout, Words
from gems_flwr.secure.keys import (
    FEWEST_NEIGHBOURS,
    KEY_BYTES,
    SHARE_BYTES,
    TAG_BYTES,
    Signer,
    agreed_key,
    derived,
    draw_neighbours,
    is_signed,
    join_shares,
    new_seed,
    public_key,
    sealed,
    shares_needed,
    split_secret,
    unsealed,
)

# Of a signature, and of the public key that it is by.
MAX_SIGNATURE_BYTES = 200
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
    return mask(derived(seed, b"own mask"), layout)


def _digest(seed: bytes) -> bytes:
    """Return what may be published of a random seed."""
    return hashlib.sha256(b"own mask" + seed).digest()


# --- what nodes agree to --------------------------------------------------------------------


def agreed(
    members: Collection[int], own: int, among: Collection[int], needed: int
) -> frozenset[int]:
    """Return the list of those in a sum, if a node may agree to it.

    It is in the list itself, no one else is but those `among` whom it has been so far, and they are
    as many as it takes.
    """
    listed = frozenset(members)
    if own not in listed:
        raise SecureSumError("this node's numbers are not in that sum, so it opens nothing")
    if added := sorted(listed - frozenset(among)):
        raise SecureSumError(f"nodes {added} were not in that sum before")
    if (count := len(listed)) < needed:
        raise SecureSumError(f"{count} nodes are in the sum, it takes {needed}: nothing is opened")
    return listed


def check_opening(
    members: Collection[int], current: Collection[int], signers: Collection[int] | None, needed: int
) -> None:
    """Refuse to open a sum but that of the current list, if enough on it have signed the same one.

    Without keys to check signatures by, `signers` is None.
    """
    if set(members) != set(current):
        raise SecureSumError("this node has agreed to another list of those in the sum")
    if signers is not None and (count := len(set(signers) & set(members))) < needed:
        few = f"{count} nodes have confirmed who is in the sum, it takes {needed} to open it"
        raise SecureSumError(few)


def list_text(digest: bytes, number: int, members: Collection[int]) -> bytes:
    """Return what nodes sign of a list: it holds for one sum of one session with all its keys."""
    return b"list %s %d %s" % (digest, number, ",".join(map(str, sorted(members))).encode())


def judged(conflicts: Collection[tuple[int, int]], liars: int) -> tuple[set[int], set[int]]:
    """Return who breaks the protocol, and without whom there would be no conflict between others.

    Whoever is in conflict with more others than may lie is at fault, be it accused or accuser.
    What is left is one node's word against another's: no one is blamed, and as few as possible are
    to leave, both of two that are in conflict with each other alone.
    """
    pairs, leaving = {frozenset(pair) for pair in conflicts}, set[int]()
    met = Counter(chain(*(pair for pair in pairs if len(pair) == 2)))
    at_fault = {node for node, others in met.items() if others > liars}
    while rest := {pair for pair in pairs if not pair & (at_fault | leaving)}:
        [(worst, others)] = Counter(chain(*rest)).most_common(1)
        leaving |= {worst} if others > 1 else frozenset().union(*rest)
    return at_fault, leaving


@dataclass(frozen=True)
class AdvertisedKeys:
    """What a node publishes before a session; both are new in each, so none can be replayed."""

    # Public key for what two nodes have in common; for each sum, the digest of the seed of the
    # node's own mask.
    channel: bytes
    digests: tuple[bytes, ...]
    # Public key that it signs with, and the signature of `signed_text`; or empty.
    signer: bytes = b""
    signature: bytes = b""

    def __post_init__(self) -> None:
        fits = bool(self.digests) and {*map(len, (self.channel, *self.digests))} == {KEY_BYTES}
        if not fits or max(len(self.signer), len(self.signature)) > MAX_SIGNATURE_BYTES:
            raise SecureSumError("the keys that a node advertises do not have the right lengths")

    def check(self, session: str, trusted: Collection[bytes] | None = None) -> None:
        """Refuse a key that hides nothing, or that is not signed for, where signatures count."""
        agreed_key(bytes(16), self.channel, b"")  # any seed finds it out
        if trusted is not None and self.signer not in trusted:
            raise SecureSumError(f"its signing key is not among the {len(trusted)} trusted ones")
        if not self.has_signed(self.signed_text(session), self.signature):
            raise SecureSumError("the signature of its keys is not by the key that it names")

    def has_signed(self, text: bytes, signature: bytes) -> bool:
        """Return whether a signature is the node's; of one without a key it is empty."""
        return is_signed(text, signature, self.signer) if self.signer else not signature

    def signed_text(self, session: str) -> bytes:
        """Return what the signature is of."""
        return b"".join([b"keys ", session.encode(), b" ", self.channel, *self.digests])

    def to_text(self) -> str:
        """Return all of it as text."""
        parts = (b"".join([self.channel, *self.digests]), self.signer, self.signature)
        return ".".join(base64.b64encode(part).decode() for part in parts)

    @classmethod
    def from_text(cls, text: str) -> AdvertisedKeys:
        """Return what `to_text` wrote."""
        try:
            data, signer, signature = (base64.b64decode(p, validate=True) for p in text.split("."))
        except (ValueError, AttributeError) as error:
            raise SecureSumError(f"the keys of a node cannot be read: {error}") from error
        channel, *digests = (data[i : i + KEY_BYTES] for i in range(0, len(data) or 1, KEY_BYTES))
        return cls(channel, tuple(digests), signer, signature)


@dataclass(frozen=True)
class Roster:
    """Who may be in the sums of a session, and all that follows from it: the same on every node."""

    session: str
    # Part of the nodes, and of a neighbourhood, that it takes to open anything.
    threshold: float
    # With how many others a node shares masks; None for the default of `draw_neighbours`.
    degree: int | None
    keys: Mapping[int, AdvertisedKeys]

    def __post_init__(self) -> None:
        every, at_least = list(self.keys.values()), FEWEST_NEIGHBOURS
        public = [key for keys in every for key in (keys.channel, keys.signer) if key]
        few = self.degree is not None and self.degree < at_least
        low, sums = not 0.5 < self.threshold <= 1, {len(each.digests) for each in every}
        problems = {
            # The sum of two shows each the other's numbers.
            f"a secure sum takes three nodes at least, got {len(every)}": len(every) < 3,
            f"the threshold must be above a half, to 1: {self.threshold}": low,
            f"masks are shared with at least {at_least} neighbours, got {self.degree}": few,
            "nodes have keys for different numbers of sums": len(sums) > 1,
            "two nodes advertise or sign with the same key": len({*public}) < len(public),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise SecureSumError(problem)

    @property
    def sums(self) -> int:
        """For how many sums there are keys."""
        return len(next(iter(self.keys.values())).digests)

    @property
    def letter_bytes(self) -> int:
        """Bytes of a letter: a share for each sum, sealed."""
        return SHARE_BYTES * self.sums + TAG_BYTES

    @cached_property
    def digest(self) -> bytes:
        """What everything in the session is derived from."""
        return hashlib.sha256(self.to_json().encode()).digest()

    @cached_property
    def neighbours(self) -> Mapping[int, tuple[int, ...]]:
        """With whom each node shares masks; no one chooses it."""
        return draw_neighbours(sorted(self.keys), self.degree, self.digest)

    @property
    def needed(self) -> int:
        """Fewest nodes in a sum, and fewest signatures."""
        return shares_needed(self.threshold, len(self.keys))

    @property
    def degree_drawn(self) -> int:
        """How many neighbours each node has."""
        return len(self.neighbours[min(self.keys)])

    @property
    def needed_near(self) -> int:
        """Fewest of a node and its neighbours in a sum, and fewest shares of a seed."""
        return shares_needed(self.threshold, self.degree_drawn + 1)

    @property
    def liars(self) -> int:
        """How many of a neighbourhood may collude with the server: one less than it takes."""
        return max(1, 2 * self.needed_near - self.degree_drawn - 2)

    def near(self, node: int, members: Collection[int]) -> set[int]:
        """Return which members a node shares masks with, and itself if it is one."""
        return {node, *self.neighbours[node]} & set(members)

    def to_json(self) -> str:
        """Return all of it as text."""
        keys = {str(node): self.keys[node].to_text() for node in sorted(self.keys)}
        return json.dumps([self.session, self.threshold, self.degree, keys])

    @classmethod
    def from_json(cls, text: str) -> Roster:
        """Return what `to_json` wrote."""
        session, threshold, degree, keys = json.loads(text)
        read = {int(node): AdvertisedKeys.from_text(each) for node, each in keys.items()}
        return cls(str(session), float(threshold), degree, read)


# --- a node ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeSecrets:
    """A node's part of a session; it changes by being replaced, and refuses by SecureSumErrors."""

    session: str
    # Of its private key, until it has joined; and of its own masks, until they are used.
    seed: bytes
    own_seeds: tuple[bytes, ...]
    own: AdvertisedKeys
    roster: Roster | None = None
    index: int = -1
    # By neighbour: what masks of later sums are derived from, the key of its letter, and the shares
    # of the seeds of its own masks, one for each sum.
    roots: Mapping[int, bytes] = field(default_factory=dict)
    letter_keys: Mapping[int, bytes] = field(default_factory=dict)
    held: Mapping[int, bytes] = field(default_factory=dict)
    # The sum under way, the list that the node has agreed to, and keys of masks in common with
    # those on it; sums follow each other, numbers are masked once and a sum is opened once.
    number: int = -1
    members: tuple[int, ...] = ()
    pairs: Mapping[int, bytes] = field(default_factory=dict)
    is_open: bool = False

    @classmethod
    def begin(cls, session: str, sums: int, signer: Signer | None = None) -> NodeSecrets:
        """Draw the secrets of a session for so many sums."""
        seed, own_seeds = new_seed(), tuple(new_seed() for _ in range(sums))
        own = AdvertisedKeys(public_key(seed), tuple(map(_digest, own_seeds)))
        if signer is not None:
            own = dataclasses.replace(own, signer=signer.public)
            own = dataclasses.replace(own, signature=signer.sign(own.signed_text(session)))
        return cls(session, seed, own_seeds, own)

    def join(self, roster: Roster) -> tuple[NodeSecrets, dict[int, bytes]]:
        """Take up a session; return what is sealed for each neighbour: shares of all seeds.

        Keys of others are to be looked at before, by `suspects`.
        """
        places = [node for node, keys in roster.keys.items() if keys == self.own]
        if self.roster is not None or roster.session != self.session or len(places) != 1:
            raise SecureSumError("this node has joined before, or its keys are not in the session")
        [index] = places
        peers = roster.neighbours[index]
        holders = sorted([index, *peers])
        held = dict.fromkeys(holders, b"")
        for own_seed in self.own_seeds:
            shares = split_secret(own_seed, roster.needed_near, len(holders))
            held = {h: held[h] + share for h, share in zip(holders, shares, strict=True)}
        # With both places: a colluder may use another node's point, written in another way.
        labels = {p: b"pair %d %d " % (min(index, p), max(index, p)) + roster.digest for p in peers}
        roots = {p: agreed_key(self.seed, roster.keys[p].channel, labels[p]) for p in peers}
        letters = {peer: sealed(_letter_key(roots[peer], index), held[peer]) for peer in peers}
        keys = {peer: _letter_key(root, peer) for peer, root in roots.items()}
        own = dataclasses.replace(self, seed=b"", roster=roster, index=index, roots=roots)
        return dataclasses.replace(own, held={index: held[index]}, letter_keys=keys), letters

    def suspects(self, roster: Roster, trusted: Collection[bytes] | None) -> dict[int, str]:
        """Return whose keys this node does not accept, and why."""
        found = {}
        for node, keys in roster.keys.items():
            try:
                if keys != self.own:
                    keys.check(self.session, trusted)
            except SecureSumError as error:
                found[node] = str(error)
        return found

    def entered(self, number: int, members: Collection[int], asked: bytes = b"") -> NodeSecrets:
        """Agree to be in a sum with others, if there are enough; then numbers are masked.

        `asked` is a digest of the question: masks of nodes that are asked different ones stay.
        """
        roster = self.joined
        if not self.number < number < roster.sums:
            raise SecureSumError(f"sum {number} of this session is masked already, or none of it")
        listed = self._agreed(members, roster.keys)
        roots = self.roots
        for _ in range(self.number + 1, number):
            roots = _next(roots)
        pairs = {p: derived(root, b"mask" + asked) for p, root in roots.items() if p in listed}
        there, roots = tuple(sorted(listed)), _next(roots)
        return dataclasses.replace(
            self, roots=roots, number=number, members=there, pairs=pairs, is_open=False
        )

    def masked(self, layout: Layout, words: Words) -> tuple[NodeSecrets, Words]:
        """Return numbers under the masks of the sum that was entered."""
        total = words + _own_mask(self.own_seeds[self.number], layout)
        for peer, key in self.pairs.items():
            common = mask(key, layout)
            # The smaller number adds what the larger one takes away.
            total = total + common if self.index < peer else total - common
        # Its own seed is of no more use to the node: its neighbours have the shares.
        done = self.number + 1
        seeds = (*[b""] * done, *self.own_seeds[done:])
        return dataclasses.replace(self, own_seeds=seeds), layout.reduced(total)

    @property
    def list_text(self) -> bytes:
        """What the node signs of the list that it has agreed to."""
        return list_text(self.joined.digest, self.number, self.members)

    def narrowed(
        self, number: int, members: Collection[int]
    ) -> tuple[NodeSecrets, dict[int, bytes]]:
        """Agree to a shorter list; return the keys in common with neighbours that are off it."""
        self._check_under_way(number)
        listed = self._agreed(members, self.members)
        gone = {peer: key for peer, key in self.pairs.items() if peer not in listed}
        pairs = {peer: key for peer, key in self.pairs.items() if peer in listed}
        return dataclasses.replace(self, members=tuple(sorted(listed)), pairs=pairs), gone

    def opened(
        self,
        number: int,
        members: Collection[int],
        signatures: Mapping[int, bytes],
        letters: Mapping[int, bytes],
        *,
        is_checked: bool,
    ) -> tuple[NodeSecrets, dict[int, bytes], list[int]]:
        """Return shares of the own masks of the list's neighbours, and whose letters are no good.

        `is_checked` says whether enough nodes must have signed the list.
        """
        roster = self._check_under_way(number)
        signers = None
        if is_checked:
            signing = {node: keys for node, keys in roster.keys.items() if keys.signer}
            there, text = signing.keys() & signatures.keys(), self.list_text
            signers = [n for n in there if signing[n].has_signed(text, signatures[n])]
        check_opening(members, self.members, signers, roster.needed)
        held = dict(self.held)
        for peer in (letters.keys() & self.letter_keys.keys()) - held.keys():
            with contextlib.suppress(SecureSumError):
                if len(letters[peer]) == roster.letter_bytes:
                    held[peer] = unsealed(self.letter_keys[peer], letters[peer])
        start, end = SHARE_BYTES * number, SHARE_BYTES * (number + 1)
        near = sorted(roster.near(self.index, members))
        shares = {peer: held[peer][start:end] for peer in near if peer in held}
        left = {peer: bytes(end) + data[end:] for peer, data in held.items()}
        done = dataclasses.replace(self, held=left, pairs={}, is_open=True)
        return done, shares, [peer for peer in near if peer not in held]

    @property
    def joined(self) -> Roster:
        """The roster; a node that has not joined has agreed to nothing."""
        if self.roster is None:
            raise SecureSumError("this node has not joined the session")
        return self.roster

    def _check_under_way(self, number: int) -> Roster:
        if number != self.number or self.is_open:
            state = "opened on this node already" if self.number >= number >= 0 else "not masked"
            raise SecureSumError(f"sum {number} of this session is {state}")
        return self.joined

    def _agreed(self, members: Collection[int], among: Collection[int]) -> frozenset[int]:
        roster = self.joined
        listed = agreed(members, self.index, among, roster.needed)
        if (count := len(roster.near(self.index, listed))) < (needed := roster.needed_near):
            raise SecureSumError(f"{count} neighbours are in the sum, it takes {needed}")
        return listed

    def to_json(self) -> str:
        """Return all of it as text, for the node's own state; it holds secrets."""
        by_peer = (self.roots, self.letter_keys, self.held, self.pairs)
        hexed = [{peer: data.hex() for peer, data in each.items()} for each in by_peer]
        seeds = [seed.hex() for seed in (self.seed, *self.own_seeds)]
        roster = self.roster and self.roster.to_json()
        plain = [self.session, self.index, self.number, self.members, self.is_open]
        return json.dumps([plain, seeds, self.own.to_text(), roster, hexed])

    @classmethod
    def from_json(cls, text: str) -> NodeSecrets:
        """Return what `to_json` wrote."""
        plain, seeds, own, roster, hexed = json.loads(text)
        session, index, number, members, is_open = plain
        seed, *own_seeds = map(bytes.fromhex, seeds)
        roots, letter_keys, held, pairs = (
            {int(peer): bytes.fromhex(data) for peer, data in each.items()} for each in hexed
        )
        return cls(
            session, seed, tuple(own_seeds), AdvertisedKeys.from_text(own),
            roster and Roster.from_json(roster), index, roots, letter_keys, held,
            number, tuple(members), pairs, is_open,
        )  # fmt: skip


def _letter_key(root: bytes, sender: int) -> bytes:
    return derived(root, b"letter %d" % sender)


def _next(roots: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return what masks of the next sum are derived from: there is no way back."""
    return {peer: derived(root, b"next") for peer, root in roots.items()}


# --- the server -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SumSession:
    """A session as the server knows it; nodes have numbers."""

    roster: Roster
    # Who takes part in the next sum; by sender, sealed shares for its neighbours; the last sum.
    members: tuple[int, ...]
    letters: Mapping[int, Sequence[bytes]] = field(default_factory=dict)
    number: int = -1

    def letter(self, sender: int, receiver: int) -> bytes:
        """Return what a node has sealed for a neighbour."""
        return self.letters[sender][self.roster.neighbours[sender].index(receiver)]

    def with_members(self, nodes: Collection[int]) -> SumSession:
        """Go on with some nodes, without those whose neighbours are too few."""
        members, near = set(nodes), self.roster.near
        while few := {n for n in members if len(near(n, members)) < self.roster.needed_near}:
            members -= few
        return dataclasses.replace(self, members=tuple(sorted(members)))

    def is_quorum(self, nodes: Collection[int]) -> bool:
        """Return whether enough nodes are left to open a sum of the members."""
        lacking = (len(self.roster.near(each, nodes)) for each in self.members)
        return len(nodes) >= self.roster.needed and min(lacking) >= self.roster.needed_near

    @property
    def list_text(self) -> bytes:
        """What nodes sign of the list of members."""
        return list_text(self.roster.digest, self.number, self.members)

    def seeds(
        self, shares: Mapping[int, Mapping[int, bytes]]
    ) -> tuple[dict[int, bytes], set[tuple[int, int]]]:
        """Return seeds of own masks that shares, by holder and owner, belong to; and conflicts.

        Where a holder's share does not fit, it or the owner lies; owners whose shares fit nothing
        that they have published are not among the seeds.
        """
        found, conflicts, doubts = dict[int, bytes](), set[tuple[int, int]](), Counter[int]()
        needed = self.roster.needed_near
        for node in self.members:
            holders = sorted([node, *self.roster.neighbours[node]])
            given = {h: shares[h][node] for h in holders if node in shares.get(h, {})}
            # Whose shares were wrong before comes last.
            places = sorted(given, key=lambda holder: doubts[holder])
            digest = self.roster.keys[node].digests[self.number]
            by_place = {holders.index(holder): given[holder] for holder in places}
            try:
                found[node], wrong = join_shares(by_place, needed, _digest, digest)
            except SecureSumError:
                # With fewer to spare wrong shares of others would be as good a reason.
                sure = len(places) - needed >= self.roster.liars
                conflicts |= {(holder, node) for holder in (places if sure else [node])}
                continue
            doubts.update(holders[place] for place in wrong)
            conflicts |= {(holders[place], node) for place in wrong}
        return found, conflicts

    def total(
        self,
        layout: Layout,
        masked: Mapping[int, Words],
        seeds: Mapping[int, bytes],
        gone: Mapping[int, Mapping[int, bytes]],
    ) -> Words:
        """Return the sum of what members sent.

        `gone` has the keys that each gave of masks in common with nodes that are in it no more.
        """
        total = layout.add([masked[node] for node in self.members])
        for node in self.members:
            total = total - _own_mask(seeds[node], layout)
            for peer, key in gone.get(node, {}).items():
                common = mask(key, layout)
                # What the one who is left has added, or taken away.
                total = total - common if node < peer else total + common
        return layout.reduced(total)
