"""What merging the hidden neurons of many nodes costs, and how the cost grows.

One pass with proofs stands against the papers' way (k-means, then greedy intersections). The
neurons are synthetic: half of a node's are noisy copies of prototypes that all nodes share,
the other half its own, so that about half of them can merge. Radii are a little larger than the
noise. Every result is verified from the balls.
"""

from __future__ import annotations

import time

import numpy as np
from rich.console import Console
from rich.table import Table

from gems_flwr.neuron_merging.merge_neurons import merge_neurons
from gems_flwr.neuron_merging.merged_layer import MergedLayer, MergeMethod
from gems_flwr.spaces.neuron_balls import NeuronBalls

DIMENSION, NOISE = 785, 0.1
# Copies are NOISE * sqrt(d) from their prototype; twice that holds the merged one well.
RADIUS = 2 * NOISE * float(np.sqrt(DIMENSION))


def layers(nodes: int, neurons: int, seed: int = 0) -> list[NeuronBalls]:
    """Return layers half of whose neurons are noisy copies of common prototypes."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(neurons // 2, DIMENSION)).astype(np.float32)
    found = []
    for _ in range(nodes):
        noise = NOISE * rng.normal(size=common.shape).astype(np.float32)
        own = rng.normal(size=(neurons - len(common), DIMENSION)).astype(np.float32)
        centers = rng.permutation(np.concatenate([common + noise, own]))
        radii = RADIUS * rng.uniform(0.8, 1.2, neurons).astype(np.float32)
        importance = rng.uniform(0.1, 1.0, neurons).astype(np.float32)
        found.append(NeuronBalls(centers, radii, "worst", importance=importance))
    return found


def timed_merge(given: list[NeuronBalls], method: MergeMethod) -> tuple[MergedLayer, float]:
    """Return the merged layer, verified, and the seconds of merging alone."""
    started = time.perf_counter()
    merged = merge_neurons(given, method, seed=0)
    seconds = time.perf_counter() - started
    merged.verify(given)
    return merged, seconds


def rows(sizes: list[tuple[int, int]], method: MergeMethod) -> list[tuple[str, ...]]:
    """Return one row per size: seconds, growth of both against the size before, and the result."""
    found: list[tuple[str, ...]] = []
    before: tuple[int, float] | None = None
    for nodes, neurons in sizes:
        merged, seconds = timed_merge(layers(nodes, neurons), method)
        total = nodes * neurons
        growth = "–"
        if before is not None:
            growth = f"{seconds / before[1]:.1f}× for {total / before[0]:.1f}×"
        before = total, seconds
        sizes_ = (f"{nodes} × {neurons}", method, f"{seconds:.2f} s", growth)
        found.append((*sizes_, f"{total}", f"{len(merged)}", f"{merged.groups}"))
    return found


def report(console: Console, quick: bool) -> None:
    """Print the table."""
    large = [(20, 1000)] if quick else [(20, 1000), (50, 1000), (100, 1000)]
    small = [(5, 200)] if quick else [(5, 200), (20, 1000)]
    with console.status("merging"):
        found = rows(large, "verified") + rows(small, "kmeans")
    table = Table(
        title="Merging hidden neurons: one pass with proofs, against k-means (100) and greedy",
        title_justify="left",
    )
    headings = ("nodes × neurons", "way", "seconds", "growth", "neurons", "merged", "groups")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(*row)
    console.print(table)
