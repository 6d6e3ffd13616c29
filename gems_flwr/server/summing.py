"""Totals over nodes: what is asked of many and looked at only as a sum.

`PlainSums` adds what nodes send. The server sees single summands pass, writes none of them
to disk and keeps none. Masks go behind the same interface: whoever has `total` can be in its place,
and the total has the same digits, for in both cases numbers of a ring are added (see
`gems_flwr.secure.fixed_point`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from flwr.app import Message, RecordDict

from gems_flwr.secure.fixed_point import Layout, Section, Words
from gems_flwr.typing import Float
from gems_flwr.wire.summands import put_layout, unpack_summand

if TYPE_CHECKING:
    from gems_flwr.server.round_methods import RoundMethods

Put = Callable[[Message], None]
# Sends a question to nodes; `Put` is called on every message before it goes.
Send = Callable[[Sequence[int], Put], list[Message]]
Check = Callable[[RecordDict], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Total:
    """Sums over nodes; as a collection, the names of these.

    Parameters
    ----------
    values : mapping from str to array
        By section, in double precision.
    nodes : tuple of str
        Whose sums these are, ordered by name.
    errors : mapping from str to float
        By section, how much rounding to the grid can have moved a number, at most.
    whole : pair of Layout and array, optional
        The same as whole numbers of the rings.
    """

    values: Mapping[str, Float]
    nodes: tuple[str, ...]

    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    whole: tuple[Layout, Words] | None = None

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def __contains__(self, node: object) -> bool:
        return node in self.nodes


class Summing(Protocol):
    """Whatever adds up what nodes send."""

    def total(
        self,
        strategy: RoundMethods,
        server_round: int,
        nodes: Sequence[int],
        sections: Sequence[Section],
        send: Send,
        *,
        check: Check | None = None,
        at_least: int = 0,
        step: str,
    ) -> Total:
        """Ask nodes for a summand each, and return the sum of those who gave one.

        Parameters
        ----------
        strategy : RoundMethods
            Whose round it is.
        server_round : int
            The round.
        nodes : sequence of int
            Whom to ask.
        sections : sequence of Section
            What a summand is made of.
        send : callable
            Gets nodes, and what to call on every message before it goes; returns replies.
        check : callable, optional
            Raises `BadReplyError` for a reply that cannot count.
        at_least : int
            How many must be in the sum.
        step : str
            Name of the exchange.

        Raises
        ------
        RoundFailedError
            If fewer are.
        """
        ...


class PlainSums:
    """Adds what nodes send as it is: no masks."""

    def total(
        self,
        strategy: RoundMethods,
        server_round: int,
        nodes: Sequence[int],
        sections: Sequence[Section],
        send: Send,
        *,
        check: Check | None = None,
        at_least: int = 0,
        step: str,
    ) -> Total:
        """Return the sum of what nodes send; see `Summing`."""
        layout = Layout(sections, nodes=max(1, len(nodes)))

        def unpack(content: RecordDict) -> Words:
            if check is not None:
                check(content)
            return unpack_summand(content, layout)

        replies = send(nodes, lambda message: put_layout(message.content, layout)) if nodes else []
        answers = strategy.accept(replies, unpack, at_least=at_least)
        words = layout.add([answer.value for answer in answers])
        names = tuple(answer.node for answer in answers)
        return Total(layout.decode(words), names, rounding(layout, len(names)), (layout, words))


def rounding(layout: Layout, summands: int) -> dict[str, float]:
    """Return by how much the sum of so many summands can be off, by section."""
    return {s.name: summands * s.step(layout.nodes) / 2 for s in layout.sections}
