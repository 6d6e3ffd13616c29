"""Tiny nodes whose models travel packed, grids on which something goes wrong, and lies."""

from __future__ import annotations

import json
import zlib

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gems_flwr import InProcessGrid, good_enough_mod
from gems_flwr.carriers import pack_bytes
from gems_flwr.compression import encode_whole
from gems_flwr.core.records import to_numpy, to_record

SIZE = (40, 25)
# Half a step of rounding for a difference of at most 1; scales are rounded up by 2^-7.
HALF_STEP = {"int8": 0.5 / 127 * 1.01, "int4": 0.5 / 7 * 1.01}


def initial(size=SIZE, dtype=np.float32):
    """A matrix that half precision cannot hold, a bias, and a counter."""
    return to_record(
        {
            "w": np.random.default_rng(0).normal(size=size).astype(dtype),
            "b": np.full(5, 1 / 3, dtype),
            "n": np.array(3, np.int64),
        }
    )


def trained(arrays, node):
    """Half of the way to a goal of the node's own; in single precision, as torch would."""
    goal = np.random.default_rng([7, node]).normal(size=arrays["w"].shape)
    return {
        "w": (arrays["w"] + 0.5 * (goal - arrays["w"])).astype(np.float32),
        "b": (arrays["b"] + (node + 1) / 8).astype(np.float32),
        "n": arrays["n"].astype(np.int64),
    }


def packed_app(behaviours=None, mods=None, seen=None, key="arrays"):
    """Return an app of a user who knows nothing of compression but the mod.

    `behaviours` maps (node, round) to what is made of the trained arrays.
    """
    app = ClientApp(mods=[good_enough_mod()] if mods is None else mods)

    def asked(message, context):
        node, number = (
            context.node_config["partition-id"],
            message.content["config"]["server-round"],
        )
        arrays = to_numpy(message.content[key])
        if seen is not None:
            seen.append((number, message.metadata.message_type, node, arrays))
        return int(node), number, arrays

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node, number, arrays = asked(message, context)
        change = (behaviours or {}).get((node, number), lambda model: model)
        metrics = MetricRecord({"num-examples": node + 1})
        model = to_record(change(trained(arrays, node)))
        return Message(RecordDict({"my-model": model, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        node, _, arrays = asked(message, context)
        metrics = MetricRecord({"num-examples": node + 1, "mean": float(arrays["w"].mean())})
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
        self.sent, self.count = [], 0

    def _deliver(self, message, timeout):
        node = self._configs[message.metadata.dst_node_id]["partition-id"]
        kind, server_round = (
            message.metadata.message_type,
            message.content["config"]["server-round"],
        )
        if node == 0 and server_round in self.forgets:
            self.forgets.discard(server_round)
            self._states.pop(message.metadata.dst_node_id, None)
        packed, how = message.content.get("arrays"), "none"
        if isinstance(packed, ConfigRecord):
            how = "whole" if "layout" in packed else "packed"
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


def arrays_equal(left: ArrayRecord, right: ArrayRecord) -> bool:
    a, b = to_numpy(left), to_numpy(right)
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def furthest(left: ArrayRecord, right: ArrayRecord) -> float:
    a, b = to_numpy(left), to_numpy(right)
    return max(float(np.abs(a[k].astype(np.float64) - b[k]).max()) for k in a)


def packed_record(content):
    """Return the key and the record of the packed model in a reply."""
    [(key, record)] = [(k, r) for k, r in content.config_records.items() if "exact" in r]
    return key, record


def deflated(data):
    compress = zlib.compressobj(9, zlib.DEFLATED, -15)
    return compress.compress(data) + compress.flush()


def _part(name, change):
    """Return what changes one part of the packed model of a reply."""

    def tamper(content):
        key, record = packed_record(content)
        content[key] = ConfigRecord({**record, name: change(record.get(name, b""))})

    return tamper


def whole(content):
    """The whole model where a difference was asked for, under a number that the node has."""
    key, _ = packed_record(content)
    content[key] = pack_bytes(encode_whole(to_numpy(initial())))


def many(content):
    """A thousand copies, each as large as a model when it is unpacked."""
    _, record = packed_record(content)
    bases = json.loads(content["compression"]["json"])
    [number] = bases.values()
    for copy in range(1000):
        content[f"copy-{copy}"] = ConfigRecord(dict(record))
        bases[f"copy-{copy}"] = number
    content["compression"] = ConfigRecord({"json": json.dumps(bases)})


def two(content):
    _, record = packed_record(content)
    content["another"] = ConfigRecord(dict(record))


def beside(content):
    """Arrays beside the packed model: it is not known which is meant."""
    content["more"] = initial()


def unpacked(content):
    """No model at all any more."""
    key, _ = packed_record(content)
    del content[key]


BOMB = deflated(b"\0" * 10**7)
NAN = b"\xc0\x7f"
# What a reply is made into, and what is said of it.
TAMPERED = {
    "codes cut": (_part("codes", lambda b: b[:-3]), "codes of a packed model"),
    "codes bomb": (_part("codes", lambda _: BOMB), "do not fit"),
    "scales nan": (_part("scales", lambda b: NAN * (len(b) // 2)), "NaN or infinity"),
    "scales huge": (_part("scales", lambda b: b"\x7f\x7f" * (len(b) // 2)), "NaN|more than"),
    "surprise": (_part("surprise", lambda _: 1), "not part of one"),
    "no bytes": (_part("codes", lambda _: 7), "not part of one"),
    "whole": (whole, "came whole"),
    "many": (many, "1001 packed models"),
    "beside": (beside, "expected one ArrayRecord"),
    "nothing": (unpacked, "expected one ArrayRecord"),
}
