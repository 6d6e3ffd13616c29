"""`Gems(publish_every=k)`: every published model is that of a run with just these nodes."""

import random

import numpy as np
import pytest
from helpers_blobs import blobs
from helpers_gems import initial, linear_app
from safetensors.numpy import load_file

from conftest import record_equal, refuse_writing
from gems_flwr.client.limits import UNLIMITED
from gems_flwr.errors import OptionError
from gems_flwr.receipts import model_digest
from gems_flwr.runtime import metered_grid
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.server.settings import Callback
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.space_requests import Ball, Cone

NODES = 6
SPACES = [Cone(rank="full", min_count=2), Cone(rank=3, min_count=2), Ball(radius="certified")]


def node_data(context):
    node = int(context.node_config["partition-id"])
    return blobs([0, 1, 2, 3], per_class=30 + 5 * node, seed=10 * node)


def app(spoil=None):
    return linear_app(node_data, spoil, limits=UNLIMITED)


class Shuffled(MeteredGrid):
    """Replies come in an order of their own."""

    def __init__(self, grid, seed):
        super().__init__(grid)
        self.seed = seed

    def stream(self, messages, *, timeout):
        replies = list(super().stream(messages, timeout=timeout))
        random.Random(self.seed).shuffle(replies)
        yield from replies


class Polled:
    """A grid as Flower's: replies are pulled, some at a time, and none come at first."""

    def __init__(self, grid, seed=0):
        self._grid, self._rng, self._pulls = grid, random.Random(seed), 0

    def __getattr__(self, name):
        if name == "collect":
            raise AttributeError(name)
        return getattr(self._grid, name)

    def pull_messages(self, message_ids):
        self._pulls += 1
        return self._grid.pull_messages(message_ids) if self._rng.random() < 0.3 else []


class Heard(Callback):
    def __init__(self):
        self.models = []

    def on_model(self, server_round, arrays, nodes):
        self.models.append((server_round, {k: v.copy() for k, v in arrays.items()}, nodes))


def published(grid, **options):
    heard = Heard()
    result = Gems(**options, callbacks=[heard]).start(grid, initial())
    return result, heard.models


def alone(nodes, **options):
    """The run of some nodes and nobody else, all at once."""
    others = [{"partition-id": int(node)} for node in nodes]
    options.pop("publish_every", None)
    return Gems(**options).start(InProcessGrid(app(), others), initial())


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
@pytest.mark.parametrize("every", [1, 2])
def test_each_model_is_that_of_a_run_with_just_these_nodes(space, every):
    grid = Shuffled(InProcessGrid(app(), NODES), seed=every)
    result, models = published(grid, space=space, publish_every=every, min_nodes=2)
    # From min_nodes on, each k-th; the last is the round's own.
    counts = list(range(2, NODES, every))
    assert [len(nodes) for _, _, nodes in models] == [*counts, NODES]
    for _, arrays, nodes in models:
        assert record_equal(to_record(arrays), alone(nodes, space=space).arrays)
    assert record_equal(to_record(models[-1][1]), result.arrays)


def test_the_order_of_arrival_changes_no_number_of_the_result():
    plain = alone(range(NODES))
    for seed in range(3):
        grid = Shuffled(InProcessGrid(app(), NODES), seed)
        result, _ = published(grid, publish_every=1)
        assert record_equal(result.arrays, plain.arrays)
        assert result.details["margins"] == plain.details["margins"]


def test_models_are_published_as_replies_are_pulled_from_flowers_grid():
    result, models = published(Polled(InProcessGrid(app(), NODES)), publish_every=1)
    assert [len(nodes) for _, _, nodes in models] == [2, 3, 4, 5, 6]
    for _, arrays, nodes in models:
        assert record_equal(to_record(arrays), alone(nodes).arrays)
    assert record_equal(result.arrays, alone(range(NODES)).arrays)


def test_the_file_is_replaced_with_each_model_and_the_details_say_when(tmp_path):
    class Reads(Heard):
        def on_model(self, server_round, arrays, nodes):
            super().on_model(server_round, arrays, nodes)
            path = tmp_path / "published.safetensors"
            assert path.stat().st_mode & 0o077 == 0
            on_disk.append(load_file(path))

    on_disk, heard = [], Reads()
    strategy = Gems(publish_every=2, checkpoint_dir=tmp_path, callbacks=[heard])
    result = strategy.start(InProcessGrid(app(), NODES), initial())
    assert len(on_disk) == len(heard.models) == 3
    for kept, (_, arrays, _) in zip(on_disk, heard.models, strict=True):
        assert all(np.array_equal(kept[key], arrays[key]) for key in arrays)
    entries = result.details["published"]
    assert [entry["nodes"] for entry in entries] == [2, 4, 6]
    assert entries[0]["bytes_up"] < entries[1]["bytes_up"] < entries[2]["bytes_up"]
    assert entries[2]["bytes_up"] == result.traffic.bytes_up
    assert entries[0]["seconds"] < entries[2]["seconds"]
    assert entries[2]["sha256"] == model_digest(to_numpy(result.arrays))


def test_a_reply_that_cannot_be_used_is_in_no_model():
    def spoil(content):
        content.pop("space", None)

    grid = Shuffled(InProcessGrid(app(spoil), NODES), seed=1)
    result, models = published(grid, publish_every=1)
    assert [len(nodes) for _, _, nodes in models] == [2, 3, 4, 5]
    assert all("1" not in nodes for _, _, nodes in models)
    assert [failure.node for _, failure in result.failures] == ["1"]
    assert record_equal(result.arrays, alone([0, 2, 3, 4, 5]).arrays)


def test_robust_models_are_screened_as_a_run_with_just_these_nodes_is():
    grid = Shuffled(InProcessGrid(app(), NODES), seed=2)
    _, models = published(grid, publish_every=2, robust=True, min_nodes=3)
    for _, arrays, nodes in models:
        assert record_equal(to_record(arrays), alone(nodes, robust=True, min_nodes=3).arrays)


def test_refined_models_are_published_round_by_round():
    options = {"space": SPACES[0], "refine": 2}
    result, models = published(InProcessGrid(app(), 3), **options, publish_every=1)
    assert [(number, len(nodes)) for number, _, nodes in models] == [(1, 2), (1, 3), (2, 3), (3, 3)]
    assert record_equal(result.arrays, alone(range(3), **options).arrays)
    assert record_equal(to_record(models[-1][1]), result.arrays)
    assert [entry["round"] for entry in result.details["published"]] == [1, 1, 2, 3]


class Joining(InProcessGrid):
    """The last node connects when the others have answered."""

    def __init__(self, app, nodes):
        super().__init__(app, nodes)
        self.there = False

    def _connected(self, nodes):
        return nodes if self.there else nodes[:-1]

    def get_node_ids(self):
        return self._connected(list(super().get_node_ids()))

    def get_nodes(self):
        return self._connected(list(super().get_nodes()))

    def collect(self, message_ids, *, timeout):
        yield from super().collect(message_ids, timeout=timeout)
        self.there = True


def test_a_node_that_connects_late_is_asked_before_the_round_ends():
    result, models = published(Joining(app(), 4), publish_every=1)
    assert record_equal(result.arrays, alone(range(4)).arrays)
    assert result.history[1].nodes_answered == ("0", "1", "2", "3")
    assert [len(nodes) for _, _, nodes in models] == [2, 4]
    without = Gems().start(Joining(app(), 4), initial())
    assert record_equal(without.arrays, alone(range(3)).arrays)


def test_a_resumed_round_publishes_what_comes_in_anew(tmp_path):
    class Dies(Heard):
        def on_model(self, server_round, arrays, nodes):
            if len(nodes) == 4:
                raise KeyboardInterrupt

    options = {"publish_every": 1, "checkpoint_dir": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        Gems(**options, callbacks=[Dies()]).start(InProcessGrid(app(), NODES), initial())
    result, models = published(InProcessGrid(app(), NODES), **options, resume=True)
    assert [len(nodes) for _, _, nodes in models] == [5, 6]
    assert record_equal(result.arrays, alone(range(NODES)).arrays)


def test_time_spent_on_models_is_not_the_nodes_time(monkeypatch):
    """Each takes longer than nodes have for an answer, and nobody is left out for it."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    class Slow(Callback):
        def on_model(self, server_round, arrays, nodes):
            clock.now += 100.0

    clock = Clock()
    monkeypatch.setattr(metered_grid, "time", clock)
    grid, strategy = Polled(InProcessGrid(app(), NODES)), Gems(publish_every=1, callbacks=[Slow()])
    result = strategy.start(grid, initial(), timeout=50.0)
    assert result.failures == ()


def test_a_disk_that_takes_no_model_ends_no_run(tmp_path, monkeypatch, caplog):
    refuse_writing(monkeypatch, 28, "published.safetensors")
    strategy = Gems(publish_every=1, checkpoint_dir=tmp_path)
    result = strategy.start(InProcessGrid(app(), 3), initial())
    assert record_equal(result.arrays, alone(range(3)).arrays)
    assert "event=not_published" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"publish_every": -1}, "publish_every must be at least 0, got -1"),
        ({"space": Cone(sums=True)}, "goes without sums"),
        ({"audit": True}, "neither audit"),
        ({"head": "auto"}, "head='auto'"),
        ({"fraction_train": 0.5}, "fraction_train must be 1"),
    ],
)
def test_what_cannot_be_published_in_between_is_refused(options, said):
    with pytest.raises(OptionError, match=said):
        Gems(**{"publish_every": 1, **options})


def test_a_network_is_not_published_in_between():
    with pytest.raises(OptionError, match=r"head\.publish_every must be 0"):
        LayerwiseGems(head=Gems(publish_every=1))
