"""Secure sums without Flower: exact whoever drops out when, and nothing below the threshold."""

import dataclasses
import itertools

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
    shares_needed,
)


def ready(nodes, **options):
    """Return a session in which all have exchanged keys and shares."""
    play = Play(nodes, **options)
    play.advertise()
    play.share()
    return play


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


def play_sum(nodes, degree, drops, *, seed=0, threshold=2 / 3, sums=2):
    """Play all sums of a session; `drops` has a set of nodes for every stage.

    Returns for each sum its survivors and total, or None where nothing could be opened.
    """
    play = Play(nodes, threshold, degree, sums=sums)
    drops = iter(drops)
    play.advertise(next(drops))
    play.share(next(drops))
    layout, results = layout_for(nodes), []
    for number in range(sums):
        words = draw_words(layout, nodes, [seed, number])
        masked = play.mask(number, layout, words, lost=next(drops))
        late = next(drops)
        answering = set(masked) - set(late)
        if not play.server.is_quorum(masked) or not play.server.is_quorum(answering):
            results.append(None)
        else:
            shares = play.reveal(number, set(masked), lost=late)
            total = play.server.opened(number, layout, masked, shares)
            results.append((set(masked), total, layout.add([words[i] for i in masked])))
        play.server = play.server.with_members(answering)
    return results


@st.composite
def sessions(draw):
    nodes = draw(st.sampled_from([3, 4, 5, 8, 13]))
    degree = draw(st.sampled_from([None, 4]))
    few = st.sets(st.integers(0, nodes - 1), max_size=max(0, nodes // 3 - 1))
    drops = [draw(few) for _ in range(6)]
    return nodes, degree, drops


@settings(max_examples=40, deadline=None)
@given(sessions())
def test_totals_are_the_plain_sums_bit_for_bit_whoever_drops_when(case):
    """Bonawitz et al. 2017, Section 4: correctness under drop-outs at every stage."""
    nodes, degree, drops = case
    if nodes - len(drops[0]) < 3:
        return
    for result in play_sum(nodes, degree, drops):
        if result is not None:
            _, total, expected = result
            assert (total == expected).all()


def test_nothing_is_opened_when_too_many_are_gone():
    """Five nodes at two thirds: four shares are needed, three survivors open nothing."""
    play = ready(5)
    layout = layout_for(5)
    masked = play.mask(0, layout, draw_words(layout, 5, 1), lost={0, 1})
    assert not play.server.is_quorum(masked)
    with pytest.raises(SecureSumError, match="3 nodes of the neighbourhood are in the sum"):
        play.of(2).reveal(0, sorted(masked))


def test_any_set_of_shares_below_the_threshold_opens_nothing():
    play = ready(5)
    layout = layout_for(5)
    words = draw_words(layout, 5, 1)
    masked = play.mask(0, layout, words)
    shares = play.reveal(0, set(masked))
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(range(5), size) for size in range(4)
    ):
        with pytest.raises(SecureSumError, match="cannot be opened"):
            play.server.opened(0, layout, masked, {i: shares[i] for i in chosen})
    four = {i: shares[i] for i in (0, 2, 3, 4)}
    assert (play.server.opened(0, layout, masked, four) == layout.add(words)).all()


def test_a_node_masks_once_and_reveals_once():
    play = ready(3)
    layout = layout_for(3)
    words = draw_words(layout, 3, 0)
    masked = play.mask(0, layout, words)
    with pytest.raises(SecureSumError, match="masked on this node already"):
        play.of(0).masked(0, layout, words[0], (1, 2))
    play.reveal(0, set(masked))
    with pytest.raises(SecureSumError, match="opened on this node already"):
        play.of(0).reveal(0, [0, 1, 2])
    with pytest.raises(SecureSumError, match="given its shares in this session before"):
        play.of(0).share(0, play.peers_of(0), 2 / 3)


def test_a_node_never_gives_both_secrets_of_another():
    """Whatever list of survivors it is told, of each node it gives one share of two."""
    play = ready(4, threshold=0.51)
    layout = layout_for(4)
    play.mask(0, layout, draw_words(layout, 4, 0))
    before = play.of(0).slots[0].shares
    after, shares = play.of(0).reveal(0, [0, 1, 2])
    assert shares[3] == before[3][:16]
    assert shares[1] == before[1][16:]
    assert not after.slots[0].shares


def test_seeds_are_forgotten_once_they_are_used():
    play = ready(3)
    seeds = [play.of(0).slots[0].own_seed, play.of(0).slots[0].mask_seed]
    layout = layout_for(3)
    play.mask(0, layout, draw_words(layout, 3, 0))
    assert all(seeds)
    assert not any(seed.hex() in play.secrets[0] for seed in seeds)


def test_a_wrong_share_is_noticed_and_done_without():
    play = ready(6)
    layout = layout_for(6)
    words = draw_words(layout, 6, 0)
    masked = play.mask(0, layout, words)
    shares = play.reveal(0, set(masked))
    shares[0] = dict.fromkeys(shares[0], bytes(16))
    assert (play.server.opened(0, layout, masked, shares) == layout.add(words)).all()
    for liar in (1, 2):
        shares[liar] = dict.fromkeys(shares[liar], bytes(16))
    with pytest.raises(SecureSumError, match="a node sent a wrong one"):
        play.server.opened(0, layout, masked, shares)


def test_a_letter_that_was_changed_or_swapped_is_refused():
    play = ready(3)
    letters = play.server.letters_for(0)
    changed = letters[1][:-1] + bytes([letters[1][-1] ^ 1])
    for wrong in ({1: letters[2]}, {1: changed}, {1: b""}):
        with pytest.raises(SecureSumError, match="changed on the way"):
            play.of(0).receive(wrong)
    with pytest.raises(SecureSumError, match="no neighbour"):
        play.of(0).receive({7: letters[1]})


def test_a_node_refuses_what_an_honest_server_does_not_ask():
    play = ready(4, threshold=0.7)
    layout = layout_for(4)
    [words, *_] = draw_words(layout, 4, 0)
    node = play.of(0).receive(play.server.letters_for(0))
    for number, present, why in [
        (1, (1, 2, 3), "there is no sum 1"),
        (0, (1, 2, 9), "have given this node no shares"),
        (0, (1,), "1 neighbours take part, and with this node it takes 3"),
    ]:
        with pytest.raises(SecureSumError, match=why):
            node.masked(number, layout, words, present)
    with pytest.raises(SecureSumError, match="not masked on this node"):
        node.reveal(0, [0, 1, 2])
    node, _ = node.masked(0, layout, words, (1, 2, 3))
    with pytest.raises(SecureSumError, match="not in that sum, so it opens nothing"):
        node.reveal(0, [1, 2, 3])


def test_keys_of_another_session_s_size_or_of_no_point_are_refused():
    play = Play(3)
    play.advertise()
    peers = play.peers_of(0)
    more = NodeSecrets.begin("s", 2).own
    with pytest.raises(SecureSumError, match="another number of sums"):
        play.of(0).share(0, {**peers, 1: more}, 2 / 3)
    zero = dataclasses.replace(peers[1], channel=bytes(32))
    with pytest.raises(SecureSumError, match="cannot be used"):
        play.of(0).share(0, {**peers, 1: zero}, 2 / 3)


def test_a_node_refuses_a_threshold_of_half_and_a_neighbour_that_is_itself():
    play = Play(3)
    play.advertise()
    secrets, peers = play.of(0), play.peers_of(0)
    with pytest.raises(SecureSumError, match="above a half"):
        secrets.share(0, peers, 0.5)
    with pytest.raises(SecureSumError, match="same key"):
        secrets.share(0, {**peers, 5: secrets.own}, 2 / 3)
    with pytest.raises(SecureSumError, match="two neighbours at least"):
        secrets.share(0, {1: peers[1]}, 2 / 3)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=300))
def test_keys_are_text_and_any_other_text_is_refused(text):
    keys = NodeSecrets.begin("s", 2).own
    assert AdvertisedKeys.from_text(keys.to_text()) == keys
    for wrong in (text, keys.to_text()[:-1], keys.to_text() + text + ".", f"A{keys.to_text()}"):
        with pytest.raises(SecureSumError):
            AdvertisedKeys.from_text(wrong)


@given(st.integers(3, 120), st.one_of(st.none(), st.integers(2, 20)), st.integers(0, 5))
def test_neighbours_are_mutual_and_as_many_as_asked_for(nodes, degree, seed):
    found = draw_neighbours(list(range(nodes)), degree, np.random.default_rng(seed))
    wanted = 64 if degree is None else 2 * -(-degree // 2)
    for node, peers in found.items():
        assert node not in peers
        assert len(set(peers)) == min(nodes - 1, wanted)
        assert all(node in found[peer] for peer in peers)


@given(st.integers(3, 300), st.floats(0.5, 1, exclude_min=True))
def test_two_sets_that_can_open_a_secret_have_a_member_in_common(holders, threshold):
    assert 2 * shares_needed(threshold, holders) > holders
    assert shares_needed(threshold, holders) <= holders
