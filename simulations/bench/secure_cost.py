"""What masks cost: a node's summand, opening a sum, and whole rounds beside plain ones.

Figures are ratios within this one run, and how they grow. Nothing here asserts a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from rich.console import Console
from rich.table import Table

from gems_flwr import FedAvg, InProcessGrid, SecureSum, secure_sum_mod
from gems_flwr.secure.fixed_point import Layout, Section, Words
from gems_flwr.secure.node_secrets import NodeSecrets
from gems_flwr.secure.sum_session import SumSession

_REPEATS = 3


def best(call: Callable[[], object]) -> float:
    """Return the least seconds of some calls."""
    seconds = math.inf
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        seconds = min(seconds, time.perf_counter() - started)
    return seconds


class Session:
    """A session of nodes that have exchanged their shares, without Flower."""

    def __init__(self, nodes: int, numbers: int, neighbours: int | None) -> None:
        begun = [NodeSecrets.begin("bench", 1) for _ in range(nodes)]
        keys = {i: secrets.own for i, secrets in enumerate(begun)}
        server = SumSession.begin("bench", keys, 2 / 3, neighbours)
        shared = {i: s.share(i, server.peers_of(i), 2 / 3) for i, s in enumerate(begun)}
        self.server = server.with_letters({i: letters for i, (_, letters) in shared.items()})
        self.nodes = {i: s.receive(self.server.letters_for(i)) for i, (s, _) in shared.items()}
        self.layout = Layout([Section("numbers", (numbers,), 1.0)], nodes)
        self.words = self.layout.encode({"numbers": np.full(numbers, 0.5)})

    def mask(self, node: int) -> tuple[NodeSecrets, Words]:
        """Return what a node keeps and sends."""
        present = self.server.present_for(node)
        return self.nodes[node].masked(0, self.layout, self.words, present)

    def opened(self) -> Callable[[], Words]:
        """Return what opens the sum of all nodes."""
        masked = {node: self.mask(node) for node in self.nodes}
        words = {node: sent for node, (_, sent) in masked.items()}
        there = sorted(masked)
        shares = {node: kept.reveal(0, there)[1] for node, (kept, _) in masked.items()}
        return lambda: self.server.opened(0, self.layout, words, shares)


def _app() -> ClientApp:
    app = ClientApp(mods=[secure_sum_mod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    return app


def round_seconds(weights: int, secure: SecureSum | None) -> tuple[float, int]:
    """Return seconds and bytes up of a round of FedAvg over five nodes that do nothing."""
    model = ArrayRecord([np.zeros(weights, np.float32)])
    up: list[int] = []

    def play() -> None:
        strategy = FedAvg(fraction_evaluate=0.0, secure=secure)
        result = strategy.start(InProcessGrid(_app(), 5), model, num_rounds=1)
        up.append(result.traffic.bytes_up)

    return best(play), up[-1]


def report(console: Console, quick: bool) -> None:
    """Print the tables."""
    # Importing Flower sets the level anew.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    console.print(
        "\n[bold]What masks cost[/bold]: 100,000 numbers of 32 bits, best of 3. Passes: seconds of "
        "masking over those of adding as many numbers once."
    )
    table = Table()
    for heading in ("nodes", "neighbours", "mask ms", "passes", "per neighbour", "open ms"):
        table.add_column(heading, justify="right")
    for nodes, neighbours in ((3, None), (10, None), (50, None), (200, 20))[: 2 if quick else 4]:
        session = Session(nodes, 100_000, neighbours)
        peers = len(session.server.present_for(0))
        mask, once = best(lambda: session.mask(0)), best(lambda: session.words + session.words)  # noqa: B023
        table.add_row(
            str(nodes),
            str(peers),
            f"{mask * 1e3:.1f}",
            f"{mask / once:.0f}",
            f"{mask / once / (peers + 1):.1f}",
            f"{best(session.opened()) * 1e3:.0f}",
        )
    console.print(table)
    console.print("\nA round of FedAvg, five nodes in process that do not train:")
    table = Table()
    for heading in ("weights", "plain ms", "secure ms", "ratio", "bytes up, ratio"):
        table.add_column(heading, justify="right")
    for weights in (650, 50_000) if quick else (650, 50_000, 1_000_000):
        plain, secure = round_seconds(weights, None), round_seconds(weights, SecureSum())
        table.add_row(
            f"{weights:,}",
            f"{plain[0] * 1e3:.0f}",
            f"{secure[0] * 1e3:.0f}",
            f"{secure[0] / plain[0]:.1f}",
            f"{secure[1] / plain[1]:.2f}",
        )
    console.print(table)
