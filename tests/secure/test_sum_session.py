"""Secure sums without Flower: exact whoever drops out when, and nothing below the threshold."""

import itertools

import numpy as np
import pytest
from helpers_secure import Play
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.errors import SecureSumError
from gems_flwr.secure.fixed_point import Layout, Section
from gems_flwr.secure.neighbourhoods import draw_neighbours, shares_needed
from gems_flwr.secure.node_secrets import NodeSecrets


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


@settings(max_examples=60, deadline=None)
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


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [50, 200])
def test_many_nodes_with_few_neighbours_sum_exactly(nodes):
    rng = np.random.default_rng(nodes)
    drops = [set(rng.choice(nodes, nodes // 25, replace=False).tolist()) for _ in range(4)]
    [(survivors, total, expected)] = play_sum(nodes, 12, drops, sums=1)
    assert len(survivors) >= nodes - 3 * (nodes // 25)
    assert (total == expected).all()


def test_nobody_is_opened_when_too_many_are_gone():
    """Five nodes at two thirds: four shares are needed, three survivors open nothing."""
    play = Play(5)
    play.advertise()
    play.share()
    layout = layout_for(5)
    masked = play.mask(0, layout, draw_words(layout, 5, 1), lost={0, 1})
    assert not play.server.is_quorum(masked)
    with pytest.raises(SecureSumError, match="3 nodes of the neighbourhood are in the sum"):
        play.of(2).reveal(0, sorted(masked))


def test_any_set_of_shares_below_the_threshold_opens_nothing():
    play = Play(5)
    play.advertise()
    play.share()
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


def test_masked_numbers_of_one_node_are_uniform():
    """Chi-square of the low eight bits of 40,000 masked zeros: 255 degrees of freedom.

    Its mean is 255 and its deviation sqrt(510) = 22.6; unmasked zeros have 10,200,000.
    """
    play = Play(3)
    play.advertise()
    play.share()
    layout = Layout([Section("zeros", (40_000,), bound=1.0, bits=20)], 3)
    masked = play.mask(0, layout, [layout.encode({"zeros": np.zeros(40_000)})] * 3)
    for words in masked.values():
        for shift in (0, 8, 12):
            low = (words >> np.uint64(shift)) & np.uint64(255)
            counts = np.bincount(low.astype(int), minlength=256)
            expected = len(words) / 256
            assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * 22.6


def test_two_sessions_mask_the_same_numbers_differently():
    seen = []
    for _ in range(2):
        play = Play(3)
        play.advertise()
        play.share()
        layout = layout_for(3)
        seen.append(play.mask(0, layout, draw_words(layout, 3, 0)))
    assert not any((seen[0][i] == seen[1][i]).all() for i in range(3))


def test_a_node_masks_once_and_reveals_once():
    play = Play(3)
    play.advertise()
    play.share()
    layout = layout_for(3)
    words = draw_words(layout, 3, 0)
    masked = play.mask(0, layout, words)
    with pytest.raises(SecureSumError, match="masked on this node already"):
        play.of(0).masked(0, layout, words[0], (1, 2))
    play.reveal(0, set(masked))
    with pytest.raises(SecureSumError, match="opened on this node already"):
        play.of(0).reveal(0, [0, 1, 2])
    with pytest.raises(SecureSumError, match="given its shares in this session before"):
        play.of(0).share(0, play.server.peers_of(0), 2 / 3)


def test_a_node_never_gives_both_secrets_of_another():
    """Whatever list of survivors it is told, of each node it gives one share of two."""
    play = Play(4, threshold=0.51)
    play.advertise()
    play.share()
    layout = layout_for(4)
    play.mask(0, layout, draw_words(layout, 4, 0))
    before = play.of(0).slots[0].shares
    after, shares = play.of(0).reveal(0, [0, 1, 2])
    assert shares[3] == before[3][0]
    assert shares[1] == before[1][1]
    assert not after.slots[0].shares


def test_seeds_are_forgotten_once_they_are_used():
    play = Play(3)
    play.advertise()
    play.share()
    seeds = [play.of(0).slots[0].own_seed, play.of(0).slots[0].mask_seed]
    layout = layout_for(3)
    play.mask(0, layout, draw_words(layout, 3, 0))
    import base64

    assert not any(base64.b64encode(seed).decode() in play.secrets[0] for seed in seeds)


def test_a_wrong_share_is_noticed_and_done_without():
    play = Play(6)
    play.advertise()
    play.share()
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
    play = Play(3)
    play.advertise()
    play.share()
    letters = play.server.letters_for(0)
    for wrong in ({1: letters[2]}, {1: letters[1][:-1] + b"x"}, {1: b""}):
        with pytest.raises(SecureSumError, match="changed on the way"):
            play.of(0).receive(wrong)
    with pytest.raises(SecureSumError, match="no neighbour"):
        play.of(0).receive({7: letters[1]})


def test_a_node_refuses_a_threshold_of_half_and_a_neighbour_that_is_itself():
    play = Play(3)
    play.advertise()
    secrets, peers = play.of(0), play.server.peers_of(0)
    with pytest.raises(SecureSumError, match="above a half"):
        secrets.share(0, peers, 0.5)
    with pytest.raises(SecureSumError, match="same key"):
        secrets.share(0, {**peers, 5: secrets.own}, 2 / 3)
    with pytest.raises(SecureSumError, match="two neighbours at least"):
        secrets.share(0, {1: peers[1]}, 2 / 3)


def test_two_nodes_are_no_sum():
    play = Play(2)
    with pytest.raises(SecureSumError, match="three nodes at least"):
        play.advertise()


def test_secrets_survive_being_written_down():
    secrets = NodeSecrets.begin("s", 3)
    assert NodeSecrets.from_json(secrets.to_json()) == secrets


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
