"""A server that lies: all that it can say to whom in one sum, against what nodes agree to.

The model has the protocol's own decisions (`agreed`, `check_opening`, `list_text` and
`shares_needed` of `gems_flwr.secure.session`) and plain values in the place of keys. Of each honest
node the server chooses the roster that it sees, with whom it masks, every shorter list that it is
asked to agree to, and which list it is asked to open with which signatures; nodes that collude sign
everything and give all that they hold. Nothing that a node says depends on the order in which the
server asks different nodes, so a play is one history of each node.

What comes out of a play: the server has the own mask of a node if enough give it their share, which
those do who open a list that the node is on; and the mask that two honest nodes have in common if
one of them gave it away, as it does for whoever is off its list. So it has the sum over some honest
nodes if it has all of their own masks, and no mask is left between them and another honest node.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from gems_flwr.errors import SecureSumError
from gems_flwr.secure import session


@dataclass(frozen=True)
class History:
    """What one honest node has done in the end."""

    roster: frozenset
    masked_with: frozenset
    agreed_to: frozenset
    signed: frozenset  # texts
    opens: frozenset


def accepted(decide, *arguments):
    try:
        decide(*arguments)
    except SecureSumError:
        return False
    return True


def subsets(nodes, least=1):
    sizes = range(least, len(nodes) + 1)
    return [frozenset(s) for k in sizes for s in itertools.combinations(sorted(nodes), k)]


def digest_of(roster):
    return repr(sorted(roster)).encode()


def histories(own, nodes, threshold, rosters, starts):
    """Return all that a node may have done; of two, what signs less of the same lists goes."""
    found = {}
    for roster in rosters:
        needed = session.shares_needed(threshold, len(roster))

        def follow(start, current, signed, roster=roster, needed=needed):
            signed = signed | {session.list_text(digest_of(roster), 0, current)}
            key = roster, start, current
            known = found.setdefault(key, set())
            if any(signed <= other for other in known):
                return
            known.difference_update({other for other in known if other < signed})
            known.add(signed)
            for shorter in subsets(nodes, 3):
                if shorter != current and accepted(session.agreed, shorter, own, current, needed):
                    follow(start, shorter, signed)

        for start in subsets(roster, 3) if starts else [roster]:
            if own in roster and accepted(session.agreed, start, own, roster, needed):
                follow(start, start, frozenset())
    done = []
    for (roster, start, current), several in found.items():
        needed = session.shares_needed(threshold, len(roster))
        lists = [
            opens
            for opens in subsets(nodes, 3)
            if accepted(session.check_opening, opens, current, nodes, needed)
        ]
        # With a list that is too short to be opened it has given masks away all the same.
        for signed, opens in itertools.product(several, lists or [current]):
            done.append(History(roster, start, current, signed, opens))
    return done


def smallest_sums(n, colluders, threshold=2 / 3, *, rosters=None, starts=True):
    """Return by size of the roster the fewest honest nodes whose sum the server can have."""
    nodes, honest = range(n), range(n - colluders)
    rosters = [frozenset(nodes)] if rosters is None else rosters
    told = [histories(own, nodes, threshold, rosters, starts) for own in honest]
    bits = {node: 1 << node for node in nodes}

    def mask_of(group):
        return sum(bits[node] for node in group)

    texts = sorted({text for each in told for history in each for text in history.signed})
    column = {text: place for place, text in enumerate(texts)}
    bad = frozenset(range(n - colluders, n))
    fields = ("masked_with", "agreed_to", "opens", "roster")
    table = {
        name: [np.array([mask_of(getattr(h, name)) for h in each], np.uint8) for each in told]
        for name in fields
    }
    # By node, history and text whether it has signed; what it would open is signed by whom.
    has_signed = [np.array([[t in h.signed for t in texts] for h in each], bool) for each in told]
    wanted = [
        np.array([column.get(session.list_text(digest_of(h.roster), 0, h.opens), -1) for h in each])
        for each in told
    ]
    groups = [frozenset(node for node in nodes if number & bits[node]) for number in range(2**n)]
    may_open = [
        np.array(
            [
                [
                    accepted(
                        session.check_opening,
                        *(h.opens, h.agreed_to, signers | bad),
                        session.shares_needed(threshold, len(h.roster)),
                    )
                    for signers in groups
                ]
                for h in each
            ]
        )
        for each in told
    ]
    needed = [
        np.array([session.shares_needed(threshold, len(h.roster)) for h in each]) for each in told
    ]
    bad_there = [np.array([len(bad & h.roster) for h in each]) for each in told]
    smallest = {}
    others = np.indices([len(each) for each in told[1:]], np.uint16).reshape(len(told) - 1, -1)
    for first in range(len(told[0])):
        play = [np.full(others.shape[1], first, np.uint16), *others]
        at = {name: [table[name][v][play[v]] for v in honest] for name in fields}
        opened = []
        for v in honest:
            text = wanted[v][play[v]]
            signers = sum(
                (has_signed[w][play[w], text] & (text >= 0)).astype(np.uint8) * bits[w]
                for w in honest
            )
            opened.append(may_open[v][play[v], signers])
        same = {(v, w): at["roster"][v] == at["roster"][w] for v in honest for w in honest}

        def on(what, v, w, at=at):
            """Return where node w is on a list of node v."""
            return (at[what][v] & bits[w]) > 0

        own_mask = {}
        for v in honest:
            shares = sum((opened[w] & same[v, w] & on("opens", w, v)).astype(int) for w in honest)
            own_mask[v] = shares + bad_there[v][play[v]] >= needed[v][play[v]]
        bare = {
            (v, w): ~on("agreed_to", v, w)
            | (same[v, w] & on("masked_with", w, v) & ~on("agreed_to", w, v))
            for v, w in itertools.permutations(honest, 2)
        }
        for group in subsets(honest):
            has = np.logical_and.reduce(
                [
                    *(own_mask[v] for v in group),
                    *(same[min(group), v] for v in group),
                    *(bare[v, w] for v in group for w in honest if w not in group),
                ]
            )
            for roster in set(at["roster"][min(group)][has].tolist()):
                smallest[roster] = min(len(group), smallest.get(roster, n))
    return {groups[roster]: size for roster, size in smallest.items()}


def broken_rosters(n, colluders, threshold=2 / 3, **options):
    """Return rosters within the bound, of which a sum over too few honest nodes was had."""
    sums = smallest_sums(n, colluders, threshold, **options)
    assert sums, "an honest server gets a sum"
    found = []
    for roster, size in sums.items():
        # What is promised: of the threshold that nodes ask for, whatever the server says.
        needed = max(3, -(-2 * len(roster) // 3))
        bad = len([node for node in roster if node >= n - colluders])
        if bad < 2 * needed - len(roster) and size < needed - bad:
            found.append((sorted(roster), size))
    return found


@pytest.mark.parametrize(
    ("n", "colluders", "starts"),
    [(4, 0, True), (4, 1, True), (5, 0, True), (5, 1, True), (5, 2, True), (6, 1, False)],
)
def test_no_lie_of_a_server_gives_it_the_sum_of_too_few(n, colluders, starts):
    """Six nodes mask with all others, as in the first sum of a session."""
    assert not broken_rosters(n, colluders, starts=starts)


def test_no_choice_of_rosters_gives_it_the_sum_of_too_few():
    assert not broken_rosters(4, 1, rosters=subsets(range(4), 3))


def changed(name, change):
    """Return what puts a decision without one of its checks in the place of the protocol's."""
    real = getattr(session, name)
    return lambda patch: patch.setattr(session, name, lambda *given: real(*change(*given)))


WITHOUT = {
    "signatures": (4, 1, changed("check_opening", lambda to, at, _, least: (to, at, None, least))),
    "enough signatures": (4, 1, changed("check_opening", lambda *given: (*given[:3], 2))),
    "one list": (4, 0, changed("check_opening", lambda to, _, *rest: (to, to, *rest))),
    "lists in the text": (
        4,
        1,
        changed("list_text", lambda digest, number, _: (digest, number, ())),
    ),
    "shorter lists alone": (
        4,
        0,
        changed("agreed", lambda to, own, _, least: (to, own, to, least)),
    ),
    "lists that are long enough": (5, 2, changed("agreed", lambda *given: (*given[:3], 2))),
    "a threshold of the node's own": (5, 1, changed("shares_needed", lambda _, n: (0.501, n))),
}


@pytest.mark.parametrize("check", WITHOUT)
def test_without_any_of_the_checks_there_is_a_lie_that_works(check, monkeypatch):
    n, colluders, remove = WITHOUT[check]
    remove(monkeypatch)
    assert broken_rosters(n, colluders)
