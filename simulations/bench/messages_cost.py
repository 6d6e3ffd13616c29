"""What a message costs.

Each backend sends the same messages to the same clients as a plain Python loop that just calls
the handler with the weights; figures are ratios within this one run, and how they grow with the
number of nodes. Nothing here asserts a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from gems_flwr.runtime.flower_internals import records_from_bytes, records_to_bytes
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.wire.records import to_numpy, to_record
from simulations.backends.launch import run_on_ray
from simulations.bench.cost_tables import Column, CostTable, limit, obvious, ours, ratio, size
from simulations.config import BackendConfig

# Weights, messages to time in all, numbers of nodes.
SIZES = {
    "650 weights (logistic model on digits)": (650, 2000, (10, 100, 1000)),
    "1,199,882 weights (the CNN)": (1_199_882, 200, (10, 100)),
}
COLUMNS = (
    size("nodes"),
    limit("loop"),
    limit("bytes"),
    ours("in-process"),
    Column("cpu", "ms"),
    ratio("cpu / bytes", "cpu", "bytes"),
    obvious("ray"),
    ratio("ray ×", "ray", "in-process"),
    Column("start", "s"),
    Column("ray start", "s"),
)
ABOUT = (
    "A message to a node and its reply, with FedAvg on top. loop: numpy alone. bytes: once "
    "through Flower's serialisation in each direction, processor time. cpu: in-process, processor "
    "time. ray ×: of in-process."
)


@dataclass(frozen=True)
class Cost:
    """Seconds to the first reply, and per message after that; of these, at the processor."""

    startup: float
    per_message: float
    at_processor: float = 0.0


def echo_app() -> ClientApp:
    """Return an app that adds one to the weights: as little work as a node can do."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (arrays,) = message.content.array_records.values()
        weights = to_numpy(arrays)["w"] + np.float32(1)
        content = RecordDict(
            {
                "arrays": to_record({"w": weights}),
                "metrics": MetricRecord({"num-examples": 1}),
            }
        )
        return Message(content, reply_to=message)

    return app


def plain_loop(weights: int, nodes: int, rounds: int) -> Cost:
    """Average the same updates with nothing but numpy."""
    model = np.zeros(weights, np.float32)
    started = time.perf_counter()
    for _ in range(rounds):
        total = np.zeros_like(model)
        for _ in range(nodes):
            total += (model + np.float32(1)) * (1 / nodes)
        model = total
    return Cost(0.0, (time.perf_counter() - started) / (rounds * nodes))


def over(grid: Grid, weights: int, nodes: int, rounds: int, entered: float) -> Cost:
    """Run rounds of FedAvg on a grid; the first round counts as start-up."""
    arrays = to_record({"w": np.zeros(weights, np.float32)})
    # Training alone: a message and its reply carry the model both ways.
    train = partial(FedAvg, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    first = train(wait_for_nodes=nodes)
    first.start(grid, arrays, num_rounds=1)
    startup = time.perf_counter() - entered
    started, worked = time.perf_counter(), time.process_time()
    train().start(grid, arrays, num_rounds=rounds)
    spent = (time.perf_counter() - started, time.process_time() - worked)
    return Cost(startup, *(seconds / (rounds * nodes) for seconds in spent))


def in_process(weights: int, nodes: int, rounds: int) -> Cost:
    """Measure the embedded backend."""
    entered = time.perf_counter()
    return over(InProcessGrid(echo_app(), nodes), weights, nodes, rounds, entered)


def on_ray(weights: int, nodes: int, rounds: int) -> Cost:
    """Measure Flower's simulation engine."""
    entered = time.perf_counter()

    def server(grid: Grid) -> dict[str, Any]:
        return {"cost": over(grid, weights, nodes, rounds, entered)}

    cost = run_on_ray(echo_app(), nodes, BackendConfig(kind="ray"), server)["cost"]
    assert isinstance(cost, Cost)
    return cost


def serialisation(weights: int) -> float:
    """Return processor seconds of what no exchange can do without: through bytes and back."""
    record = RecordDict({"arrays": to_record({"w": np.zeros(weights, np.float32)})})
    spent, repetitions = [], 10
    for _ in range(5):
        started = time.process_time()
        _there_and_back(record, repetitions)
        spent.append((time.process_time() - started) / repetitions)
    # The others were disturbed.
    return min(spent)


def _there_and_back(record: RecordDict, repetitions: int) -> None:
    for _ in range(repetitions):
        for _ in ("down", "up"):
            data = records_to_bytes(record)
            (received,) = records_from_bytes(data).values()
            assert isinstance(received, ArrayRecord)
            received.to_numpy_ndarrays()


def row(weights: int, nodes: int, messages: int, with_ray: bool) -> dict[str, float | None]:
    """Return costs per message for a number of nodes, in milliseconds."""
    rounds = max(2, messages // nodes)
    inside = in_process(weights, nodes, rounds)
    ray = on_ray(weights, nodes, max(2, rounds // 4)) if with_ray else None
    return {
        "nodes": nodes,
        "loop": plain_loop(weights, nodes, rounds).per_message * 1e3,
        "bytes": serialisation(weights) * 1e3,
        "in-process": inside.per_message * 1e3,
        "cpu": inside.at_processor * 1e3,
        "ray": ray.per_message * 1e3 if ray else None,
        "start": inside.startup,
        "ray start": ray.startup if ray else None,
    }


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure messages of two sizes."""
    for name, (weights, messages, counts) in SIZES.items():
        rows = [
            row(weights, nodes, messages // 4 if quick else messages, not quick or nodes == 10)
            for nodes in (counts[:2] if quick else counts)
        ]
        yield CostTable(name, COLUMNS, tuple(rows), ABOUT, grows_with="nodes")
