"""What merging the hidden neurons of many nodes costs, and how the cost grows.

One pass with proofs stands against the papers' way (k-means, then greedy intersections). The
neurons are synthetic: half of a node's are noisy copies of prototypes that all nodes share,
the other half its own, so that about half of them can merge. Radii are a little larger than the
noise. Every result is verified from the balls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from gems_flwr.neuron_merging.merge_neurons import merge_neurons
from gems_flwr.neuron_merging.merged_layer import MergedLayer, MergeMethod
from gems_flwr.spaces.neuron_balls import NeuronBalls
from simulations.bench.cost_tables import Column, CostTable, limit, obvious, ours, ratio, size
from simulations.bench.spaces_cost import timed

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


def row(nodes: int, neurons: int, with_kmeans: bool) -> dict[str, float | None]:
    """Return seconds of both ways and of one pass over the neurons, and the result."""
    given = layers(nodes, neurons)
    merged, seconds = timed_merge(given, "verified")
    other, slow = timed_merge(given, "kmeans") if with_kmeans else (None, 0.0)
    centers = np.concatenate([layer.centers for layer in given])
    _, once = timed(lambda: np.einsum("nd,nd->n", centers, centers))
    return {
        "nodes": nodes,
        "neurons": nodes * neurons,
        "proof": seconds,
        "k-means": slow if other else None,
        "pass": once,
        "merged": len(merged),
        "groups": merged.groups,
    }


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure networks of several sizes."""
    sizes = [(5, 200), (20, 1000)] if quick else [(5, 200), (20, 1000), (50, 1000), (100, 1000)]
    largest = 1 if quick else 2
    yield CostTable(
        "Merging hidden neurons",
        (
            *(size("nodes"), size("neurons"), ours("proof", "s"), obvious("k-means", "s")),
            limit("pass", "s"),
            ratio("k-means ×", "k-means", "proof"),
            ratio("proof / pass", "proof", "pass"),
            *(Column("merged"), Column("groups")),
        ),
        tuple(row(*each, number < largest) for number, each in enumerate(sizes)),
        "proof: one pass over the neurons, each merge proved. k-means: with 100 clusters, then "
        "greedy. pass: the norms of all neurons.",
        grows_with="neurons",
    )
