"""Tiny nodes with several models: an ordinary handler for one model, and the mod."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gems_flwr import InProcessGrid
from gems_flwr.core.records import to_numpy, to_record
from gems_flwr.node import NodeOptions
from gems_flwr.node.mod import respond
from gems_flwr.strategies.members import join_models
from gems_flwr.strategies.multi_model import SamplingRule

SHAPES = {"a": (3,), "b": (2, 2)}


@dataclass
class Several:
    """What a node has of several models, by plain functions; in the place of a `TaskSet`."""

    examples: Mapping[str, int]
    capacity: int = 1
    of_model: Callable | None = None

    def loss(self, name, arrays, device):
        return self.of_model(name, arrays)


def several_mod(several, **options):
    """Return the one mod, of a node whose models `several(context)` describes."""

    def mod(message, context, call_next):
        return respond(NodeOptions(several=several, **options), message, context, call_next)

    return mod


def start_models(names=("a", "b")):
    """Two architectures that have nothing in common."""
    return {n: {"w": np.zeros(SHAPES[n]), "n": np.array(0, dtype=np.int64)} for n in names}


def initial(names=("a", "b")):
    return to_record(join_models(start_models(names)))


def pull(node, model, weights):
    """A node's update: a third of the way from its own target, far off for high numbers."""
    size = (node + 1) * (1 if model == "a" else -2)
    waves = np.cos(np.arange(weights.size) * (node + 1)).reshape(SHAPES[model])
    return (weights - size * waves) / 3


def examples_of(node, names=("a", "b")):
    """Node k has k + 1 examples of each model; node 0 lacks b."""
    return {n: node + 1 for n in names if not (n == "b" and node == 0)}


def pulling_app(behaviours=None, names=("a", "b"), capacity=2, calls=None, holdings=examples_of):
    """Return the app of a user with one handler.

    `behaviours` maps (node, round, model) to what happens instead of training.
    """

    def several(context):
        node = int(context.node_config["partition-id"])

        def loss(name, arrays):
            return float(np.linalg.norm(pull(node, name, arrays["w"])))

        return Several(holdings(node, names), capacity, loss)

    mod = several_mod(several)
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        config = message.content["config"]
        model, number = config["model"], config["server-round"]
        if calls is not None:
            calls.append((node, number, model))
        arrays = to_numpy(message.content["arrays"])
        trained = {"w": arrays["w"] - pull(node, model, arrays["w"]), "n": arrays["n"] + 1}
        instead = (behaviours or {}).get((node, number, model))
        if instead is not None:
            trained = instead(trained)
        metrics = MetricRecord({"num-examples": node + 1, "loss": 1.0})
        content = RecordDict({"my-model": to_record(trained), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def app_of(handler, *, examples, loss=None, names=("a", "b")):
    """Return an app with the mod around a handler; the same holdings for all nodes."""
    mod = several_mod(
        lambda context: Several(
            dict.fromkeys(names, examples), 1, lambda *about: loss(context, *about)
        )
    )
    app = ClientApp(mods=[mod])
    app.train()(handler)
    return app


def echo(message: Message, context: Context) -> Message:
    """Train nothing."""
    content = RecordDict(
        {"m": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content, reply_to=message)


class Watching(InProcessGrid):
    """Notes what every message and reply carries, and can lose a node or its state."""

    def __init__(self, app, nodes, forget=(), away=()):
        super().__init__(app, nodes)
        self.seen, self.forget, self.away = [], set(forget), set(away)

    def _deliver(self, message, timeout):
        node = self._configs[message.metadata.dst_node_id]["partition-id"]
        question = message.content.get("question")
        asked = {} if question is None else json.loads(question["text"])
        number = message.content["config"]["server-round"]
        action = asked.get("action", question["kind"] if question else "other")
        if (node, number, action) in self.away:
            return None
        if (node, number, action) in self.forget:
            self._states.pop(message.metadata.dst_node_id, None)
        models = sorted(key for key in message.content if "/" in key)
        self.seen.append((node, number, action, models))
        return super()._deliver(message, timeout)


class DataSampling(SamplingRule):
    """A rule that the library does not have: nodes are drawn by their share of the data."""

    def importance(self, shares, answers, available):
        return shares
