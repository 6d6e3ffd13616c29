"""Totals over nodes of which the server sees no single summand.

`SecureSums` stands in the place of `gems_flwr.server.summing.PlainSums`: the same questions, the
same digits, and every summand under masks. A session of keys serves the sums of one round. Who is
lost on the way is named; below the threshold nothing is opened and the round fails.

What goes over the wire is `gems_flwr.wire.secure_messages`, what is done with it
`gems_flwr.secure.sum_session`. Nothing of it is written to disk, and a run that is resumed begins
the round's session anew.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from flwr.app import ConfigRecord, Message, RecordDict

from gems_flwr.errors import RoundFailedError, SecureSumError
from gems_flwr.secure.fixed_point import Layout, Section, Words
from gems_flwr.secure.secure_sum import SecureSum
from gems_flwr.secure.sum_session import SumSession
from gems_flwr.server.exchange import Answer
from gems_flwr.server.log import log_event
from gems_flwr.server.summing import Check, Send, Total, rounding
from gems_flwr.wire.keys import TRAIN
from gems_flwr.wire.secure_messages import (
    MAX_SUMS,
    ConfirmStage,
    KeysStage,
    MaskStage,
    RevealStage,
    SharesStage,
    Stage,
    put_stage,
    unpack_confirm_reply,
    unpack_keys_reply,
    unpack_letters_reply,
    unpack_masked,
    unpack_shares_reply,
)
from gems_flwr.wire.summands import put_layout

if TYPE_CHECKING:
    from gems_flwr.server.round_methods import RoundMethods

T = TypeVar("T")


@dataclass(frozen=True)
class _Session:
    """A session under way: the round it belongs to, and which node has which number."""

    server_round: int
    state: SumSession
    ids: Mapping[int, int]
    used: int = 0

    @property
    def numbers(self) -> dict[int, int]:
        return {node_id: number for number, node_id in self.ids.items()}

    @property
    def members(self) -> list[int]:
        """Ids of those who take part in the next sum."""
        return [self.ids[number] for number in self.state.members]

    @property
    def is_fresh(self) -> bool:
        return not self.used


class SecureSums:
    """Adds what nodes send under masks.

    Parameters
    ----------
    options : SecureSum
        How.
    sums : int
        How many sums a session of keys is for: as many as a round has, or fewer.
    """

    def __init__(self, options: SecureSum, sums: int = 4) -> None:
        self.options, self.sums = options, min(sums, MAX_SUMS)
        self._session: _Session | None = None

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
        """Return the sum of what nodes send; see `gems_flwr.server.summing.Summing`.

        Raises
        ------
        RoundFailedError
            If fewer nodes than the threshold, or than `at_least`, are left; nothing is opened then.
        """
        self._play = (strategy, server_round, step)
        session = self._ready(nodes)
        state, number, numbers = session.state, session.used, session.numbers
        layout = Layout(sections, nodes=len(session.members))

        def put(message: Message) -> None:
            node = numbers[message.metadata.dst_node_id]
            letters = state.letters_for(node) if session.is_fresh else {}
            put_layout(message.content, layout)
            stage = MaskStage(state.session, number, state.present_for(node), letters)
            put_stage(message.content, stage)

        def unpack(content: RecordDict) -> Words:
            if check is not None:
                check(content)
            return unpack_masked(content, layout)

        answers = strategy.accept(send(session.members, put), unpack)
        masked = self._by_number(answers, session)
        self._refuse_few(session, masked, at_least, "gave their numbers")
        shares = self._shares(session, number, sorted(masked))
        self._refuse_few(session, shares, 0, "would open it")
        try:
            words = state.opened(number, layout, masked, shares)
        except SecureSumError as error:
            raise self._failed(list(session.ids), str(error)) from error
        self._session = dataclasses.replace(
            session, state=state.with_members(list(shares)), used=number + 1
        )
        names = tuple(answer.node for answer in answers)
        log_event("secure_sum", round=server_round, what=step, nodes=len(masked))
        return Total(layout.decode(words), names, rounding(layout, len(names)), (layout, words))

    # --- the session ----------------------------------------------------------------------------

    def _ready(self, nodes: Sequence[int]) -> _Session:
        """Return the session of this round, for the nodes that are to take part."""
        session, (_, server_round, _) = self._session, self._play
        usable = (
            session is not None
            and session.server_round == server_round
            and session.used < self.sums
            and set(nodes) <= set(session.ids.values())
        )
        if usable and session is not None:
            wanted = {session.numbers[node] for node in nodes}
            state = session.state.with_members(wanted & set(session.state.members))
            if state.is_quorum(state.members):
                return dataclasses.replace(session, state=state)
        # Also for a few of them, who could not open a sum that all have shared secrets for.
        self._session = self._begin(nodes)
        return self._session

    def _begin(self, nodes: Sequence[int]) -> _Session:
        """Let nodes exchange keys and shares."""
        _, server_round, _ = self._play
        name = secrets.token_hex(8)
        asked: dict[int, Stage] = {node: KeysStage(name, self.sums) for node in nodes}
        keys = self._asked(asked, partial(unpack_keys_reply, sums=self.sums))
        if len(keys) < 3:
            said = f"{len(keys)} of {len(nodes)} nodes exchanged keys, it takes three at least"
            raise self._failed(list(keys), said)
        # Numbers follow the order of names, whoever answers first.
        ids = dict(enumerate(keys))
        state = SumSession.begin(
            name,
            {number: keys[node] for number, node in ids.items()},
            self.options.threshold,
            self.options.neighbours,
        )
        session = _Session(server_round, state, ids)
        asked = {
            node: SharesStage(name, number, state.threshold, state.peers_of(number))
            for number, node in ids.items()
        }
        letters = self._asked(
            asked,
            partial(unpack_letters_reply, sums=self.sums),
            lambda node, given: given.keys() == set(state.neighbours[session.numbers[node]]),
        )
        numbered = {session.numbers[node]: given for node, given in letters.items()}
        session = dataclasses.replace(session, state=state.with_letters(numbered))
        self._refuse_few(session, session.state.members, 0, "shared their secrets")
        return session

    def _shares(
        self, session: _Session, number: int, survivors: Sequence[int]
    ) -> dict[int, Mapping[int, bytes]]:
        """Return what the survivors give to open a sum, by their numbers."""
        state, there = session.state, tuple(survivors)
        nodes = [session.ids[survivor] for survivor in there]
        confirmed: dict[int, bytes] = {}
        if self.options.signed:
            confirm = ConfirmStage(state.session, number, there)
            signed = self._asked(dict.fromkeys(nodes, confirm), unpack_confirm_reply)
            confirmed = {session.numbers[node]: signature for node, signature in signed.items()}
        asked: dict[int, Stage] = {}
        for node in nodes:
            peers = state.present_for(session.numbers[node])
            signatures = {peer: confirmed[peer] for peer in peers if peer in confirmed}
            asked[node] = RevealStage(state.session, number, there, signatures)

        def fits(node: int, given: Mapping[int, bytes]) -> bool:
            own = session.numbers[node]
            return given.keys() == {own, *state.present_for(own)}

        shares = self._asked(asked, unpack_shares_reply, fits)
        return {session.numbers[node]: given for node, given in shares.items()}

    def _asked(
        self,
        stages: Mapping[int, Stage],
        unpack: Callable[[RecordDict], T],
        fits: Callable[[int, T], bool] | None = None,
    ) -> dict[int, T]:
        """Play one stage; return the answers by node, in the order of their names."""
        strategy, server_round, step = self._play
        if not stages:
            return {}
        word = next(iter(stages.values())).word
        messages = strategy.messages(
            server_round, stages, TRAIN, None, ConfigRecord(), step=f"{step}-{word}"
        )
        for message in messages:
            put_stage(message.content, stages[message.metadata.dst_node_id])
        answers = strategy.accept(strategy.collect(messages), unpack)
        ids = {strategy.name_of(node): node for node in stages}
        if fits is not None:
            reason = "its answer names other nodes than its neighbours"
            wrong = {a.node: reason for a in answers if not fits(ids[a.node], a.value)}
            answers = strategy.leave_out(answers, wrong)
        return {ids[answer.node]: answer.value for answer in answers}

    # --- failures -------------------------------------------------------------------------------

    def _by_number(self, answers: Sequence[Answer[Words]], session: _Session) -> dict[int, Words]:
        strategy, _, _ = self._play
        numbers = {strategy.name_of(node): number for node, number in session.numbers.items()}
        return {numbers[answer.node]: answer.value for answer in answers}

    def _refuse_few(
        self, session: _Session, there: Collection[int], at_least: int, did: str
    ) -> None:
        """End the round if too few nodes are left to open a sum, before anything is opened."""
        if session.state.is_quorum(there) and len(there) >= at_least:
            return
        of = len(session.ids)
        raise self._failed(
            list(session.ids),
            f"{len(there)} of {of} nodes {did}, and the threshold is "
            f"{self.options.threshold:.3g} of {of} (at least 3"
            + (f", min_nodes {at_least})" if at_least > 3 else ")"),
        )

    def _failed(self, nodes: Sequence[int], reason: str) -> RoundFailedError:
        """Forget the session; return what the round fails with. `nodes` have exchanged keys."""
        strategy, server_round, step = self._play
        self._session = None
        failures = strategy.failures
        named = "".join(f"\n  {failure}" for failure in failures)
        text = f"round {server_round} failed: the secure sum '{step}' was not opened: {reason}"
        # Those who have exchanged keys do have the mod; what they sent is nobody's to see.
        return RoundFailedError(text + named, nodes, failures)
