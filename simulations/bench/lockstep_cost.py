"""What it costs to let nodes train together, against one by one and Flower's engine.

The same nodes train the same models from the same weights and seeds: one after the other, as
``backend=inprocess`` does, and in lockstep; then whole rounds with messages, on three backends.
Figures are milliseconds of processor time per node, and ratios within this one run. Nothing here
asserts a time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from torch import nn

from simulations.backends.launch import run_on_backend
from simulations.bench.cost_tables import (
    Column,
    CostTable,
    Value,
    obvious,
    ours,
    ratio,
    size,
)
from simulations.config import compose_config
from simulations.data.examples import Examples
from simulations.experiment.batched_training import Trainee, fit_together
from simulations.experiment.execution import run_server
from simulations.experiment.experiment import experiment_of
from simulations.experiment.model_copies import copy_model
from simulations.experiment.training import TrainOptions, fit
from simulations.models import lenet, logistic, mlp

Build = Callable[[], nn.Module]

DIGITS, MNIST = (1, 8, 8), (1, 28, 28)
MODELS: dict[str, tuple[tuple[int, ...], Build]] = {
    "logistic, 8×8": (DIGITS, lambda: logistic(input_shape=DIGITS, classes=10)),
    "logistic, 28×28": (MNIST, lambda: logistic(input_shape=MNIST, classes=10)),
    "MLP of 50, dropout, 8×8": (DIGITS, lambda: mlp(input_shape=DIGITS, classes=10)),
    "MLP of 50, dropout, 28×28": (MNIST, lambda: mlp(input_shape=MNIST, classes=10)),
    "LeNet, 28×28": (MNIST, lambda: lenet(input_shape=MNIST, classes=10)),
}
NODES = (10, 100, 1000)
EXAMPLES = 60
OPTIONS = TrainOptions(optimizer="adam", batch_size=10, epochs=2)
# Trained one by one, at most: the others would take as long.
_SOME = 20

RUNS = {
    "FedAvg, logistic": ("strategy=fedavg", "model=logistic", "rounds=2"),
    "FedAvg, MLP": ("strategy=fedavg", "model=mlp", "rounds=2"),
    "GEMS with balls, logistic": (
        "strategy=gems",
        "strategy/space=ball",
        "strategy.space.directions=20",
        "strategy.space.epsilon=0.01",
        "model=logistic",
        "rounds=1",
    ),
    "GEMS layer by layer, MLP": ("strategy=gems_layerwise", "model=mlp"),
}


@dataclass(frozen=True)
class Cost:
    """Seconds of training per node, one by one and together."""

    alone: float
    together: float

    def milliseconds(self) -> dict[str, Value]:
        """Return both as a row has them."""
        return {"one by one": self.alone * 1e3, "together": self.together * 1e3}


def training(shape: Sequence[int], build: Build, nodes: int, repetitions: int = 2) -> Cost:
    """Measure local training alone, the quickest of some repetitions."""
    draws = np.random.default_rng(0)
    model = build()
    # Nodes of different sizes, as they are.
    sizes = draws.integers(EXAMPLES // 2, EXAMPLES * 3 // 2, nodes)
    shares = [
        Examples(
            draws.integers(0, 256, (size, *shape)).astype(np.uint8), draws.integers(0, 10, size)
        )
        for size in sizes
    ]
    shared: dict[str, Any] = {"scale": 1 / 255, "options": OPTIONS}

    def trainees() -> list[Trainee]:
        return [Trainee(copy_model(model), share, node) for node, share in enumerate(shares)]

    some = [each for each in trainees() if each.seed < _SOME]
    steps = sum(-(-len(each.examples) // OPTIONS.batch_size) for each in some)
    all_steps = sum(-(-int(size) // OPTIONS.batch_size) for size in sizes)
    alone, together = [], []
    for _ in range(repetitions):
        started = time.process_time()
        for each in some:
            fit(copy_model(each.model), each.examples, seed=each.seed, **shared)
        # As many steps per node as all have, not as these few happen to have.
        alone.append((time.process_time() - started) / steps * all_steps / nodes)
        chosen = trainees()
        started = time.process_time()
        fit_together(chosen, **shared)
        together.append((time.process_time() - started) / nodes)
    return Cost(min(alone), min(together))


@dataclass(frozen=True)
class RunCost:
    """Seconds per node and round: of this process's processor time, and of the clock."""

    working: float
    clock: float


def whole_run(overrides: Sequence[str], nodes: int, backend: str) -> RunCost:
    """Measure a run from the first message to the last file."""
    config = compose_config(
        [
            *overrides,
            f"nodes={nodes}",
            f"backend={backend}",
            "partition=iid",
            "dataset=digits",
            "train.epochs=10",
            "train.batch_size=10",
            "progress=false",
        ]
    )
    experiment = experiment_of(config.to_json())
    _ = experiment.shares

    def server(grid: Grid) -> dict[str, Any]:
        working, clock = time.process_time(), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run_server(experiment, grid, Path(folder))
        share = 1 / nodes / config.rounds
        working, clock = time.process_time() - working, time.perf_counter() - clock
        return {"cost": RunCost(working * share, clock * share)}

    cost = run_on_backend(config, server)["cost"]
    assert isinstance(cost, RunCost)
    return cost


TRAINING = (
    size("model"),
    size("nodes"),
    obvious("one by one"),
    ours("together"),
    ratio("×", "one by one", "together"),
)
RUNNING = (
    size("run"),
    size("nodes"),
    obvious("in-process"),
    ours("lockstep"),
    ratio("×", "in-process", "lockstep"),
    Column("in-process by the clock", "ms"),
    Column("ray by the clock", "ms"),
)


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure local training, then whole runs."""
    training(*MODELS["logistic, 8×8"], nodes=2)  # the first call of all loads libraries
    rows = []
    for name, (shape, build) in MODELS.items():
        for nodes in NODES[:2] if quick or name.startswith("LeNet") else NODES:
            cost = training(shape, build, nodes, 1 if quick else 2)
            rows.append({"model": name, "nodes": nodes, **cost.milliseconds()})
    yield CostTable(
        "Local training of many nodes",
        TRAINING,
        tuple(rows),
        f"Processor time per node: {OPTIONS.epochs} epochs of Adam over {EXAMPLES} examples on "
        f"average, in batches of {OPTIONS.batch_size}; together is backend=lockstep.",
        grows_with="nodes",
        group="model",
    )
    yield CostTable(
        "Whole runs on the digits",
        RUNNING,
        tuple(_run_row(name, nodes, quick) for name in RUNS for nodes in (10, 100)),
        "Per node and round, messages, radii and evaluation included; processor time, and beside "
        "Ray by the clock, its start-up left out.",
        grows_with="nodes",
        group="run",
    )


def _run_row(name: str, nodes: int, quick: bool) -> dict[str, Value]:
    alone, together = (whole_run(RUNS[name], nodes, each) for each in ("inprocess", "lockstep"))
    # Slow to start, so small cases of averaging alone.
    with_ray = nodes == 10 and name == "FedAvg, logistic" and not quick
    ray = whole_run(RUNS[name], nodes, "ray").clock * 1e3 if with_ray else None
    return {
        "run": name,
        "nodes": nodes,
        "in-process": alone.working * 1e3,
        "lockstep": together.working * 1e3,
        "in-process by the clock": alone.clock * 1e3,
        "ray by the clock": ray,
    }
