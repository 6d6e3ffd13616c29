"""Nodes with two of four classes each, and ordinary Flower clients with our mod."""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_blobs import CLASSES, FEATURES, TEST, blobs, both_parts
from torch import nn

from gems_flwr import InProcessGrid, good_enough_mod
from gems_flwr.core.records import to_numpy, to_record


def fit(weight, bias, x, y, steps=200):
    """Plain gradient descent; returns new arrays."""
    w = torch.tensor(weight, requires_grad=True)
    b = torch.tensor(bias, requires_grad=True)
    optimizer = torch.optim.SGD([w, b], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(x @ w.T + b, y).backward()
        optimizer.step()
    return w.detach().numpy(), b.detach().numpy()


def node_data(context, seed=0):
    """Two labels of four on each node."""
    node = context.node_config["partition-id"]
    return blobs([2 * node % CLASSES, (2 * node + 1) % CLASSES], seed=10 * node + seed)


def linear_app(source=lambda c: node_data(c, 1), spoil=None, offset=0.0, data=None, **options):
    """An ordinary Flower client with our mod: the one line."""
    app = ClientApp(mods=[good_enough_mod(data or both_parts(source), **options)])

    @app.train()
    def train(message, context):
        arrays = to_numpy(message.content["arrays"])
        weight, bias = fit(arrays["weight"], arrays["bias"], *node_data(context))
        # The same for all classes: another model with the same predictions.
        weight = weight + np.float32(offset * context.node_config["partition-id"])
        reply = RecordDict(
            {
                "arrays": to_record({"weight": weight, "bias": bias}),
                "metrics": MetricRecord({"num-examples": 120}),
            }
        )
        return Message(reply, reply_to=message)

    return app if spoil is None else Spoiled(app, spoil)


class Spoiled:
    """An app whose replies are tampered with on the way."""

    def __init__(self, app, spoil):
        self.app, self.spoil = app, spoil

    def __call__(self, message, context):
        reply = self.app(message, context)
        if context.node_config["partition-id"] == 1 and reply.has_content():
            self.spoil(reply.content)
        return reply


def in_space(change):
    """Return a spoiler that changes the arrays of a space."""

    def spoil(content):
        if "space" in content:
            arrays = to_numpy(content["space"])
            change(arrays)
            content["space"] = to_record(arrays)

    return spoil


def initial(seed=0):
    rng = np.random.default_rng(seed)
    return ArrayRecord(
        {
            "weight": Array(rng.normal(size=(CLASSES, FEATURES)).astype(np.float32) * 0.1),
            "bias": Array(np.zeros(CLASSES, np.float32)),
        }
    )


def accuracy(arrays):
    x, y = TEST
    scores = x @ torch.from_numpy(arrays["weight"].numpy()).T + torch.from_numpy(
        arrays["bias"].numpy()
    )
    return float((scores.argmax(1) == y).float().mean())


def run(strategy, app=None, nodes=2, **kwargs):
    return strategy.start(InProcessGrid(app or linear_app(), nodes), initial(), **kwargs)
