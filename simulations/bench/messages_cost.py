"""What a message costs.

Each backend sends the same messages to the same clients as a plain Python loop that just calls
the handler with the weights; figures are ratios within this one run, and how they grow with the
number of nodes. Nothing here asserts a time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from rich.console import Console
from rich.table import Table

from gems_flwr.runtime.flower_internals import records_from_bytes, records_to_bytes
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.wire.records import to_numpy, to_record
from simulations.backends.launch import run_on_ray
from simulations.config import BackendConfig

# Weights, messages to time in all, numbers of nodes.
SIZES = {
    "650 weights (logistic model on digits)": (650, 2000, (10, 100, 1000)),
    "1,199,882 weights (the CNN)": (1_199_882, 200, (10, 100)),
}
HEADINGS = ("nodes", "plain loop", "bytes", "in-process", "ratio", "ray", "ratio", "start-up s")


@dataclass(frozen=True)
class Cost:
    """Seconds to the first reply, and seconds per message after that."""

    startup: float
    per_message: float


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
    started = time.perf_counter()
    train().start(grid, arrays, num_rounds=rounds)
    return Cost(startup, (time.perf_counter() - started) / (rounds * nodes))


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
    """Return the seconds for what no exchange can do without: there and back through bytes."""
    record = RecordDict({"arrays": to_record({"w": np.zeros(weights, np.float32)})})
    repetitions = 50
    started = time.perf_counter()
    for _ in range(repetitions):
        for _ in ("down", "up"):
            data = records_to_bytes(record)
            received = records_from_bytes(data)
            to_numpy(next(iter(received.array_records.values())))
    return (time.perf_counter() - started) / repetitions


def measure(weights: int, nodes: int, messages: int) -> tuple[str, ...]:
    """Return one row of the table: costs per message for a number of nodes."""
    rounds = max(2, messages // nodes)
    plain = plain_loop(weights, nodes, rounds)
    inside = in_process(weights, nodes, rounds)
    ray = on_ray(weights, nodes, max(2, rounds // 4))
    limit = serialisation(weights)
    return (
        str(nodes),
        f"{plain.per_message * 1e3:.3f}",
        f"{limit * 1e3:.3f}",
        f"{inside.per_message * 1e3:.3f}",
        f"{inside.per_message / limit:.1f}",
        f"{ray.per_message * 1e3:.3f}",
        f"{ray.per_message / inside.per_message:.1f}",
        f"{inside.startup:.2f} / {ray.startup:.1f}",
    )


def report(console: Console, quick: bool) -> None:
    """Print the tables."""
    console.print(
        "[bold]What a message to a node and its reply cost[/bold], in milliseconds, with FedAvg on "
        "top.\nplain loop: numpy alone. bytes: once through serialisation in each direction, which "
        "no backend can do without.\nratio: in-process to bytes, and ray to in-process."
    )
    for name, (weights, messages, counts) in SIZES.items():
        table = Table(title=name, title_justify="left")
        for column in HEADINGS:
            table.add_column(column, justify="right")
        with console.status(name):
            for nodes in counts[:1] if quick else counts:
                table.add_row(*measure(weights, nodes, messages))
        console.print(table)
