"""What building and intersecting good-enough spaces costs.

Construction stands against the papers' loop (Algorithm 2: bisection, the same number of
directions) and against the bare matrix product of data and directions, intersection against
gradient descent on Eq. 2. Data are synthetic clouds of MNIST's size, so nothing needs to be there.
What cones cost is in `simulations.bench.memory_cost`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from gems_flwr.intersect.balls import intersect_balls
from gems_flwr.intersect.equation2 import descend_equation2
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.layer_radius import find_radius
from gems_flwr.radii.quality import Quality
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.radius import Radius

SAMPLES, FEATURES, CLASSES, DIRECTIONS = 1000, 784, 10, 500
EPSILON = 0.7


def timed(function: Callable[[], Any], repeat: int = 3) -> tuple[Any, float]:
    """Return what a function returns and the seconds of its quickest call."""
    best, value = float("inf"), None
    for _ in range(repeat):
        started = time.perf_counter()
        value = function()
        best = min(best, time.perf_counter() - started)
    return value, best


def clouds(samples: int, features: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy clouds around random class centres."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(1).normal(size=(CLASSES, features))
    y = rng.integers(0, CLASSES, samples)
    x = centers[y] + 2 * rng.normal(size=(samples, features))
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def layer(samples: int, features: int) -> LayerData:
    """Return a layer that is right on most of the clouds."""
    x, y = clouds(samples, features)
    means = torch.stack([x[y == c].mean(dim=0) for c in range(CLASSES)])
    return LayerData(means, -(means**2).sum(dim=1) / 2, x, y)


def construction_row(samples: int, features: int, directions: int) -> tuple[str, ...]:
    """Return one row: seconds of the loop, and of each way as milliseconds and ratio."""
    data, quality = layer(samples, features), Quality(EPSILON)
    options = {"directions": directions, "seed": 3}
    _, loop = timed(lambda: find_radius(data, quality, "bisection", **options), 1)
    cells = []
    for method in ("sampled", "worst", "certified"):
        _, seconds = timed(lambda m=method: find_radius(data, quality, m, **options))  # type: ignore[misc]
        cells.append(f"{seconds * 1e3:.1f} ms  {loop / seconds:.0f}×")
    x = data.augmented(slice(None))[0]
    directions_matrix = torch.randn(directions * CLASSES, x.shape[1])
    _, matmul = timed(lambda: x @ directions_matrix.T)
    sizes = (f"{samples}", f"{features * CLASSES + CLASSES}", f"{directions}")
    return (*sizes, f"{loop:.2f} s", *cells, f"{matmul * 1e3:.1f} ms")


def balls(count: int, dimension: int, radius: float) -> list[BallSpace]:
    """Return balls around random centres."""
    rng = np.random.default_rng(count)
    centers = rng.normal(size=(count, dimension)).astype(np.float32)
    return [BallSpace(center, Radius(radius, "worst")) for center in centers]


def intersection_row(count: int, dimension: int, factor: float) -> tuple[str, ...]:
    """Return one row: verdict and time of the dual, and of descent where that is bearable."""
    # Random centres are about sqrt(d) from their mean.
    spaces = balls(count, dimension, factor * float(np.sqrt(dimension)))
    found, seconds = timed(lambda: intersect_balls(spaces, "margin"))
    descent = "–"
    if count <= 10:
        tried, slow = timed(lambda: descend_equation2(spaces), 1)
        descent = f"{tried.status}, {slow:.2f} s"
    return (str(count), str(dimension), found.status, f"{seconds * 1e3:.1f} ms", descent)


def table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """Return a table with all columns on the right."""
    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def report(console: Console, quick: bool) -> None:
    """Print the tables."""
    sizes = [(SAMPLES, FEATURES, DIRECTIONS)]
    if not quick:
        sizes += [(SAMPLES, FEATURES, 2 * DIRECTIONS), (2 * SAMPLES, FEATURES, DIRECTIONS)]
        sizes += [(SAMPLES, 2 * FEATURES, DIRECTIONS)]
    with console.status("construction"):
        rows = [construction_row(*size) for size in sizes]
    console.print(
        table(
            "Radius of a linear layer: against the papers' bisection (same directions per step) "
            "and the bare product",
            ("n", "d", "p", "loop", "exact rays", "worst", "certified", "X·U alone"),
            rows,
        )
    )
    with console.status("intersection"):
        cases = [(5, 7850, 0.6), (5, 7850, 1.2)]
        cases += [] if quick else [(100, 7850, 0.9), (100, 7850, 1.2), (1000, 7850, 0.9)]
        cases += [] if quick else [(1000, 7850, 1.2), (1000, 785, 1.2)]
        rows = [intersection_row(*case) for case in cases]
    console.print(
        table(
            "Intersection of balls: verdict by the dual, against descent on Eq. 2 (20,000 steps)",
            ("nodes", "d", "verdict", "dual", "descent"),
            rows,
        )
    )
