"""Nodes that leave a run while it is under way.

A node says so in its next reply (`gems_flwr.wire.withdrawals`). Nobody asks it again in this run,
what it has sent is forgotten as far as the strategy can, and a receipt stands in the run's details,
in its log and in ``receipts.json`` of its folder.

Spaces are kept by node, so a model of spaces is made anew from the others', and is what it would be
had the node never been there: the round in which the node leaves is played once more without it,
from what the others have sent in it already. Scores and choices are about the new model, so those
are asked for again. Refinement, whose gradients were of all nodes, begins anew and has all its
rounds again. An average has no such account: what a node has trained stays in it, and the receipt
says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems_flwr.errors import RoundFailedError
from gems_flwr.receipts import (
    Receipt,
    load_receipts,
    model_digest,
    save_receipt,
    space_digest,
    utc_now,
)
from gems_flwr.server.exchange import Exchange
from gems_flwr.server.log import log_warning
from gems_flwr.server.refine_memory import RefineMemory, has_refinement
from gems_flwr.server.refine_memory import others as without_refinement
from gems_flwr.server.state import RoundOutcome, ServerState
from gems_flwr.spaces.space_files import SpaceFolder
from gems_flwr.wire.handler_metrics import Told
from gems_flwr.wire.space_replies import NodeSpace

if TYPE_CHECKING:
    from gems_flwr.server.round_methods import RoundMethods

WITHDRAWALS = "withdrawals"
_ANEW = "refined_anew"
_STAYS = (
    "what it has sent so far is in the model: averages and merged layers keep no account by node, "
    "so nothing can be taken out; it is not asked again"
)
_TOTAL_ALONE = (
    "only the total of all nodes' sums is kept, so its share cannot be told from the others'; it "
    "is not asked again, and a signed difference takes its share out (aggregate --difference)"
)
_NOTHING = "it had sent nothing"


@dataclasses.dataclass(frozen=True, eq=False)
class Forgotten:
    """What came of forgetting nodes.

    Parameters
    ----------
    digests : mapping from str to str or None
        By node, the sha256 of what was deleted; None if there was nothing.
    complete : bool
        Whether nothing of them will be in the model.
    again : ServerState, optional
        What to play the round again from; None if its outcome stands as it is.
    note : str
        For the receipt.
    """

    digests: Mapping[str, str | None]
    complete: bool = True
    again: ServerState | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class HeldSpaces:
    """What is there of all nodes for a round that is played again: spaces, and reports by node."""

    received: dict[str, NodeSpace]
    told: dict[str, Told[NodeSpace]]


def held_spaces(exchange: Exchange) -> HeldSpaces | None:
    """Return what a round of spaces holds that is under way, if it has got so far."""
    return exchange.held if isinstance(exchange.held, HeldSpaces) else None


def not_forgotten(
    state: ServerState, exchange: Exchange, names: Sequence[str], *, only_totals: bool = False
) -> Forgotten:
    """Return what a strategy without an account by node can say to nodes that leave.

    Parameters
    ----------
    state : ServerState
        Before the round.
    exchange : Exchange
        Of the round.
    names : sequence of str
        Who left.
    only_totals : bool
        Whether they have added to sums over nodes. Those are not asked for again without them: of
        two totals the difference would show what nobody was to see.
    """
    there = who_answered(state, exchange).keys() | set(exchange.left_after_answering)
    there &= set(names)
    note = _TOTAL_ALONE if only_totals else _STAYS
    return Forgotten(dict.fromkeys(names), complete=not there, note=note if there else _NOTHING)


def who_answered(state: ServerState, exchange: Exchange) -> dict[str, int | None]:
    """Return who has given a usable reply so far, in order."""
    before = (node for record in state.history for node in record.nodes_answered)
    return dict.fromkeys([*before, *exchange.answered])


def forget_spaces(
    state: ServerState,
    exchange: Exchange,
    folder: SpaceFolder,
    received: dict[str, NodeSpace],
    names: Sequence[str],
) -> Forgotten:
    """Forget the spaces of nodes, wherever they are kept, and say what to play the round from.

    Parameters
    ----------
    state : ServerState
        Before the round.
    exchange : Exchange
        Of the round; what it holds of this round is changed.
    folder : SpaceFolder
        The files.
    received : dict from str to space
        What earlier rounds have received, in memory; changed.
    names : sequence of str
        Who left.
    """
    refines = has_refinement(state.memory)
    memory = RefineMemory.of(state.memory) if refines else None
    known: dict[str, NodeSpace] = dict(received or folder.load())
    if memory is not None:
        known = known or dict(memory.cones)
    held = held_spaces(exchange) or HeldSpaces({}, {})
    known |= held.received
    members = set(known if memory is None else memory.members)
    left = {name: known.get(name) for name in names}
    digests = {n: None if space is None else space_digest(space) for n, space in left.items()}
    lost = [name for name in names if name in members and left[name] is None]
    for name in names:
        for spaces in (received, known, held.received):
            spaces.pop(name, None)
        held.told.pop(name, None)
    folder.remove(names)
    if lost:
        return Forgotten(digests, complete=False, note=_TOTAL_ALONE)
    if not any(space is not None for space in left.values()):
        return Forgotten(digests, note=_NOTHING)
    # What the others have sent in this round need not be asked for again.
    exchange.held = HeldSpaces(known, held.told)
    if memory is None:
        return Forgotten(digests, again=state)
    # Its gradients are in the steps so far, its moments in what they were made with.
    again = dataclasses.replace(state, memory=without_refinement(state.memory))
    return Forgotten(digests, again=again, note="refinement begins anew without it")


def check_enough(exchange: Exchange, left: Collection[str], at_least: int) -> None:
    """Refuse to go on with too few nodes.

    Raises
    ------
    RoundFailedError
        Says who has left.
    """
    if len(left) < at_least:
        gone = [exchange.nodes.name(node) for node in exchange.nodes.withdrawn]
        raise RoundFailedError(
            f"round {exchange.server_round} failed: {len(left)} nodes are left after {gone} "
            f"withdrew, min_nodes is {at_least}",
            [],
            exchange.failures,
        )


def refined_anew(state: ServerState, server_round: int, first_round: int) -> dict[str, Any]:
    """Return the details of a round in which refinement begins anew."""
    if server_round == first_round:
        return {}
    reason = "the model was made anew without nodes that have left"
    note = {"round": server_round, "nodes": 0, "taken": False, "reason": reason}
    told = state.details.get("refinement", [])
    return {**begun_anew(server_round, first_round), "refinement": [*told, note]}


def begun_anew(server_round: int, first_round: int) -> dict[str, Any]:
    """Return the detail by which refinement has all its rounds again after a round."""
    return {_ANEW: server_round - first_round}


def rounds_again(details: Mapping[str, Any]) -> int:
    """Return how many rounds more there are because refinement began anew."""
    return int(details.get(_ANEW, 0))


def who_left(details: Mapping[str, Any]) -> list[str]:
    """Return the names of all nodes that a run's receipts are about."""
    return [name for receipt in details.get(WITHDRAWALS, ()) for name in receipt["removed"]]


def play_without_leavers(
    strategy: RoundMethods,
    exchange: Exchange,
    state: ServerState,
    done: Collection[int],
    play: Callable[[ServerState], RoundOutcome],
) -> RoundOutcome:
    """Play a round; if nodes leave in it, forget them and play it again where that is needed.

    Parameters
    ----------
    strategy : RoundMethods
        Whose round it is.
    exchange : Exchange
        Of the round.
    state : ServerState
        Before the round.
    done : collection of int
        Ids of nodes that left before, whose receipts are written.
    play : callable
        Plays the round from a state.
    """
    outcome, handled = play(state), set(done)
    before: list[tuple[Forgotten, str | None]] = []
    while leaving := [node for node in exchange.nodes.withdrawn if node not in handled]:
        handled.update(leaving)
        names = [exchange.nodes.name(node) for node in leaving]
        was_in = set(names) & set(exchange.left_after_answering)
        forgotten = strategy.forget_nodes(state, names)
        for node in leaving:
            exchange.forget(node)
        model = outcome.arrays if was_in else state.arrays
        nothing = forgotten.complete and not any(forgotten.digests.values())
        before.append((forgotten, None if nothing else model_digest(model)))
        if forgotten.again is not None:
            state = forgotten.again
            exchange.replays += 1
            outcome = play(state)
    if not before:
        return outcome
    after = model_digest(outcome.arrays)
    everybody = [name for forgotten, _ in before for name in forgotten.digests]
    remaining = {n: c for n, c in strategy.contributors(state).items() if n not in everybody}
    receipts = [
        Receipt(
            removed=forgotten.digests,
            remaining=remaining,
            at=utc_now(),
            model_before=digest,
            model_after=after,
            forgotten=forgotten.complete,
            note=forgotten.note,
            round=exchange.server_round,
        )
        for forgotten, digest in before
    ]
    for receipt in receipts:
        _log(receipt)
    told = [*state.details.get(WITHDRAWALS, ()), *(receipt.to_json() for receipt in receipts)]
    return dataclasses.replace(outcome, details={**outcome.details, WITHDRAWALS: told})


def _log(receipt: Receipt) -> None:
    log_warning(
        "withdrawn",
        round=receipt.round,
        nodes=",".join(receipt.removed),
        forgotten=receipt.forgotten,
        remaining=len(receipt.remaining),
        note=receipt.note,
        before=receipt.model_before,
        after=receipt.model_after,
    )


def without_leavers(details: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a run's details without what they say of some nodes, but for the receipts."""
    gone = set(names)

    def purged(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: purged(each) for key, each in value.items() if key not in gone}
        return [purged(each) for each in value] if isinstance(value, list) else value

    if not gone:
        return dict(details)
    # The entries themselves have names of ours, whatever nodes are called.
    return {k: value if k == WITHDRAWALS else purged(value) for k, value in details.items()}


def put_receipts(folder: str | Path | None, details: Mapping[str, Any], name: str) -> None:
    """Put those receipts of a run's details into the file of its folder that are not there yet."""
    if folder is None or not details.get(WITHDRAWALS):
        return
    path = Path(folder) / name
    there = load_receipts(path)
    for values in details[WITHDRAWALS]:
        if (receipt := Receipt.from_json(values)) not in there:
            save_receipt(path, receipt)
