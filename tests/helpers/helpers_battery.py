"""One case of the battery: a whole run with hostile nodes in it, and what must be true after it."""

from __future__ import annotations

import functools
import json

import numpy as np
from flwr.app import Error, Message, RecordDict
from helpers_scenarios import NODES, SCENARIOS

from gems_flwr import InProcessGrid
from gems_flwr.core.records import to_numpy


class HostileApp:
    """An app whose replies some partitions change before they are sent.

    Parameters
    ----------
    app : ClientApp
        The honest app.
    lies : mapping from int to callable
        By partition: gets the content of a reply, returns what is sent instead. None sends an
        error.
    """

    def __init__(self, app, lies=()):
        self.app, self.lies = app, lies

    def __call__(self, message, context):
        partition = context.node_config["partition-id"]
        reply = self.app(message, context)
        if partition not in self.lies:
            return reply
        lie = self.lies[partition]
        content = lie(reply.content) if lie and reply.has_content() else None
        if content is None:
            return Message(Error(code=2, reason="will not say"), reply_to=message)
        return Message(content, reply_to=message)


class BatteryGrid(InProcessGrid):
    """A grid for many runs, each with nodes that remember nothing of the others.

    It may not know its nodes' names, so that they go by what they say.
    """

    def __init__(self, app):
        self.hostile_app, self.named = HostileApp(app), True
        super().__init__(self.hostile_app, NODES)

    def begin(self, lies, named=True):
        self.hostile_app.lies, self.named = lies, named
        self._states.clear()
        return self

    def get_nodes(self):
        return super().get_nodes() if self.named else []


@functools.cache
def grid_of(name):
    """Return one grid for all runs of a scenario: each grid has a thread of its own."""
    return BatteryGrid(SCENARIOS[name].app())


class Played:
    """A run that was played to the end."""

    def __init__(self, name, lies, *, folder=None, named=True, **options):
        self.scenario, self.lies = SCENARIOS[name], lies
        self.grid = grid_of(name).begin(lies, named)
        self.strategy = self.scenario.strategy(folder, **options)
        self.result = self.strategy.start(
            self.grid, self.scenario.initial(), num_rounds=self.scenario.rounds
        )
        ids = {config["partition-id"]: node for node, config in self.grid._configs.items()}
        self.ids = ids
        self.names = {partition: self.strategy._nodes.name(ids[partition]) for partition in ids}

    @property
    def honest(self):
        return {name for partition, name in self.names.items() if partition not in self.lies}

    @property
    def hostile(self):
        # A node goes by its id until it has said a name.
        by_id = {f"#{self.ids[partition]}" for partition in self.lies}
        return by_id | {self.names[partition] for partition in self.lies}


def check(played, alone=None):
    """Assert what no hostile node may change.

    Parameters
    ----------
    played : Played
        The run.
    alone : Played, optional
        The same run with hostile nodes that only send errors. Where none of their replies was
        used, the results must be the same.
    """
    result = played.result
    used = set()
    for record in result.history:
        asked, answered = set(record.nodes_asked), set(record.nodes_answered)
        failed = {failure.node for failure in record.failures}
        assert asked & played.honest <= answered, f"honest nodes lost in round {record.round}"
        assert failed <= played.hostile, f"honest nodes blamed: {record.failures}"
        assert asked <= answered | failed, f"lost without a word: {asked - answered - failed}"
        assert all(failure.reason.strip() for failure in record.failures)
        # Every cause is known and has a check of its own: nobody had to be found by trial.
        assert not [f for f in record.failures if "can be played without" in f.reason]
        for metrics in (record.train_metrics, record.evaluate_metrics):
            numbers = np.concatenate([np.atleast_1d(v) for v in metrics.values()] or [[]])
            assert np.isfinite(numbers).all(), metrics
        used |= answered & played.hostile
    for key, array in result.arrays.items():
        assert np.isfinite(array.numpy()).all(), f"'{key}' is not finite"
    details = result.details
    json.dumps(details, allow_nan=False)
    if "margins" in details and "all nodes" not in details["margins"]:
        told = details["margins"].keys() | details["left_out"].keys()
        assert played.honest <= told, "an honest node's space is gone"
    assert not {lost["node"] for lost in details.get("lost", ())} & played.honest
    assert not {node for _, node in details.get("lost_states", ())} & played.honest
    if alone is not None and not used:
        theirs = to_numpy(alone.result.arrays)
        for key, array in to_numpy(result.arrays).items():
            assert np.array_equal(array, theirs[key]), f"'{key}' is not what the others make of it"


def lie_of(kind, seed):
    """Return what a hostile node does to its replies: one that repeats itself, by a seed."""
    rng = np.random.default_rng(seed)

    def lie(content):
        return kind(RecordDict(dict(content)), rng)

    return lie
