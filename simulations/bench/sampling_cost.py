"""What sampling probabilities cost, how they grow, and how much memory old updates take.

Figures are ratios within this one run, and how they grow. Nothing here asserts a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np

from gems_flwr.averaging.steps import flat
from gems_flwr.client_sampling import (
    closed_form_probabilities,
    draw_assignment,
    optimal_probabilities,
)
from gems_flwr.strategies.multi_model.multi_model_state import MultiModelState
from simulations.bench.cost_tables import Column, CostTable, limit, obvious, ours, ratio, size
from simulations.models import lenet, mlp

_MODELS = 10
_REPEATS = 3


def timed(clients: int) -> tuple[float, float, float]:
    """Return the best seconds of the general solution, of Eq. 5, and of a draw."""
    rng = np.random.default_rng(0)
    importance = np.exp(rng.normal(size=(clients, _MODELS)))
    capacity = rng.integers(1, 4, size=clients)
    probabilities = optimal_probabilities(importance, clients / 10, capacity)
    calls: tuple[Callable[[], object], ...] = (
        lambda: optimal_probabilities(importance, clients / 10, capacity),
        lambda: closed_form_probabilities(importance, clients / 10),
        lambda: draw_assignment(probabilities, rng),
    )
    best = [math.inf] * len(calls)
    for _ in range(_REPEATS):
        for number, call in enumerate(calls):
            started = time.perf_counter()
            call()
            best[number] = min(best[number], time.perf_counter() - started)
    return best[0], best[1], best[2]


def memory(nodes: int, models: int, weights: int) -> tuple[float, float]:
    """Return the bytes that the server keeps of old updates if it holds `weights` per model.

    Returns
    -------
    tuple of float
        Predicted, nodes × models × weights × 4, and counted after filling the state.
    """
    state = MultiModelState(run="bench")
    for model in range(models):
        vectors = {str(n): np.zeros(weights, dtype=np.float32) for n in range(nodes)}
        state.old[str(model)] = vectors
    return 4.0 * nodes * models * weights, float(state.details([])["server_memory_bytes"])


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure probabilities, and the memory of old updates."""
    rows, first = [], None
    for clients in (1_000, 10_000) if quick else (1_000, 10_000, 100_000, 300_000):
        optimal, closed, draw = timed(clients)
        growth = optimal / (clients * math.log(clients))
        first = first or growth
        rows.append(
            {
                "clients": clients,
                "optimal": optimal * 1e3,
                "Eq. 5": closed * 1e3,
                "per n log n": growth / first,
                "draw": draw * 1e3,
            }
        )
    yield CostTable(
        f"Sampling probabilities of {_MODELS} models",
        (
            *(size("clients"), ours("optimal"), limit("Eq. 5")),
            ratio("optimal / Eq. 5", "optimal", "Eq. 5"),
            *(Column("per n log n"), Column("draw", "ms")),
        ),
        tuple(rows),
        "Capacities 1 to 3, best of 3. Eq. 5: the closed form for capacity 1. per n log n: optimal "
        "over n log n, relative to the first row.",
        grows_with="clients",
    )
    nets = {
        "784-32-10": mlp(input_shape=(1, 28, 28), classes=10, hidden=(32,), dropout=0.0),
        "LeNet-5": lenet(input_shape=(1, 28, 28), classes=10),
    }
    counted = {}
    for name, net in nets.items():
        weights = len(flat({k: v.numpy() for k, v in net.state_dict().items()}))
        counted[name] = (weights, *memory(120, 3, weights))
    yield CostTable(
        "Old updates at the server (stale, FedVARP, MIFA), 120 nodes × 3 models",
        (
            *(size("model"), size("weights"), obvious("predicted", "MB"), ours("counted", "MB")),
            ratio("counted / predicted", "counted", "predicted"),
        ),
        tuple(
            {"model": name, "weights": w, "predicted": told / 1e6, "counted": found / 1e6}
            for name, (w, told, found) in counted.items()
        ),
        "predicted: four bytes a weight.",
    )
