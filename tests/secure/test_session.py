"""Secure sums without Flower: exact whoever drops out when, and nothing below the threshold."""

import dataclasses

import numpy as np
import pytest
from helpers_secure import Play
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.errors import SecureSumError
from gems_flwr.secure import (
    AdvertisedKeys,
    Layout,
    NodeSecrets,
    Section,
    draw_neighbours,
    judged,
    shares_needed,
)
from gems_flwr.secure.keys import join_shares, split_secret


def ready(nodes, **options):
    """Return a session in which all have published keys."""
    return Play(nodes, **options).advertise()


def opened(play):
    """Return the session of which the first sum is to be opened."""
    return dataclasses.replace(play.server, number=0)


def layout_for(nodes, bits=(32, 16, 13, 64)):
    return Layout(
        [Section(f"part {b}", (5,), bound=10.0, bits=b) for b in bits if 2 ** (b - 1) > 3 * nodes],
        nodes,
    )


def draw_words(layout, nodes, seed):
    rng = np.random.default_rng(seed)
    values = [
        {s.name: rng.uniform(-s.bound, s.bound, s.shape) for s in layout.sections}
        for _ in range(nodes)
    ]
    return [layout.encode(each) for each in values]


@st.composite
def sessions(draw):
    nodes, degree = draw(st.sampled_from([(3, None), (4, None), (5, None), (8, None), (25, 20)]))
    few = st.sets(st.integers(0, nodes - 1), max_size=max(0, nodes // 3 - 1))
    return nodes, degree, [draw(few) for _ in range(7)]


@settings(max_examples=40, deadline=None)
@given(sessions())
def test_totals_are_the_plain_sums_bit_for_bit_whoever_drops_when(case):
    """Lost before keys, before the masked numbers, when a list is agreed to, and when it is opened.

    Where as many are left as it takes the sum is opened, whatever came together.
    """
    nodes, degree, drops = case
    if nodes - len(drops[0]) < 3:
        return
    play = Play(nodes, degree=degree, sums=2)
    play.advertise(drops[0])
    layout = layout_for(nodes)
    for number, (early, late, last) in enumerate([drops[1:4], drops[4:]]):
        words = draw_words(layout, nodes, [0, number])
        masked = play.mask(number, layout, words, lost=early)
        left = play.server.with_members(set(masked) - late)
        if not left.is_quorum(set(left.members) - last):
            return
        total = play.open(number, layout, masked, late, last)
        assert (total == layout.add([words[i] for i in left.members])).all()
        play.server = play.server.with_members(set(left.members) - last)
        if not play.server.members or not play.server.is_quorum(play.server.members):
            return


def test_below_the_threshold_no_node_agrees_and_too_few_shares_open_nothing():
    """Five nodes at two thirds: it takes four."""
    play = ready(5)
    layout = layout_for(5)
    words = draw_words(layout, 5, 1)
    masked = play.mask(0, layout, words)
    with pytest.raises(SecureSumError, match="3 nodes are in the sum, it takes 4"):
        play.of(2).narrowed(0, [2, 3, 4])
    shares = play.reveal(0, set(masked))
    for few in ([], [0, 1, 2]):
        assert not opened(play).seeds({i: shares[i] for i in few})[0]
    seeds, _ = opened(play).seeds({i: shares[i] for i in (0, 2, 3, 4)})
    assert (play.server.total(layout, masked, seeds, {}) == layout.add(words)).all()


def test_a_node_masks_once_agrees_to_shorter_lists_and_opens_once():
    play = ready(6)
    layout = layout_for(6)
    words = draw_words(layout, 6, 0)
    with pytest.raises(SecureSumError, match="not masked"):
        play.of(0).narrowed(0, [0, 1, 2, 3])
    masked = play.mask(0, layout, words)
    node = play.of(0)
    for ask, why in [
        (lambda: node.join(play.server.roster), "has joined before"),
        (lambda: node.entered(0, range(6)), "masked already"),
        (lambda: node.entered(1, range(6)), "masked already, or none of it"),
        (lambda: node.narrowed(0, [1, 2, 3, 4]), "not in that sum"),
        (lambda: node.narrowed(0, [0, 1, 2, 3, 9]), r"nodes \[9\] were not in that sum"),
        (lambda: node.opened(0, [0, 1, 2, 3], {}, {}, is_checked=False), "to another list"),
        (lambda: node.opened(0, range(6), {}, {}, is_checked=True), "0 nodes have confirmed"),
    ]:
        with pytest.raises(SecureSumError, match=why):
            ask()
    shorter, gone = node.narrowed(0, [0, 1, 2, 3])
    assert gone.keys() == {4, 5}
    with pytest.raises(SecureSumError, match=r"nodes \[4\] were not in that sum"):
        shorter.narrowed(0, [0, 1, 2, 3, 4])
    play.reveal(0, set(masked))
    with pytest.raises(SecureSumError, match="opened on this node already"):
        play.of(0).narrowed(0, [0, 1, 2, 3])


def test_what_is_used_is_forgotten():
    """Own seeds with the numbers, keys in common with the opening, and no way back by the next."""
    play = ready(3, sums=2)
    seeds = [play.of(0).seed, play.of(0).own_seeds[0]]
    layout = layout_for(3)
    words = draw_words(layout, 3, 0)
    masked = play.mask(0, layout, words)
    keys = [*play.of(0).pairs.values(), *play.of(0).roots.values()]
    assert all([*seeds, *keys])
    play.open(0, layout, masked)
    share = play.of(0).held[1][:17]
    play.mask(1, layout, words)
    assert not any(secret.hex() in play.secrets[0] for secret in [*seeds, *keys])
    assert share == bytes(17)


def test_wrong_shares_are_noticed_done_without_and_a_conflict():
    """Two of nine lie on all others: nine are in conflict with two, and these with seven each."""
    play = ready(9, threshold=0.75)
    layout = layout_for(9)
    words = draw_words(layout, 9, 0)
    masked = play.mask(0, layout, words)
    shares = play.reveal(0, set(masked))
    for liar in (0, 1):
        shares[liar] = {node: bytes(17) for node in shares[liar]}
    seeds, conflicts = opened(play).seeds(shares)
    assert (play.server.total(layout, masked, seeds, {}) == layout.add(words)).all()
    assert judged(conflicts, play.server.roster.liars)[0] == {0, 1}
    shares[2] = {node: bytes(17) for node in shares[2]}
    assert not opened(play).seeds(shares)[0]


def test_a_letter_that_was_changed_or_swapped_is_of_no_use_and_its_sender_named():
    play = ready(3)
    layout = layout_for(3)
    play.mask(0, layout, draw_words(layout, 3, 0))
    good = play.letters[1][0]
    changed = good[:-1] + bytes([good[-1] ^ 1])
    for wrong in (play.letters[2][0], changed, b"", play.letters[1][2], good[::-1]):
        letters = {1: wrong, 2: play.letters[2][0], 7: good}
        _, shares, accused = play.of(0).opened(0, [0, 1, 2], {}, letters, is_checked=False)
        assert shares.keys() == {0, 2}
        assert accused == [1]


SMALL_ORDER = [  # RFC 7748: 0, 1, p - 1, p, p + 1 and the two points of order 8
    *((n % 2**256).to_bytes(32, "little") for n in (0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18)),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
]


def test_keys_of_small_order_are_refused_by_all():
    play = ready(3)
    for key in SMALL_ORDER:
        wrong = dataclasses.replace(play.of(1).own, channel=key)
        with pytest.raises(SecureSumError, match="cannot be used"):
            wrong.check("s")
        roster = play.roster({**play.server.roster.keys, 1: wrong})
        assert play.of(0).suspects(roster, None).keys() == {1}
        with pytest.raises(SecureSumError, match="cannot be used"):
            play.of(0).join(roster)


def test_a_roster_that_cannot_be_meant_is_refused():
    keys = dict(ready(4).server.roster.keys)
    for options, why in [
        ({"threshold": 0.5}, "above a half"),
        ({"degree": 4}, "at least 20 neighbours"),
        ({"keys": {i: keys[i] for i in (0, 1)}}, "three nodes at least"),
        ({"keys": {**keys, 5: keys[1]}}, "same key"),
        ({"keys": {**keys, 1: NodeSecrets.begin("s", 2).own}}, "different numbers of sums"),
    ]:
        with pytest.raises(SecureSumError, match=why):
            dataclasses.replace(Play(4).roster(keys), **options)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=300))
def test_keys_are_text_and_any_other_text_is_refused(text):
    keys = NodeSecrets.begin("s", 2).own
    assert AdvertisedKeys.from_text(keys.to_text()) == keys
    for wrong in (text, keys.to_text()[:-1], keys.to_text() + text + ".", f"A{keys.to_text()}"):
        with pytest.raises(SecureSumError):
            AdvertisedKeys.from_text(wrong)


@given(st.integers(3, 120), st.one_of(st.none(), st.integers(2, 20)), st.binary(max_size=5))
def test_neighbours_are_mutual_and_as_many_as_asked_for(nodes, degree, seed):
    found = draw_neighbours(list(range(nodes)), degree, seed)
    wanted = 64 if degree is None else 2 * -(-degree // 2)
    for node, peers in found.items():
        assert node not in peers
        assert len(set(peers)) == min(nodes - 1, wanted)
        assert all(node in found[peer] for peer in peers)


def test_another_key_of_one_node_gives_another_graph_and_other_keys_throughout():
    """What the server could choose is in the digest: threshold, degree, session, every key."""
    play = ready(30, degree=20)
    roster = play.server.roster
    other = NodeSecrets.begin("s", 1).own
    changed = [
        dataclasses.replace(roster, threshold=0.7),
        dataclasses.replace(roster, degree=22),
        dataclasses.replace(roster, session="t"),
        dataclasses.replace(roster, keys={**roster.keys, 29: other}),
    ]
    assert len({each.digest for each in [roster, *changed]}) == 5
    assert changed[-1].neighbours != roster.neighbours
    mine, theirs = play.of(0).join(roster)[0], play.of(0).join(changed[-1])[0]
    assert not set(mine.roots.values()) & set(theirs.roots.values())


@given(st.integers(3, 300), st.floats(0.5, 1, exclude_min=True))
def test_two_sets_that_can_open_a_sum_have_a_member_in_common(holders, threshold):
    assert 2 * shares_needed(threshold, holders) > holders
    assert 3 <= shares_needed(threshold, holders) <= holders


@given(st.binary(min_size=16, max_size=16), st.integers(3, 9), st.data())
def test_any_set_of_shares_gives_the_secret_and_one_fewer_fits_every_secret(secret, holders, data):
    threshold = data.draw(st.integers(2, holders))
    shares = dict(enumerate(split_secret(secret, threshold, holders)))
    some = dict(data.draw(st.permutations(list(shares.items())))[:threshold])
    assert join_shares(some, threshold, bytes, secret) == (secret, [])
    # By Lagrange the secret is linear in each share, with a coefficient that is not zero.
    some.popitem()
    left = next(place for place in shares if place not in some)
    guesses = [{**some, left: n.to_bytes(17)} for n in range(3)]
    found = set()
    for guess in guesses:
        join_shares(guess, threshold, found.add, None)
    assert len(found) == 3


def test_who_conflicts_with_more_than_may_lie_is_at_fault_and_else_no_one():
    star = {(n, 4) for n in range(4)}
    assert judged(star, 2) == ({4}, set())
    assert judged({(b, a) for a, b in star}, 2) == ({4}, set())
    assert judged({(1, 2)}, 2) == (set(), {1, 2})
    assert judged({(1, 2), (3, 2)}, 2) == (set(), {2})
    assert judged({*star, (1, 2), (4, 2)}, 2) == ({4}, {1, 2})
    assert judged({(3, 3)}, 2) == (set(), {3})
    assert judged({(1, 2), (3, 2), (2, 2)}, 2) == (set(), {2})


def test_masks_of_nodes_that_are_asked_different_questions_stay():
    """Or a server that tells all but one a grid on which their numbers are zero has the one."""
    layout = layout_for(4)
    zero = np.zeros(layout.size, np.uint64)
    words = dict.fromkeys(range(4), zero) | {0: np.arange(layout.size, dtype=np.uint64)}

    def total(questions):
        play, masked = ready(4), {}
        for node in range(4):
            play.join(node)
            secrets = play.of(node).entered(0, range(4), questions[node])
            secrets, masked[node] = secrets.masked(layout, words[node])
            play.keep(node, secrets)
        shares = play.reveal(0, range(4))
        seeds, _ = opened(play).seeds(shares)
        return opened(play).total(layout, masked, seeds, {node: {} for node in range(4)})

    assert np.array_equal(total([b"q"] * 4), words[0])
    assert (total([b"mine", b"q", b"q", b"q"]) != words[0]).mean() > 0.9


def test_a_point_written_in_another_way_has_other_masks():
    """The top bit of a key is not used: with it flipped two masks of opposite sign would cancel."""
    play = ready(4)
    keys = dict(play.server.roster.keys)
    mirror = bytearray(keys[1].channel)
    mirror[31] ^= 0x80
    keys[2] = dataclasses.replace(keys[2], channel=bytes(mirror))
    play.join(0, play.roster(keys))
    roots = play.of(0).roots
    assert roots[1] != roots[2]
