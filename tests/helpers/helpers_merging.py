"""Small networks, and nodes with data of their own."""

import itertools

import numpy as np
import torch
from torch import nn


def network(widths=(5, 4, 3, 2), seed=0):
    """A chain of linear layers with ReLU in between, by its arrays and its module."""
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def arrays_of(module):
    return {key: value.numpy().copy() for key, value in module.state_dict().items()}


def samples(rows, width=5, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, width))).float()


def with_labels(inputs):
    return inputs, torch.zeros(len(inputs), dtype=torch.int64)
