"""What building and intersecting good-enough spaces costs.

Construction stands against the papers' loop (Algorithm 2: bisection, the same number of
directions) and against the bare matrix product of data and directions, intersection against
gradient descent on Eq. 2. Data are synthetic clouds of MNIST's size, so nothing needs to be there.
What cones cost is in `simulations.bench.memory_cost`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from rich.table import Table

from gems_flwr.intersect.balls import intersect_balls
from gems_flwr.intersect.equation2 import descend_equation2
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.layer_radius import find_radius
from gems_flwr.radii.quality import Quality
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.radius import Radius
from simulations.bench.cost_tables import Column, CostTable, limit, obvious, ours, ratio, size

SAMPLES, FEATURES, CLASSES, DIRECTIONS = 1000, 784, 10, 500
EPSILON = 0.7
WAYS = {"sampled": "rays", "worst": "worst", "certified": "certified"}


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


def construction_row(samples: int, features: int, directions: int) -> dict[str, float | str]:
    """Return milliseconds of the loop, of each way, and of the product alone."""
    data, quality = layer(samples, features), Quality(EPSILON)
    options = {"directions": directions, "seed": 3}
    _, loop = timed(lambda: find_radius(data, quality, "bisection", **options), 1)
    spent: dict[str, float | str] = {}
    for method, name in WAYS.items():
        _, seconds = timed(lambda m=method: find_radius(data, quality, m, **options))  # type: ignore[misc]
        spent[name] = seconds * 1e3
    x = data.augmented(slice(None))[0]
    directions_matrix = torch.randn(directions * CLASSES, x.shape[1])
    _, matmul = timed(lambda: x @ directions_matrix.T)
    return {
        "n×D×p": f"{samples}×{features}×{directions}",
        "10⁹": samples * features * directions / 1e9,
        "loop": loop * 1e3,
        **spent,
        "X·U": matmul * 1e3,
    }


def balls(count: int, dimension: int, radius: float) -> list[BallSpace]:
    """Return balls around random centres."""
    rng = np.random.default_rng(count)
    centers = rng.normal(size=(count, dimension)).astype(np.float32)
    return [BallSpace(center, Radius(radius, "worst")) for center in centers]


def intersection_row(count: int, dimension: int, factor: float) -> dict[str, float | str | None]:
    """Return verdict and time of the dual, and of descent where that is bearable."""
    # Random centres are about sqrt(d) from their mean.
    spaces = balls(count, dimension, factor * float(np.sqrt(dimension)))
    found, seconds = timed(lambda: intersect_balls(spaces, "margin"))
    tried, slow = (
        timed(lambda: descend_equation2(spaces), 1) if count <= 10 else (None, float("nan"))
    )
    centers = np.stack([space.center for space in spaces])
    _, once = timed(lambda: centers.mean(axis=0))
    return {
        "nodes": count,
        "d": dimension,
        "verdict": found.status,
        "dual": seconds * 1e3,
        "descent": slow * 1e3 if tried else None,
        "it says": tried.status if tried else None,
        "pass": once * 1e3,
    }


def table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """Return a table with all columns on the right, for parts that print themselves."""
    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure construction and intersection."""
    sizes = [(SAMPLES // 2, FEATURES, DIRECTIONS), (SAMPLES, FEATURES, DIRECTIONS)]
    if not quick:
        sizes += [(SAMPLES, FEATURES, 2 * DIRECTIONS), (2 * SAMPLES, FEATURES, DIRECTIONS)]
        sizes += [(SAMPLES, 2 * FEATURES, DIRECTIONS)]
    yield CostTable(
        "Radius of a linear layer",
        (
            *(size("n×D×p"), size("10⁹"), obvious("loop")),
            *(ours(name) for name in WAYS.values()),
            limit("X·U"),
            *(ratio(f"{name} ×", "loop", name) for name in ("rays", "worst")),
            ratio("worst / X·U", "worst", "X·U"),
        ),
        tuple(construction_row(*each) for each in sizes),
        "n samples, D features, p directions, and their product. loop: the papers' bisection, the "
        "same directions in each step; ×: how many times quicker. X·U: the bare product of data "
        "and directions.",
        grows_with="10⁹",
        grows_label="n·D·p, 10⁹",
    )
    cases = [(5, 7850, 0.6), (5, 7850, 1.2), (100, 7850, 0.9), (100, 7850, 1.2)]
    cases += [] if quick else [(1000, 7850, 0.9), (1000, 7850, 1.2)]
    yield CostTable(
        "Intersection of balls",
        (
            *(size("nodes"), size("d"), size("verdict"), ours("dual"), obvious("descent")),
            *(Column("it says"), limit("pass")),
            ratio("dual ×", "descent", "dual"),
            ratio("dual / pass", "dual", "pass"),
        ),
        tuple(intersection_row(*case) for case in cases),
        "dual: the verdict with its proof. descent: on Eq. 2, 20,000 steps; ×: how many times "
        "quicker the dual is. pass: one over the data, the mean of all centres.",
        grows_with="nodes",
        group="verdict",
    )
