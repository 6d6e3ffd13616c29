"""Tiny nodes whose models travel packed, and grids on which something goes wrong."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gems_flwr.client.compression_mod import compression_mod
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.wire.keys import COMPRESSION, JSON
from gems_flwr.wire.records import to_numpy, to_record

SIZE = (40, 25)
FORMS = ["float16", "int8", "int4", "int2"]
# Half a step of rounding for a difference of at most 1; scales are rounded up by 2^-7.
HALF_STEP = {"float16": 2.0**-11, "int8": 0.5 / 127 * 1.01, "int4": 0.5 / 7 * 1.01, "int2": 0.505}


def initial(size=SIZE, dtype=np.float32):
    """A matrix that half precision cannot hold, a bias, and a counter."""
    return to_record(
        {
            "w": np.random.default_rng(0).normal(size=size).astype(dtype),
            "b": np.full(5, 1 / 3, dtype),
            "n": np.array(3, np.int64),
        }
    )


def goal_of(node, size=SIZE):
    return np.random.default_rng([7, node]).normal(size=size)


def trained(arrays, node):
    """Half of the way to a goal of the node's own; in single precision, as torch would."""
    goal = goal_of(node, arrays["w"].shape)
    return {
        "w": (arrays["w"] + 0.5 * (goal - arrays["w"])).astype(np.float32),
        "b": (arrays["b"] + (node + 1) / 8).astype(np.float32),
        "n": arrays["n"].astype(np.int64),
    }


def packed_app(behaviours=None, mods=None, seen=None, key="arrays"):
    """Return an app of a user who knows nothing of compression but the mod.

    `behaviours` maps (node, round) to what is made of the trained arrays.
    """
    app = ClientApp(mods=[compression_mod()] if mods is None else mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        server_round = message.content["config"]["server-round"]
        arrays = to_numpy(message.content[key])
        if seen is not None:
            seen.append((server_round, "train", node, arrays))
        model = trained(arrays, node)
        instead = (behaviours or {}).get((node, server_round))
        if instead is not None:
            model = instead(model)
        metrics = MetricRecord({"num-examples": node + 1})
        return Message(
            RecordDict({"my-model": to_record(model), "metrics": metrics}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        arrays = to_numpy(message.content[key])
        if seen is not None:
            seen.append((message.content["config"]["server-round"], "evaluate", node, arrays))
        mean = float(arrays["w"].mean())
        metrics = MetricRecord({"num-examples": node + 1, "mean": mean})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class PackedGrid(InProcessGrid):
    """Notes how models travel, and lets things go wrong for node 0, or die after a message.

    `sent` has (round, kind of message, node, how): whole, packed, or none where the node has it.
    """

    def __init__(self, app, nodes, *, forgets=(), unheard=(), dies=0, tamper=None):
        super().__init__(app, nodes)
        self.forgets, self.unheard, self.dies = set(forgets), set(unheard), dies
        self.tamper = tamper or {}
        self.sent, self.count, self.bytes_down = [], 0, 0

    def number(self, node_id):
        return self._configs[node_id]["partition-id"]

    def _deliver(self, message, timeout):
        node, kind = self.number(message.metadata.dst_node_id), message.metadata.message_type
        server_round = message.content["config"]["server-round"]
        if node == 0 and server_round in self.forgets:
            self.forgets.discard(server_round)
            self._states.pop(message.metadata.dst_node_id, None)
        packed = message.content.get("arrays")
        how = "none"
        if isinstance(packed, ConfigRecord):
            how = "whole" if "packed-layout" in packed else "packed"
        elif packed is not None:
            how = "plain"
        self.sent.append((server_round, kind, node, how))
        reply = super()._deliver(message, timeout)
        self.count += 1
        if self.count == self.dies:
            raise KeyboardInterrupt
        if node == 0 and server_round in self.unheard and kind == "train":
            return None
        if (node, server_round) in self.tamper and kind == "train" and reply.has_content():
            content = RecordDict(dict(reply.content))
            self.tamper[node, server_round](content)
            reply.content = content
        return reply


def packed_record(content):
    """Return the key and the record of the packed model in a reply."""
    [(key, record)] = [(k, r) for k, r in content.config_records.items() if "packed-exact" in r]
    return key, record


def with_part(name, change):
    """Return what changes one part of the packed model of a reply."""

    def tamper(content):
        key, record = packed_record(content)
        content[key] = ConfigRecord({**record, name: change(record.get(name, b""))})

    return tamper


def with_note(text):
    """Return what changes what a reply says its packed model is a difference to."""

    def tamper(content):
        content[COMPRESSION] = ConfigRecord({JSON: text})

    return tamper


def arrays_equal(left: ArrayRecord, right: ArrayRecord) -> bool:
    a, b = to_numpy(left), to_numpy(right)
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def furthest(left: ArrayRecord, right: ArrayRecord) -> float:
    a, b = to_numpy(left), to_numpy(right)
    return max(float(np.abs(a[k].astype(np.float64) - b[k]).max()) for k in a)
