"""One table of ratios in one run: what this library takes, the obvious way, the physical limit.

A row is one cost at one size. *ours* is this library; *obvious* what one would try first; *limit*
what no way can do without, such as one pass over the data. Times are of one machine and one moment:
the ratios, and how a cost grows with its size (an exponent: 1 doubles with the size), tell more.

Data are synthetic, of MNIST's size where nothing else is said, so that no files are needed. A part
is a function from "quick" to rows.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from rich.console import Console

from gems_flwr import FedAvg, InProcessGrid, RandomFilters, SecureSum, good_enough_mod
from gems_flwr.averaging import draw_assignment, optimal_probabilities
from gems_flwr.compression import encode
from gems_flwr.core.records import (
    records_from_bytes,
    records_to_bytes,
    to_numpy,
    to_record,
)
from gems_flwr.errors import describe_fault
from gems_flwr.secure.fixed_point import Layout, Section
from gems_flwr.secure.session import NodeSecrets, Roster
from gems_flwr.spaces.ball import (
    BallSpace,
    LayerData,
    Radius,
    accuracy,
    find_extent,
    intersect_balls,
)
from gems_flwr.spaces.cone import build_cone
from simulations.command_line import EXIT_FAILED, CommandParser, UsageError, run_command
from simulations.data import Examples
from simulations.experiment.together import Order, train_together
from simulations.experiment.training import TrainOptions, fit
from simulations.models import logistic, mlp
from simulations.report.tables import TextTable, markdown_table, print_table

CLASSES, FEATURES = 10, 784
Work = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One cost at one size, in milliseconds; None where nothing was measured."""

    part: str
    what: str
    size: str
    amount: float
    ours: float
    obvious: float | None = None
    limit: float | None = None


def milliseconds(work: Work | None, repeat: int = 3) -> float | None:
    """Return the processor time of the quickest of some calls; None for no work."""
    if work is None:
        return None
    best = math.inf
    for _ in range(repeat):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best * 1e3


def timed(
    part: str, what: str, size: str, amount: float, *works: Work | None, per: float = 1.0
) -> Row:
    """Return a row of milliseconds, each divided by `per`: ours, the obvious way, the limit.

    The obvious way may be slow, so it is called once.
    """
    costs = [milliseconds(work, 1 if n == 1 else 3) for n, work in enumerate(works)]
    ours, obvious, least = (None if cost is None else cost / per for cost in [*costs, None][:3])
    assert ours is not None
    return Row(part, what, size, amount, ours, obvious, least)


def clouds(samples: int, features: int = FEATURES) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy clouds around random class centres."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(CLASSES, features))
    y = rng.integers(0, CLASSES, samples)
    x = centers[y] + 2 * rng.normal(size=(samples, features))
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


# --- messages ---------------------------------------------------------------------------------


def echo_app(*mods: Any) -> ClientApp:
    """Return an app that adds one to the weights: as little work as a node can do."""
    app = ClientApp(mods=[*mods])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (arrays,) = message.content.array_records.values()
        record = to_record({name: w + np.float32(1) for name, w in to_numpy(arrays).items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    return app


def _play(nodes: int, model: ArrayRecord, rounds: int, secure: SecureSum | None = None) -> None:
    mods = () if secure is None else (good_enough_mod(),)
    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, secure=secure
    )
    strategy.start(InProcessGrid(echo_app(*mods), nodes), model, num_rounds=rounds)


def _there_and_back(record: RecordDict) -> None:
    for _ in range(2):
        (received,) = records_from_bytes(records_to_bytes(record)).values()
        assert isinstance(received, ArrayRecord)
        received.to_numpy_ndarrays()


def messages(quick: bool) -> Iterator[Row]:
    """A message in process and its reply, with FedAvg on top.

    Obvious is once through Flower's bytes in each direction; the limit is the node's own addition.
    """
    for weights, counts in ((650, (10, 100, 1000)), (1_199_882, (10,))):
        numbers = np.zeros(weights, np.float32)
        model = to_record({"w": numbers})
        bytes_ = milliseconds(partial(_there_and_back, RecordDict({"arrays": model})))
        least = milliseconds(partial(np.add, numbers, np.float32(1)))
        for nodes in counts[: 2 if quick else None]:
            ours = milliseconds(partial(_play, nodes, model, 2)) or 0.0
            what, size = f"a message of {weights:,} weights", f"{nodes} nodes"
            yield Row("messages", what, size, nodes, ours / 2 / nodes, bytes_, least)


def packing(quick: bool) -> Iterator[Row]:
    """A model one step away, packed; obvious: zlib of its bytes; limit: a copy."""
    rng = np.random.default_rng(0)
    for side in (100, 300) if quick else (100, 300, 1000):
        base = rng.normal(scale=0.05, size=(side, side)).astype(np.float32)
        model = base + rng.normal(scale=0.001, size=base.shape).astype(np.float32)
        ours = partial(encode, {"w": model}, {"w": base}, "int8")
        works = (ours, partial(zlib.compress, model.tobytes()), model.copy)
        yield timed("packing", "a model in int8", f"{side**2:,} weights", side**2, *works)


# --- spaces -----------------------------------------------------------------------------------


def spaces(quick: bool) -> Iterator[Row]:
    """Radii of linear layers, cones, and intersections of balls.

    Obvious are the papers' bisection and full moments first; limits are the bare product of data
    and directions, and the mean of all centres.
    """
    directions = 100
    for samples in (250, 500) if quick else (500, 1000, 2000):
        x, y = clouds(samples)
        means = torch.stack([x[y == c].mean(dim=0) for c in range(CLASSES)])
        data = LayerData(means, -(means**2).sum(dim=1) / 2, x, y)
        radius = partial(find_extent, data, 0.7, "sampled", directions=directions, seed=3)
        limit = partial(torch.mm, x, torch.randn(FEATURES, directions * CLASSES))
        works: tuple[Work, ...] = (radius, partial(bisected, data, 0.7, directions), limit)
        yield timed("spaces", "radius of a ball", f"{samples} samples", samples, *works)
    for features in (500, 1000) if quick else (500, 1000, 2000):
        x, y = clouds(2000, features)
        cone = partial(build_cone, x, y, CLASSES, min_count=21)
        limit = partial(torch.mm, x, torch.randn(features, 20))
        works = (partial(cone, rank=20), partial(cone, rank="full"), limit)
        yield timed("spaces", "cone of rank 20", f"{features} features", features, *works)
    rng = np.random.default_rng(0)
    for nodes in (10, 100) if quick else (10, 100, 1000):
        centers = rng.normal(size=(nodes, 7850)).astype(np.float32)
        # Random centres are about sqrt(d) from their mean: these balls meet.
        balls = [BallSpace(c, Radius(1.2 * float(np.sqrt(7850)), "sampled")) for c in centers]
        meet, mean = partial(intersect_balls, balls), partial(centers.mean, axis=0)
        yield timed("spaces", "intersection of balls", f"{nodes} nodes", nodes, meet, None, mean)


def lifts(quick: bool) -> Iterator[Row]:
    """Random filters; obvious: a bare convolution of all images at once; limit: of a few."""
    lift = RandomFilters((1, 28, 28))
    for count in (500, 1000) if quick else (1000, 2000, 4000):
        images = torch.rand(count, 1, 28, 28)
        bare = partial(torch.nn.functional.conv2d, weight=lift.weight, padding=2)
        few = partial(lambda work, parts: any(work(x) is None for x in parts), bare)
        works = (
            partial(lift, images),
            partial(bare, images),
            partial(few, torch.split(images, 20)),
        )
        yield timed("lifts", "random filters", f"{count:,} images", count, *works)


def bisected(data: LayerData, epsilon: float, samples: int) -> float:
    """Return the radius as Algorithm 2 of GEMS 2019 finds it: new random models at every step."""
    x, y = data.augmented(slice(None))
    center, rng = torch.from_numpy(data.center), torch.Generator().manual_seed(3)
    low, high = 0.0, 4000.0
    while high - low > 0.01:
        radius = (low + high) / 2
        away = torch.randn(samples, len(center), generator=rng)
        models = center + radius * away / away.norm(dim=1, keepdim=True)
        good = all(accuracy(x @ model.T, y) >= epsilon for model in data.matrix(models))
        low, high = (radius, high) if good else (low, radius)
    return low


# --- sums -------------------------------------------------------------------------------------


def _session(nodes: int, numbers: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what masks one node's numbers, and what adds as many once."""
    begun = [NodeSecrets.begin("bench", 1) for _ in range(nodes)]
    roster = Roster("bench", 2 / 3, None, {i: secrets.own for i, secrets in enumerate(begun)})
    node = begun[0].join(roster)[0].entered(0, range(nodes))
    layout = Layout([Section("numbers", (numbers,), 1.0)], nodes)
    words = layout.encode({"numbers": np.full(numbers, 0.5)})
    return lambda: node.masked(layout, words), lambda: words + words


def sums(quick: bool) -> Iterator[Row]:
    """Masks of a node, limit: one addition; a secure round, limit: a plain one."""
    for nodes in (3, 10) if quick else (3, 10, 50):
        mask, once = _session(nodes, 100_000)
        yield timed("sums", "masks on 100,000 numbers", f"{nodes} nodes", nodes, mask, None, once)
    for weights in (5_000, 50_000) if quick else (5_000, 50_000, 500_000):
        model = to_record({"w": np.zeros(weights, np.float32)})
        works = (partial(_play, 5, model, 1, SecureSum()), None, partial(_play, 5, model, 1))
        yield timed("sums", "a secure round, 5 nodes", f"{weights:,} weights", weights, *works)


# --- sampling, training --------------------------------------------------------------


def sampling(quick: bool) -> Iterator[Row]:
    """Optimal probabilities of ten models; limit: one draw from them."""
    for clients in (1_000, 10_000) if quick else (1_000, 10_000, 100_000):
        rng = np.random.default_rng(0)
        importance = np.exp(rng.normal(size=(clients, 10)))
        capacity = rng.integers(1, 4, size=clients)
        choose = partial(optimal_probabilities, importance, clients / 10, capacity)
        what, draw = "probabilities of 10 models", partial(draw_assignment, choose(), rng)
        yield timed("sampling", what, f"{clients:,} clients", clients, choose, None, draw)


def training(quick: bool) -> Iterator[Row]:
    """Local training of many small nodes at once, per node; obvious: one after the other."""
    shape, options = (1, 8, 8), TrainOptions(optimizer="adam", batch_size=10, epochs=2)
    for name, build in (("logistic model", logistic), ("MLP", mlp)):
        for nodes in (10, 50) if quick else (10, 100, 500):
            rng = np.random.default_rng(0)
            shares = [
                Examples(
                    rng.integers(0, 256, (60, *shape)).astype(np.uint8), rng.integers(0, 10, 60)
                )
                for _ in range(nodes)
            ]

            def together(build: Any = build, shares: Sequence[Examples] = shares) -> None:
                models = (build(input_shape=shape, classes=10) for _ in shares)
                pairs = enumerate(zip(models, shares, strict=True))
                train_together([Order(m, [s], n, options=options) for n, (m, s) in pairs])

            def alone(build: Any = build, shares: Sequence[Examples] = shares) -> None:
                for node, share in enumerate(shares):
                    model = build(input_shape=shape, classes=10)
                    fit(model, share, scale=1.0, options=options, seed=node)

            what, size = f"{name}, 60 examples, 2 epochs", f"{nodes} nodes"
            yield timed("training", what, size, nodes, together, alone, per=nodes)


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    each.__name__: each for each in (messages, packing, spaces, lifts, sums, sampling, training)
}


# --- the table ---------------------------------------------------------------------------------

HEADINGS = (
    *("part", "what", "size", "ours", "obvious", "limit"),
    *("obvious / ours", "ours / limit", "growth"),
)


def growth(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the exponent with which a cost grew from the row before, of the same kind."""
    alike = [each for each in rows if (each.part, each.what) == (row.part, row.what)]
    place = alike.index(row)
    if not place or row.amount == alike[place - 1].amount or not alike[place - 1].ours:
        return None
    before = alike[place - 1]
    return math.log(row.ours / before.ours) / math.log(row.amount / before.amount)


def table(rows: Sequence[Row]) -> TextTable:
    """Return the rows with their ratios."""

    def number(value: float | None, digits: str = ".3g") -> str:
        if value is None:
            return "–"
        return f"{value:,.0f}" if value >= 1000 else f"{value:{digits}}"

    lines = []
    for row in rows:
        quicker = row.obvious / row.ours if row.obvious is not None and row.ours else None
        above = row.ours / row.limit if row.limit else None
        costs = (number(row.ours), number(row.obvious), number(row.limit))
        ratios = (number(quicker), number(above), number(growth(row, rows), ".2f"))
        lines.append((row.part, row.what, row.size, *costs, *ratios))
    return TextTable.of(HEADINGS, lines, names=(0, 1, 2), group_by=0)


def machine() -> str:
    """Return processor, cores, load and versions; nothing that names a machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "flwr"))
    return (
        f"{platform.machine()}, {cores} cores{load}; Python {platform.python_version()}, {versions}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write it as Markdown; return the exit status."""
    parser = CommandParser(prog="python -m simulations.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="which parts; all by default")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, less than a minute")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build", "bench.md"),
        metavar="FILE",
        help="where the table goes as Markdown; build/bench.md",
    )
    asked = parser.parse_args(arguments)
    return run_command(lambda: bench(asked.parts, asked.quick, asked.output, Console()))


def bench(parts: Sequence[str], quick: bool, output: Path, console: Console) -> int:
    """Measure some parts, all by default; return the exit status."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"there is no '{unknown[0]}'; there are {', '.join(PARTS)}")
    # After the import: the first one of Flower sets a level of its own.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows: list[Row] = []
    failed: list[str] = []
    for part in parts or PARTS:
        try:
            with console.status(part):
                rows += PARTS[part](quick)
        except Exception as error:  # what the others have taken minutes for is not lost
            failed.append(f"{part} failed: {describe_fault(error)}")
    print_table(table(rows), console, title="What it costs, in ms", caption=machine())
    for line in failed:
        console.print(line, style="red", markup=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    about = [machine(), *failed]
    output.write_text(
        "\n".join(["# What it costs, in ms", "", *markdown_table(table(rows)), "", *about])
    )
    console.print(str(output), highlight=False)
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
