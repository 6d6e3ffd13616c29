"""Nodes that know two labels of four each, and networks of several layers for them."""

from itertools import pairwise

import torch
from flwr.app import ArrayRecord
from helpers_blobs import CLASSES, FEATURES, TEST, blobs
from torch import nn

from gems_flwr import NodeLimits, Report, Task, resize_model, task_client_app
from gems_flwr.core.records import to_numpy


def network(hidden=(8, 5), seed=0):
    torch.manual_seed(seed)
    widths = [FEATURES, *hidden]
    layers = []
    for below, above in pairwise(widths):
        layers += [nn.Linear(below, above), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))


def labels_of(node):
    return [2 * node % CLASSES, (2 * node + 1) % CLASSES]


def train(model, x, y, steps=60):
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


class Blobs(Task):
    """Two labels of four on each node."""

    def __init__(self, node, hidden):
        self.node, self.hidden = node, hidden

    def build_model(self):
        return network(self.hidden)

    def train(self, model, *, seed, config):
        train(model, *self.training_data())
        return Report(120)

    def evaluate(self, model, *, config):
        return Report(120)

    def validation_data(self):
        return blobs(labels_of(self.node), seed=10 * self.node + 1)

    def training_data(self):
        return blobs(labels_of(self.node), seed=10 * self.node)


def ready_app(hidden=(8, 5)):
    # Merged layers that are narrower than a node's own take its consent.
    limits = NodeLimits(adaptive_answers=None)
    return task_client_app(lambda c: Blobs(c.node_config["partition-id"], hidden), limits=limits)


def initial(hidden=(8, 5)):
    return ArrayRecord(network(hidden).state_dict())


def accuracy(arrays, hidden=(8, 5)):
    model = resize_model(network(hidden), to_numpy(arrays))
    with torch.no_grad():
        return float((model(TEST[0]).argmax(1) == TEST[1]).float().mean())
