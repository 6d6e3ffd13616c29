"""The server's memory for many cones: at most three times the bytes received, on top of them."""

import pytest

from simulations.bench.memory_cost import cost_of

MOST = 3.0


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    # Every thread of the linear algebra has buffers of its own, however many nodes there are.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_round_takes_three_times_the_bytes_received():
    cost = cost_of("round", nodes=200, features=400, rank=20)
    assert cost.ratio <= MOST


@pytest.mark.deep
def test_the_plain_way_takes_many_times_that():
    """Otherwise the measurement would not see anything."""
    cost = cost_of("plain", nodes=200, features=400, rank=20)
    assert cost.ratio > 5 * MOST


@pytest.mark.deep
@pytest.mark.parametrize(("nodes", "features", "rank"), [(600, 784, 20), (2000, 400, 2)])
def test_three_times_whatever_the_nodes_and_the_rank(nodes, features, rank):
    cost = cost_of("round", nodes, features, rank)
    assert cost.ratio <= MOST
