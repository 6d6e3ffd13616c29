"""Better hidden layers from few classes: tell the clusters of each class apart.

A node that holds two classes needs few features to tell them apart, so most of its hidden
neurons stay near their initial weights and are of little use to the others' classes. Beyond the
papers: layer by layer GEMS throws the local output layer away anyway, so a node may train its
hidden layers on a harder task of its own: each class is cut into clusters, and the clusters are
the classes to learn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gems_flwr.errors import ModelError
from gems_flwr.moments.class_clusters import k_means
from gems_flwr.networks.layers import weight_layers


def split_classes(inputs: Tensor, labels: Tensor, count: int, seed: int) -> Tensor:
    """Return labels that tell the clusters of every class apart, from 0 without gaps.

    Parameters
    ----------
    inputs : tensor of shape (n, ...)
        What k-means works on, flattened.
    labels : int tensor of shape (n,)
        True classes.
    count : int
        Clusters per class, at least 1; fewer if a class has fewer distinct samples.
    seed : int
        Source of the clusters' starts.

    Examples
    --------
    >>> import torch
    >>> from gems_flwr import split_classes
    >>> inputs, labels = torch.tensor([[0.0], [9.0], [5.0], [5.1]]), torch.tensor([0, 0, 1, 1])
    >>> split = split_classes(inputs, labels, count=2, seed=0)
    >>> bool(split[0] == split[1]), int(split.max())
    (False, 3)
    """
    if count < 1:
        raise ModelError(f"count must be at least 1, got {count}")
    points, out, used = inputs.flatten(1).float(), torch.zeros_like(labels), 0
    for label in torch.unique(labels).tolist():
        mine = labels == label
        found, _ = k_means(points[mine], count, (seed + label) % 2**63)
        # A cluster can lose all its points on the way.
        _, found = torch.unique(found, return_inverse=True)
        out[mine] = used + found.to(out)
        used += int(found.max()) + 1
    return out


@contextmanager
def other_output_layer(model: nn.Module, outputs: int, seed: int) -> Iterator[None]:
    """Give a model another linear output layer for a while.

    Parameters
    ----------
    model : torch.nn.Module
        Gets back its own layer, as it was, in the end.
    outputs : int
        Outputs of the other layer.
    seed : int
        Source of its initial weights.

    Examples
    --------
    >>> from torch import nn
    >>> from gems_flwr import other_output_layer
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with other_output_layer(model, outputs=20, seed=0):
    ...     model[-1].out_features  # train here
    20
    >>> model[-1].out_features
    2
    """
    state = {key: value.detach().cpu().numpy() for key, value in model.state_dict().items()}
    layers = weight_layers(state)
    if not layers[-1].name:
        raise ModelError("the model is its output layer; there are no others to train")
    parent, _, name = layers[-1].name.rpartition(".")
    owner = model.get_submodule(parent)
    own = getattr(owner, name)
    if not isinstance(own, nn.Linear):
        raise ModelError(f"the output layer is a {type(own).__name__}, not linear")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        setattr(owner, name, nn.Linear(own.in_features, outputs))
    try:
        yield
    finally:
        setattr(owner, name, own)
