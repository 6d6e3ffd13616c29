"""A tiny node for the protocols of local learners, and grids on which something goes wrong."""

from __future__ import annotations

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_grids import kind_of

from gems_flwr import Callback, InProcessGrid, good_enough_mod
from gems_flwr.core.records import to_numpy, to_record


def start_model(size=3, dtype=np.float64):
    return {"w": np.zeros(size, dtype), "steps": np.array(0, dtype=np.int64)}


def initial(size=3, dtype=np.float64):
    return to_record(start_model(size, dtype))


def walk(node, server_round, size):
    """The step of a node in a round: a fixed pseudo-random direction."""
    rng = np.random.default_rng([node, server_round])
    return rng.normal(size=size) * 0.1


def walked(node, rounds, size=3):
    return sum(walk(node, r, size) for r in rounds)


def mean_walk(nodes, rounds, size=3, weights=None):
    return np.average([walked(n, rounds, size) for n in nodes], axis=0, weights=weights)


def walking_app(behaviours=None, size=3, calls=None):
    """Return an app of a user who knows nothing of averaging: node k adds its step and counts it.

    `behaviours` maps (node, round) to what happens instead of training.
    """
    app = ClientApp(mods=[good_enough_mod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        server_round = message.content["config"]["server-round"]
        if calls is not None:
            calls.append((node, server_round))
        arrays = to_numpy(message.content["arrays"])
        trained = {
            "w": (arrays["w"] + walk(node, server_round, size)).astype(arrays["w"].dtype),
            "steps": arrays["steps"] + 1,
        }
        instead = (behaviours or {}).get((node, server_round))
        if instead is not None:
            trained = instead(trained)
        metrics = {"num-examples": node + 1, "loss-sum": float(node + server_round), "batches": 1}
        metrics["correct-share-sum"] = 0.5
        content = RecordDict({"my-model": to_record(trained), "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    return app


def fail(trained):
    raise RuntimeError("the disk is full")


def asks_for_name(message):
    return kind_of(message.content) == "name"


class Troubled(InProcessGrid):
    """Node 0 restarts without its state, misses a message, or its reply is lost, in some rounds.

    After message number `dies`, counted over all rounds, the server dies.
    """

    def __init__(self, app, nodes, forgets=(), misses=(), unheard=(), joins=0, dies=0):
        super().__init__(app, nodes)
        self.forgets, self.misses, self.unheard = set(forgets), set(misses), set(unheard)
        self.joins, self.dies, self.count, self.now = joins, dies, 0, 0
        # Of every message: round, node, and the content as it was sent.
        self.sent = []

    def number(self, node_id):
        return self._configs[node_id]["partition-id"]

    def states(self):
        """What each node keeps, in the order of their numbers."""
        return [self._states[node] for node in sorted(self._states, key=self.number)]

    def get_node_ids(self):
        there = super().get_node_ids()
        return {n for n in there if self.number(n)} if self.now + 1 < self.joins else there

    def _deliver(self, message, timeout):
        if asks_for_name(message):
            return super()._deliver(message, timeout)
        self.now, node = message.content["config"]["server-round"], message.metadata.dst_node_id
        is_zero = self.number(node) == 0
        if is_zero and self.now in self.forgets:
            self.forgets.discard(self.now)
            self._states.pop(node, None)
        if is_zero and self.now in self.misses:
            return None
        self.sent.append((self.now, self.number(node), dict(message.content)))
        reply = super()._deliver(message, timeout)
        self.count += 1
        if self.count == self.dies:
            raise KeyboardInterrupt
        return None if is_zero and self.now in self.unheard else reply


class StopAfter(Callback):
    """Ends a run after some round, as if the server had been killed."""

    def __init__(self, number):
        self.number = number

    def on_round_end(self, record):
        if record.round == self.number:
            raise KeyboardInterrupt
