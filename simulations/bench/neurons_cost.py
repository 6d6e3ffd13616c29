"""What the balls of a hidden layer cost.

Construction stands against the papers' loop (2019, Algorithm 2 for each neuron by itself: at
every step of the bisection as many fresh random models, all in one product, which is quicker
than one at a time) and against the bare matrix product of data and directions. Data are
synthetic clouds of MNIST's size, so nothing needs to be there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from gems_flwr.radii.activations import ACTIVATIONS
from gems_flwr.radii.neuron_data import NeuronData, neuron_deviation
from gems_flwr.radii.neuron_radii import build_neuron_balls
from simulations.bench.cost_tables import CostTable, limit, obvious, ours, ratio, size
from simulations.bench.spaces_cost import DIRECTIONS, FEATURES, SAMPLES, WAYS, clouds, timed

EPSILON = 0.01
# R_max and Delta of Algorithm 2.
LARGEST, TOLERANCE = 4000.0, 0.01
# Neurons for which the loop is timed.
TIMED = 3


def hidden_layer(neurons: int) -> NeuronData:
    """Return a ReLU layer as it is initialised, on the clouds."""
    x, _ = clouds(SAMPLES, FEATURES)
    generator = torch.Generator().manual_seed(neurons)
    weight = torch.randn(neurons, FEATURES, generator=generator) / FEATURES**0.5
    return NeuronData(weight, torch.zeros(neurons), x, ACTIVATIONS["relu"])


def loop(data: NeuronData, neuron: int, directions: int) -> float:
    """Return one neuron's radius by Algorithm 2."""
    generator = torch.Generator().manual_seed(neuron)
    center, low, high = data.centers[neuron], 0.0, LARGEST
    while high - low > TOLERANCE:
        radius = (low + high) / 2
        steps = torch.randn(directions, data.dimension, generator=generator)
        steps = steps / steps.norm(dim=1, keepdim=True)
        points = center + radius * steps
        if bool((neuron_deviation(data, neuron, points) <= EPSILON).all()):
            low = radius
        else:
            high = radius
    return low


def radii_row(neurons: int, directions: int) -> dict[str, float]:
    """Return milliseconds of the loop, of each way, and of the product alone."""
    data = hidden_layer(neurons)
    _, some = timed(lambda: [loop(data, neuron, directions) for neuron in range(TIMED)], 1)
    spent = {}
    for method, name in WAYS.items():
        # A fresh copy every time, as a layer remembers its products.
        _, seconds = timed(
            lambda m=method: build_neuron_balls(  # type: ignore[misc]
                dataclasses.replace(data), EPSILON, m, directions=directions, seed=3
            )
        )
        spent[name] = seconds * 1e3
    matrix = torch.randn(directions, data.dimension)
    _, matmul = timed(lambda: data.rows @ matrix.T)
    whole = some / TIMED * neurons
    return {"neurons": neurons, "loop": whole * 1e3, **spent, "X·U": matmul * 1e3}


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure layers of several widths."""
    yield CostTable(
        f"All neuron radii of a layer (n = {SAMPLES}, D = {FEATURES}, p = {DIRECTIONS})",
        (
            *(size("neurons"), obvious("loop"), *(ours(name) for name in WAYS.values())),
            limit("X·U"),
            *(ratio(f"{name} ×", "loop", name) for name in WAYS.values()),
            ratio("worst / X·U", "worst", "X·U"),
        ),
        tuple(radii_row(n, DIRECTIONS) for n in ((25, 50) if quick else (50, 100, 200))),
        f"loop: the papers' bisection, one neuron at a time (timed for {TIMED} neurons and scaled "
        "to their number); ×: how many times quicker. X·U: the bare product of both.",
        grows_with="neurons",
    )
