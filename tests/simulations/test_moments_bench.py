"""Building low-rank moments from samples takes a fraction of the memory of full moments."""

import pytest

from simulations.bench.moments_cost import cost_of


@pytest.mark.deep
def test_memory_grows_with_the_features_and_not_with_their_square(monkeypatch):
    """Full moments of two classes: 16 D^2 bytes at least, for 3,000 features 144 MB."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ours, full = (cost_of(way, 1500, 3000) for way in ("samples", "full"))
    assert full.on_top > 2 * 8 * 3000**2
    assert ours.on_top < full.on_top / 3
