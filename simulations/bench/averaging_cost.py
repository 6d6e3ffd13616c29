"""What dynamic averaging costs in time: quiet rounds, growth with the nodes, a balancing step.

Figures are ratios within this one run, and how they grow. Nothing here asserts a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F

from gems_flwr.averaging.balancing import Balancing, BalancingRule, LocalReport
from gems_flwr.averaging.synchronisation import Coordinator
from gems_flwr.client.dynamic_averaging_mod import dynamic_averaging_mod
from gems_flwr.client.fault_reply_mod import node_name
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.strategies.dynamic_averaging import DynamicAveraging
from gems_flwr.wire.model_replies import pack_model_reply
from simulations.bench.cost_tables import Column, CostTable, limit, obvious, ours, ratio, size
from simulations.models import cnn, mlp

# Never violated: what is timed are rounds in which nothing happens.
_QUIET = 1e12
_BATCHES = (1, 10, 50)


def quiet_round(
    build: Callable[[], nn.Module], nodes: int, rounds: int, batches: int
) -> dict[str, float]:
    """Return milliseconds of bare training, the same in a Flower handler, under the protocol."""
    model, inputs = build(), torch.rand(10, 1, 28, 28)
    targets = torch.arange(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        for _ in range(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def handle(record: ArrayRecord) -> ArrayRecord:
        """Do what any handler does: arrays into the model, training, arrays out of it."""
        model.load_state_dict(record.to_torch_state_dict())
        step()
        return ArrayRecord(model.state_dict())

    app = ClientApp(mods=[dynamic_averaging_mod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (record,) = message.content.array_records.values()
        arrays = handle(record)
        content = pack_model_reply(arrays, {}, num_examples=10, name=node_name(context))
        return Message(content, reply_to=message)

    arrays = handle(ArrayRecord(model.state_dict()))
    bare = _seconds(step, rounds * nodes)
    handler = _seconds(lambda: handle(arrays), rounds * nodes)
    grid = MeteredGrid(InProcessGrid(app, nodes))
    strategy = DynamicAveraging(delta=_QUIET, final_sync=False, min_nodes=1)
    # The nodes get their models in the first round; those after it are quiet.
    history = strategy.start(grid, arrays, num_rounds=rounds + 1).history
    spent = sum(record.seconds for record in history[2:]) / (rounds * nodes)
    quiet = grid.by_round[rounds + 1]
    return {
        "nodes": nodes,
        "batches": batches,
        "bare": bare * 1e3,
        "handler": handler * 1e3,
        "protocol": spent * 1e3,
        "KB": (quiet.bytes_up + quiet.bytes_down) / 1e3,
    }


def _seconds(work: Callable[[], object], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started) / times


def balancing_step(nodes: int, weights: int) -> float:
    """Return the seconds in which a coordinator averages all models and moves the reference."""
    rng = np.random.default_rng(0)
    models = {str(n): {"w": rng.normal(size=weights).astype(np.float32)} for n in range(nodes)}
    coordinator = Coordinator({"w": np.zeros(weights, np.float32)})
    reports = {name: LocalReport(float(weights)) for name in models}
    rule = BalancingRule(delta=1e-9)
    started = time.perf_counter()
    balancing = Balancing.begin(rule, coordinator, reports, models)
    balancing.query(rng)
    balancing.finish()
    return time.perf_counter() - started


def balancing_row(nodes: int, weights: int) -> dict[str, float]:
    """Return milliseconds of a balancing step and of the bare mean of all models."""
    models = np.ones((nodes, weights), np.float32)
    mean = _seconds(lambda: models.mean(axis=0), 3)
    return {"nodes": nodes, "step": balancing_step(nodes, weights) * 1e3, "mean": mean * 1e3}


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure quiet rounds by nodes and by batches, and balancing."""
    builds: dict[str, Callable[[], nn.Module]] = {
        "784-64-10": lambda: mlp(input_shape=(1, 28, 28), classes=10, hidden=(64,), dropout=0.0),
        "the CNN, 1,199,882 weights": lambda: cnn(input_shape=(1, 28, 28), classes=10),
    }
    columns = (
        *(size("nodes"), size("batches"), limit("bare"), obvious("handler"), ours("protocol")),
        ratio("of bare", "protocol", "bare"),
        ratio("of handler", "protocol", "handler"),
        Column("KB"),
    )
    about = (
        "A quiet round, per node. bare: training alone. handler: a Flower handler around it, "
        "arrays in and out. protocol: on the in-process grid. KB: of all nodes."
    )
    for name, build in builds.items():
        counts = (10, 100) if quick else (10, 100, 1000)
        if name == "784-64-10":
            rows = tuple(quiet_round(build, nodes, 2, 1) for nodes in counts)
            yield CostTable(f"Dynamic averaging, {name}", columns, rows, about, grows_with="nodes")
        batches = (1, *(_BATCHES[1:2] if quick else _BATCHES[1:]))
        rows = tuple(quiet_round(build, 10, 2, count) for count in batches)
        title = f"Dynamic averaging, {name}, by batches"
        yield CostTable(title, columns, rows, about, grows_with="batches")
    yield CostTable(
        "Balancing in which all models come in, 50,890 weights",
        (size("nodes"), ours("step"), limit("mean"), ratio("step / mean", "step", "mean")),
        tuple(balancing_row(n, 50_890) for n in ((10, 100) if quick else (10, 100, 1000))),
        "mean: of all models, which lie in one array already.",
        grows_with="nodes",
    )
