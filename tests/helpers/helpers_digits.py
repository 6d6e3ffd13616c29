"""The handwritten digits of scikit-learn on some nodes, and an app that only answers questions."""

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from helpers_blobs import both_parts
from helpers_grids import kind_of
from sklearn.datasets import load_digits

from gems_flwr import good_enough_mod
from gems_flwr.node.limits import UNLIMITED


def digits(nodes=3, sort=True):
    """The digits, split by label or at random, by node."""
    x, y = load_digits(return_X_y=True)
    order = np.argsort(y, kind="stable") if sort else np.random.default_rng(0).permutation(len(y))
    parts = np.array_split(order, nodes)
    return [(torch.from_numpy(x[p] / 16).float(), torch.from_numpy(y[p])) for p in parts]


def app_of(parts, limits=UNLIMITED, *outer):
    """Return an app with some mods around ours, whose own handler is never called."""

    def data(context):
        return parts[int(context.node_config["partition-id"])]

    app = ClientApp(mods=[*outer, good_enough_mod(both_parts(data), limits=limits)])

    @app.train()
    def train(message, context):
        raise NotImplementedError

    return app


def failing(fails):
    """Return a mod that fails where ``fails(node, round, what is asked, message)`` is true."""

    def mod(message, context, call_next):
        node, number = int(context.node_config["partition-id"]), message.content["config"]
        if fails(node, number["server-round"], kind_of(message.content), message):
            raise RuntimeError("gone")
        return call_next(message, context)

    return mod


def linear(classes=10, features=64, seed=0):
    """An initial layer."""
    torch.manual_seed(seed)
    return ArrayRecord(torch.nn.Linear(features, classes).state_dict())


def accuracy_of(result, parts):
    """The share of all samples that a result classifies correctly."""
    weight, bias = (array.numpy() for array in result.arrays.values())
    x, y = (torch.cat([part[i] for part in parts]).numpy() for i in range(2))
    return float(np.mean((x @ weight.T + bias).argmax(axis=1) == y))
