"""Random Fourier features of vectors: a layer whose weights are a seed.

Cosines and sines of random projections approximate a Gaussian kernel (Rahimi and Recht 2007), so
that a linear layer on top of them is a kernel machine; Fed3R-RF (Fanì et al. 2024) puts a
federated ridge head there. The projections are common to all who know the seed and never travel.

The kernel's width is what has to be chosen, and nobody has the pooled data to choose it on. So
every vector is first made one of length ``sqrt(D)``; two vectors with nothing in common then differ
by ``sqrt(2 D)``, whatever the data set, and a width relative to ``sqrt(D)`` holds for all of them.
Decided here, on validation data of six data sets: its default; see docs/lifts.md.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gems_flwr.errors import OptionError

Normalization = Literal["layer", "length"]


class RandomFourier(nn.Module):
    """Vectors to cosines and sines of random projections; no weights that travel.

    The weights are a buffer made from the seed, the same on every machine and device, and no part
    of the state dict. All nodes and the server must use the same arguments.

    Parameters
    ----------
    inputs : int
        Length D of the vectors, at least 2; what has more axes is flattened.
    outputs : int, default 1000
        Features that come out, an even number from 2: half cosines, half sines.
    bandwidth : float, default 0.7
        Width of the Gaussian kernel relative to ``sqrt(D)``, above 0. Wider is nearer to linear.
    normalize : {"layer", "length"}, default "layer"
        Whether each vector's mean is taken away before its length is made ``sqrt(D)``, as a
        `torch.nn.LayerNorm` without weights does, or not.
    keep_inputs : bool, default False
        Whether the normalised vector itself comes out as well, before the cosines and sines: for
        many inputs of which each matters, such as words.
    seed : int, default 0
        Source of the projections, at least 0.

    Raises
    ------
    OptionError
        If an option is out of range.

    Examples
    --------
    Ups and downs that go together on one node and against each other on the other: the classes
    have the same mean, and no linear model tells them apart.

    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.clientapp import ClientApp
    >>> from torch import nn
    >>> from gems_flwr import Cone, Gems, InProcessGrid, RandomFourier, good_enough_mod
    >>> def Net():
    ...     return nn.Sequential(RandomFourier(10, outputs=100), nn.Linear(100, 2))
    >>> def data(context):
    ...     node = context.node_config["partition-id"]
    ...     rng = np.random.default_rng(node)
    ...     vectors = np.ones((1000, 10)) * rng.choice([-1, 1], (1000, 1))
    ...     vectors[:, 5:] *= 1 - 2 * node
    ...     vectors += 0.5 * rng.normal(size=(1000, 10))
    ...     labels = np.full(1000, node)
    ...     return (vectors[:800], labels[:800]), (vectors[800:], labels[800:])
    >>> app = ClientApp(mods=[good_enough_mod(data, model=Net)])
    >>> @app.train()
    ... def train(message, context):
    ...     raise NotImplementedError("a cone needs no trained model")
    >>> initial = ArrayRecord(Net().state_dict())
    >>> list(initial)  # the projections never travel
    ['1.weight', '1.bias']
    >>> strategy = Gems(space=Cone(rank=10), verify=True)
    >>> result = strategy.start(InProcessGrid(app, nodes=2), initial)
    >>> min(result.details["node_scores"].values()) > 0.9
    True
    """

    frequencies: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int = 1000,
        bandwidth: float = 0.7,
        normalize: Normalization = "layer",
        keep_inputs: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        rules = {
            "inputs": (inputs >= 2, "at least 2", inputs),
            "outputs": (outputs >= 2 and outputs % 2 == 0, "an even number from 2", outputs),
            "bandwidth": (0 < bandwidth < math.inf, "above 0", bandwidth),
            "normalize": (
                normalize in get_args(Normalization),
                f"one of {list(get_args(Normalization))}",
                repr(normalize),
            ),
            "seed": (seed >= 0, "at least 0", seed),
        }
        for option, (holds, allowed, value) in rules.items():
            if not holds:
                raise OptionError(f"{option}: expected {allowed}, got {value}")
        self.inputs, self.outputs, self.seed = inputs, outputs, seed
        self.bandwidth, self.normalize, self.keep_inputs = bandwidth, normalize, keep_inputs
        # In double precision on the processor: single precision then has the same bits everywhere.
        source = torch.Generator().manual_seed(seed)
        drawn = torch.randn(inputs, outputs // 2, generator=source, dtype=torch.float64)
        frequencies = drawn / (bandwidth * math.sqrt(inputs))
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    @property
    def features(self) -> int:
        """Length of the vectors that come out."""
        return self.outputs + (self.inputs if self.keep_inputs else 0)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return cosines and sines.

        Parameters
        ----------
        vectors : tensor of shape (n, …)
            Floating-point numbers, D for each.
        """
        rows = vectors.flatten(1).to(self.frequencies.dtype)
        if rows.shape[1] != self.inputs:
            raise OptionError(f"vectors: expected {self.inputs} numbers, got {rows.shape[1]}")
        if self.normalize == "layer":
            rows = rows - rows.mean(dim=1, keepdim=True)
        # One of zeros alone stays so.
        rows = math.sqrt(self.inputs) * F.normalize(rows, dim=1)
        angles = rows @ self.frequencies
        parts = [rows] if self.keep_inputs else []
        return torch.cat([*parts, angles.cos(), angles.sin()], dim=1)

    def extra_repr(self) -> str:
        """Return what tells this lift from others."""
        return (
            f"{self.inputs}, outputs={self.outputs}, bandwidth={self.bandwidth}, "
            f"normalize={self.normalize!r}, keep_inputs={self.keep_inputs}, seed={self.seed}"
        )
