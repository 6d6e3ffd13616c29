"""Numbers in rings: sums cannot wrap, and what they lose is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.errors import OptionError, SpaceError
from gems_flwr.secure import Layout, Section, mask, whole_section


@given(
    st.integers(8, 64),
    st.integers(1, 40),
    st.floats(1e-6, 1e12),
    st.lists(st.sampled_from([-1.0, 1.0]), min_size=40, max_size=40),
)
def test_no_sum_of_the_largest_numbers_wraps(bits, nodes, bound, signs):
    """Every node adds plus or minus the bound; python's integers know the true sum."""
    try:
        layout = Layout([Section("x", (1,), bound, bits)], nodes)
    except OptionError:
        assert 2 ** (bits - 1) <= 3 * nodes + 2
        return
    words = [layout.encode({"x": np.array([sign * bound])}) for sign in signs[:nodes]]
    section = layout.sections[0]
    whole = sum(int(section.signed(each)[0]) for each in words)
    assert -(2 ** (bits - 1)) < whole < 2 ** (bits - 1)
    assert int(section.signed(layout.add(words))[0]) == whole


@given(st.integers(8, 64), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_a_bound_on_the_total_leaves_more_bits_and_does_not_wrap(bits, nodes, seed):
    """Shares of a whole: their absolute values add up to the bound."""
    rng = np.random.default_rng(seed)
    try:
        layout = Layout([Section("x", (3,), 1.0, bits, of_total=True)], nodes)
    except OptionError:
        return
    shares = rng.dirichlet(np.full(nodes, 0.3), size=3).T * rng.choice([-1, 1], size=(nodes, 3))
    total = layout.decode(layout.add([layout.encode({"x": row}) for row in shares]))["x"]
    step = layout.sections[0].step(nodes)
    assert np.abs(total - shares.sum(0)).max() <= (nodes / 2 + 1) * step + 1e-12
    assert step <= Section("x", (3,), 1.0, bits).step(nodes)


@given(st.integers(8, 64), st.integers(0, 50), st.integers(0, 2**32 - 1))
def test_packed_words_come_back(bits, size, seed):
    layout = Layout([Section("a", (size,), 1.0, bits), Section("b", (3,), 1.0, 16)], 2)
    words = mask(np.random.default_rng(seed).bytes(32), layout)
    data = layout.pack(words)
    assert len(data) == layout.size_bytes == -(-size * bits // 8) + 6
    assert (layout.unpack(data) == words).all()


def test_a_number_beyond_its_bound_is_refused_by_name():
    layout = Layout([Section("sums", (2,), 10.0)], 3)
    for bad in (10.1, -11.0, np.nan, np.inf):
        with pytest.raises(SpaceError, match="sums"):
            layout.encode({"sums": np.array([0.0, bad])})
    with pytest.raises(SpaceError, match="shape"):
        layout.encode({"sums": np.zeros(3)})
    with pytest.raises(SpaceError, match="arrays"):
        layout.encode({"others": np.zeros(2)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout([Section("x", (2,), 10.0, bits=8)], 200), "8 bits are too few for 200"),
        (lambda: Layout([Section("x", (1,), 1.0)] * 2, 3), "sections of different names"),
        (lambda: Layout([Section("x", (1,), 1.0)], 0), "at least 1 node"),
        (lambda: Section("x", (1,), np.nan), "bound must be above 0"),
        (lambda: Section("x", (1,), 1.0, bits=65), "bits must be from 8 to 64"),
        (lambda: whole_section("x", (1,), 1e19, 3), "too large for 64 bits"),
    ],
)
def test_a_layout_that_cannot_hold_its_sum_is_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


def test_bytes_of_another_length_are_refused():
    layout = Layout([Section("sums", (2,), 10.0)], 3)
    with pytest.raises(SpaceError, match="8 bytes"):
        layout.unpack(bytes(9))


def test_masks_fill_their_rings_evenly():
    """Mean and deviation of uniform numbers of 13 bits: 4095.5 and 8192/sqrt(12) = 2364.8."""
    layout = Layout([Section("x", (100_000,), 1.0, bits=13)], 3)
    drawn = mask(bytes(range(32)), layout).astype(float)
    assert abs(drawn.mean() - 4095.5) < 5 * 2364.8 / np.sqrt(100_000)
    assert abs(drawn.std() - 2364.8) < 20
    assert drawn.max() < 2**13
