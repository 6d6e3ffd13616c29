"""Strategies that keep every node's model, and the pooled reference."""

import numpy as np
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from conftest import initial_arrays, small_model, toy_app
from gems_flwr.errors import RoundFailedError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.server.members import join_members, split_members
from gems_flwr.strategies.ensemble import Ensemble
from gems_flwr.strategies.local_models import LocalModels
from gems_flwr.strategies.pooled import Pooled
from gems_flwr.wire.model_replies import pack_examples_reply
from gems_flwr.wire.records import to_numpy


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True))
def test_members_that_were_joined_come_apart_again(names):
    members = {name: {"a/b": np.full(2, i), "c": np.ones(1)} for i, name in enumerate(names)}
    apart = split_members(join_members(members))
    assert list(apart) == names
    for name in names:
        assert np.array_equal(apart[name]["a/b"], members[name]["a/b"])


def test_a_single_model_is_its_own_only_member():
    assert list(split_members(small_model())) == [""]


def test_every_nodes_model_is_kept_after_one_round(grid):
    result = LocalModels().start(grid, initial_arrays(), num_rounds=9)
    members = split_members(to_numpy(result.arrays))
    assert list(members) == ["0", "1", "2", "3", "4"]
    for node, arrays in members.items():
        assert np.array_equal(arrays["weight"], small_model()["weight"] + int(node) + 1)
    assert result.history[-1].round == 1


MEMBERS = [np.array([[0.6, 0.4]]), np.array([[0.6, 0.4]]), np.array([[0.0, 1.0]])]
LABELS = np.array([1])


def test_scores_follow_the_way_of_voting():
    """Two of three say 0; the mean probability of 1 is 0.6; one of three alone is right."""
    assert Ensemble().score(MEMBERS, LABELS) == {"accuracy": 0.0, "balanced_accuracy": 0.0}
    assert Ensemble(vote="softmax_mean").score(MEMBERS, LABELS)["accuracy"] == 1.0
    assert LocalModels().score(MEMBERS, LABELS)["accuracy"] == pytest.approx(1 / 3)


def test_an_unknown_vote_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"\['majority', 'softmax_mean'\]"):
        Ensemble(vote="loudest")


def sharing_app():
    app = ClientApp()

    @app.query("share_examples")
    def share(message, context):
        node = int(context.node_config["partition-id"])
        features = np.full((node + 1, 3), node, np.uint8)
        labels = np.full(node + 1, node % 2)
        return Message(pack_examples_reply(features, labels, name=str(node)), reply_to=message)

    return app


def test_a_pooled_run_trains_once_on_the_data_of_all_nodes_in_order():
    seen = []

    def fit(arrays, features, labels, seed):
        seen.append((features.copy(), labels.tolist()))
        return arrays

    grid = MeteredGrid(InProcessGrid(sharing_app(), 3))
    result = Pooled(fit=fit, input_shape=(3,)).start(grid, initial_arrays())
    assert [labels for _, labels in seen] == [[0, 1, 1, 0, 0, 0]]
    assert seen[0][0].shape == (6, 3)
    assert seen[0][0][:, 0].tolist() == [0, 1, 1, 2, 2, 2]
    assert result.details["pooled_examples"] == 6
    assert grid.total.bytes_down < 3 * 100


def test_a_pooled_run_with_nodes_that_do_not_share_fails():
    with pytest.raises(RoundFailedError, match="share_examples"):
        Pooled(fit=lambda *a: a[0], input_shape=(3,)).start(
            InProcessGrid(toy_app(), 3), initial_arrays()
        )
    with pytest.raises(NotImplementedError):
        Pooled(fit=lambda *a: a[0], input_shape=(3,)).aggregate([])
