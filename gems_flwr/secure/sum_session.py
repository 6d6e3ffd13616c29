"""The server's side of a session of secure sums: who is whose neighbour, and how a sum is opened.

The server holds public keys, sealed letters and masked numbers. It learns the seeds of own masks of
those whose numbers are in a sum, and the keys of those who dropped out of it, never both of
one node; what is left when these masks are taken away is the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gems_flwr.errors import SecureSumError
from gems_flwr.secure.advertised_keys import AdvertisedKeys
from gems_flwr.secure.fixed_point import Layout, Words
from gems_flwr.secure.neighbourhoods import (
    Neighbours,
    draw_neighbours,
    not_to_be_opened,
    shares_needed,
)
from gems_flwr.secure.node_secrets import is_mask_seed, is_own_seed, own_mask, pair_mask
from gems_flwr.secure.secret_shares import join_shares


@dataclass(frozen=True)
class SumSession:
    """A session as the server knows it.

    Parameters
    ----------
    session : str
        Which one.
    threshold : float
        Part of a neighbourhood that can open a secret, in (0.5, 1].
    keys : mapping from int to AdvertisedKeys
        Of every node, by its number.
    neighbours : mapping from int to tuple of int
        Of every node.
    letters : mapping from int to mapping from int to bytes
        By sender and receiver, the sealed shares.
    members : tuple of int
        Who takes part in the next sum.
    """

    session: str
    threshold: float
    keys: Mapping[int, AdvertisedKeys]
    neighbours: Neighbours
    letters: Mapping[int, Mapping[int, bytes]] = field(default_factory=dict)
    members: tuple[int, ...] = ()

    @classmethod
    def begin(
        cls,
        session: str,
        keys: Mapping[int, AdvertisedKeys],
        threshold: float,
        degree: int | None = None,
    ) -> SumSession:
        """Draw the neighbours of those who have advertised keys.

        Raises
        ------
        SecureSumError
            If there are fewer than three: the sum of two tells each the other's numbers.
        """
        if len(keys) < 3:
            raise SecureSumError(f"a secure sum takes three nodes at least, got {len(keys)}")
        rng = np.random.default_rng(list(session.encode()))
        return cls(session, threshold, dict(keys), draw_neighbours(sorted(keys), degree, rng))

    def peers_of(self, node: int) -> dict[int, AdvertisedKeys]:
        """Return the keys of a node's neighbours."""
        return {peer: self.keys[peer] for peer in self.neighbours[node]}

    def with_letters(self, letters: Mapping[int, Mapping[int, bytes]]) -> SumSession:
        """Keep what nodes have sealed for each other; who has sent it takes part.

        Raises
        ------
        SecureSumError
            If a node has not sealed something for each of its neighbours.
        """
        for sender, own in letters.items():
            if own.keys() != set(self.neighbours[sender]):
                raise SecureSumError(f"node {sender} has sealed shares for others than its own")
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

    def lacking(self, survivors: Collection[int]) -> list[int]:
        """Return the members whose secrets the survivors could not open."""
        return not_to_be_opened(survivors, self.members, self.neighbours, self.threshold)

    def is_quorum(self, survivors: Collection[int]) -> bool:
        """Return whether enough nodes are left to open a sum."""
        enough = shares_needed(self.threshold, len(self.letters))
        return len(survivors) >= max(3, enough) and not self.lacking(survivors)

    def opened(
        self,
        number: int,
        layout: Layout,
        masked: Mapping[int, Words],
        shares: Mapping[int, Mapping[int, bytes]],
    ) -> Words:
        """Return the sum of the survivors' numbers.

        Parameters
        ----------
        number : int
            Of the sum in the session.
        layout : Layout
            Of the numbers.
        masked : mapping from int to array
            What the survivors sent.
        shares : mapping from int to mapping from int to bytes
            By holder and by whose it is, what opens the sum.

        Raises
        ------
        SecureSumError
            If the shares do not suffice.
        """
        total = layout.add(list(masked.values()))
        for node in self.members:
            if node in masked:
                seed = self._secret(number, node, shares)
                total = total - own_mask(seed, layout)
            elif there := [peer for peer in self.present_for(node) if peer in masked]:
                seed = self._secret(number, node, shares, dropped=True)
                for peer in there:
                    common = pair_mask(
                        seed, self.keys[node], self.keys[peer], self.session, number, layout
                    )
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
        holders: Sequence[int] = sorted([node, *self.neighbours[node]])
        given = {
            place: shares[holder][node]
            for place, holder in enumerate(holders)
            if node in shares.get(holder, {})
        }
        is_right = is_mask_seed if dropped else is_own_seed
        try:
            return join_shares(
                given,
                shares_needed(self.threshold, len(holders)),
                lambda seed: is_right(seed, self.keys[node], number),
            )
        except SecureSumError as error:
            raise SecureSumError(f"what node {node} has masked cannot be opened: {error}") from None
