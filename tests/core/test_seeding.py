"""Seeds depend on what they are for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.core import derive_seed

words = st.one_of(st.text(max_size=5), st.integers(0, 50))


@given(st.integers(0, 2**62), st.lists(words, max_size=4))
def test_the_same_purpose_has_the_same_seed_within_63_bits(seed, path):
    assert derive_seed(seed, *path) == derive_seed(seed, *path)
    assert 0 <= derive_seed(seed, *path) < 2**63


def test_different_purposes_have_different_seeds():
    purposes = [(s, w, n) for s in range(10) for w in ("a", "b", "1") for n in (1, 11, "1")]
    assert len({derive_seed(s, w, n) for s, w, n in purposes}) == len(purposes)


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        derive_seed(-1)
