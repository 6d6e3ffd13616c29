"""Leaving a total: what nodes had added, signed by them, taken out again.

A server that keeps nothing but a total cannot tell a node's share from the others'. The node can: a
`Difference` holds the very numbers of the rings that it had added, bound to the digest of the one
total that they are to be taken from and signed with the node's key, so nobody can leave in
another's name, and no difference counts twice. Without it the total is that of the others, to the
last bit.

What this does not do. Whoever has the total before and after has the leaver's summand: leaving
*alone* shows the server what the secure sum had hidden. Nodes that leave together add their
summands in a secure sum of their own first; their difference holds the sum, and each signs it.
Nor can anybody check that the numbers are those that were added once: what is checked is that the
rest can be a total (see `gems_flwr.moments.total_sums`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gems_flwr.errors import SecureSumError, SpaceError
from gems_flwr.secure.fixed_point import Words
from gems_flwr.secure.kept_total import (
    KeptTotal,
    TotalNote,
    check_words,
    load_words,
    save_words,
)
from gems_flwr.secure.signatures import Signer, TrustedKeys

FORMAT = "gems-difference"
VERSION = "1"


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """What one or several nodes take out of a total.

    Parameters
    ----------
    total : str
        sha256 of the total that it is taken from.
    nodes : tuple of str
        Who leaves.
    words : uint64 array
        Their summand, or the sum of theirs, in the rings of the total's layout.
    signatures : mapping from str to bytes
        By node.
    """

    total: str
    nodes: tuple[str, ...]
    words: Words
    signatures: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The sha256 of the numbers."""
        return hashlib.sha256(np.ascontiguousarray(self.words, dtype="<u8").tobytes()).hexdigest()

    @property
    def signed_text(self) -> bytes:
        """What every node that leaves signs: who leaves which total with which numbers."""
        said = {"total": self.total, "nodes": sorted(self.nodes), "words": self.digest}
        return b"gems-flwr leaves a total\n" + json.dumps(said, sort_keys=True).encode()

    def signed(self, node: str, signer: Signer) -> Difference:
        """Return the difference with the signature of a node that leaves.

        Raises
        ------
        SecureSumError
            If the node does not leave.
        """
        if node not in self.nodes:
            raise SecureSumError(f"{node} is not among those who leave: {list(self.nodes)}")
        signature = signer.sign(self.signed_text)
        return dataclasses.replace(self, signatures={**self.signatures, node: signature})


def difference_from(note: TotalNote, nodes: tuple[str, ...], words: Words) -> Difference:
    """Return the difference by which nodes leave a total, to be signed by each.

    Parameters
    ----------
    note : TotalNote
        Of the total, as the server tells it.
    nodes : tuple of str
        Who leaves.
    words : uint64 array
        What they had added: ``note.layout.encode(…)``, or the secure sum of several.

    Raises
    ------
    SecureSumError
        If they are not in the total.
    SpaceError
        If the numbers do not fit its layout.
    """
    check_words(note.layout, words)
    strangers = [node for node in nodes if node not in note.nodes]
    if strangers or not nodes:
        raise SecureSumError(f"{strangers} are not in the total of {list(note.nodes)}")
    return Difference(note.digest, tuple(nodes), words)


def without(total: KeptTotal, difference: Difference, keys: Mapping[str, TrustedKeys]) -> KeptTotal:
    """Return a total without those who leave it.

    Parameters
    ----------
    total : KeptTotal
        The total.
    difference : Difference
        What they take out.
    keys : mapping from str to TrustedKeys
        By node, the public key that it is known by: one each.

    Raises
    ------
    SecureSumError
        If it is another total's difference, a node is not in the total or would be the last in it,
        or a signature is missing or not by the node's key.
    SpaceError
        If the numbers do not fit.
    """
    if difference.total != total.note.digest:
        raise SecureSumError(
            f"the difference is one from the total {difference.total[:16]}…, this total is "
            f"{total.note.digest[:16]}…: the node has to sign it anew"
        )
    difference_from(total.note, difference.nodes, difference.words)
    if len(set(difference.nodes)) < len(difference.nodes):
        raise SecureSumError(f"a node leaves once: {list(difference.nodes)}")
    if set(difference.nodes) == set(total.nodes):
        raise SecureSumError("nobody would be left: delete the total and its model instead")
    for node in difference.nodes:
        _check_signature(difference, node, keys)
    # Modulo 2^64, of which every ring is a part.
    rest = total.layout.reduced(total.words - difference.words)
    stay = tuple(node for node in total.nodes if node not in difference.nodes)
    return dataclasses.replace(total, words=rest, nodes=stay)


def _check_signature(difference: Difference, node: str, keys: Mapping[str, TrustedKeys]) -> None:
    known = keys.get(node)
    if known is None or len(known.keys) != 1:
        raise SecureSumError(f"name the public key of {node}, one file that is called {node}.pub")
    signature = difference.signatures.get(node)
    if signature is None:
        raise SecureSumError(f"the difference is not signed by {node}")
    try:
        known.check(next(iter(known.keys)), difference.signed_text, signature)
    except SecureSumError as error:
        raise SecureSumError(f"the difference is not signed by {node}: {error}") from error


def save_difference(path: str | Path, difference: Difference) -> None:
    """Write a difference, for the owner's eyes only: it holds what a node's data add up to.

    Raises
    ------
    DiskError
        If it cannot be written.
    """
    meta = {
        "total": difference.total,
        "nodes": list(difference.nodes),
        "signatures": {node: each.hex() for node, each in difference.signatures.items()},
    }
    header = {"format": FORMAT, "version": VERSION, "meta": json.dumps(meta, sort_keys=True)}
    save_words(path, difference.words, header)


def load_difference(path: str | Path) -> Difference:
    """Read a difference.

    Raises
    ------
    SecureSumError
        If the file is damaged, or holds something else.
    """
    words, meta = load_words(path, FORMAT, VERSION)
    try:
        signatures = {str(n): bytes.fromhex(each) for n, each in meta["signatures"].items()}
        nodes = tuple(map(str, meta["nodes"]))
        return Difference(str(meta["total"]), nodes, words, signatures)
    except (ValueError, KeyError, TypeError, AttributeError, SpaceError) as error:
        raise SecureSumError(f"{path} holds no difference: {error}") from error
