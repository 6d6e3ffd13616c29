"""What the balls of a hidden layer cost.

Construction stands against the papers' loop (2019, Algorithm 2 for each neuron by itself: at
every step of the bisection as many fresh random models, all in one product, which is quicker
than one at a time) and against the bare matrix product of data and directions. Data are
synthetic clouds of MNIST's size, so nothing needs to be there.
"""

from __future__ import annotations

import dataclasses

import torch
from rich.console import Console

from gems_flwr.radii.activations import ACTIVATIONS
from gems_flwr.radii.neuron_data import NeuronData, neuron_deviation
from gems_flwr.radii.neuron_radii import build_neuron_balls
from simulations.bench.spaces_cost import DIRECTIONS, FEATURES, SAMPLES, clouds, table, timed

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


def radii_row(neurons: int, directions: int) -> tuple[str, ...]:
    """Return one row: seconds of the loop, and of each way as milliseconds and ratio."""
    data = hidden_layer(neurons)
    _, some = timed(lambda: [loop(data, neuron, directions) for neuron in range(TIMED)], 1)
    whole = some / TIMED * neurons
    cells = []
    for method in ("sampled", "worst", "certified"):
        # A fresh copy every time, as a layer remembers its products.
        _, seconds = timed(
            lambda m=method: build_neuron_balls(  # type: ignore[misc]
                dataclasses.replace(data), EPSILON, m, directions=directions, seed=3
            )
        )
        cells.append(f"{seconds * 1e3:.0f} ms  {whole / seconds:.0f}×")
    matrix = torch.randn(directions, data.dimension)
    _, matmul = timed(lambda: data.rows @ matrix.T)
    return (str(neurons), f"{whole:.1f} s", *cells, f"{matmul * 1e3:.1f} ms")


def report(console: Console, quick: bool) -> None:
    """Print the tables."""
    with console.status("radii"):
        rows = [radii_row(neurons, DIRECTIONS) for neurons in ((50,) if quick else (50, 100, 200))]
    console.print(
        table(
            f"All neuron radii of a layer (n = {SAMPLES}, D = {FEATURES}, p = {DIRECTIONS}): "
            f"against the papers' bisection, one neuron at a time (timed for {TIMED} neurons and "
            "scaled to their number), and the bare product",
            ("neurons", "loop", "exact rays", "worst", "certified", "X·U alone"),
            rows,
        )
    )
