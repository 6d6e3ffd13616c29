"""What masks cost: a node's summand, opening a sum, and whole rounds beside plain ones.

Figures are ratios within this one run, and how they grow. Nothing here asserts a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gems_flwr import FedAvg, InProcessGrid, SecureSum, secure_sum_mod
from gems_flwr.secure.fixed_point import Layout, Section, Words
from gems_flwr.secure.node_secrets import NodeSecrets
from gems_flwr.secure.sum_session import SumSession
from simulations.bench.cost_tables import Column, CostTable, limit, obvious, ours, ratio, size

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


def masking_row(nodes: int, neighbours: int | None) -> dict[str, float]:
    """Return milliseconds of masking, of adding as many numbers once, and of opening the sum."""
    session = Session(nodes, 100_000, neighbours)
    peers = len(session.server.present_for(0))
    mask, once = best(lambda: session.mask(0)), best(lambda: session.words + session.words)
    return {
        "nodes": nodes,
        "neighbours": peers,
        "mask": mask * 1e3,
        "addition": once * 1e3,
        "per neighbour": mask / once / (peers + 1),
        "open": best(session.opened()) * 1e3,
    }


def round_row(weights: int) -> dict[str, float]:
    """Return milliseconds and bytes of a plain and of a secure round."""
    plain, secure = round_seconds(weights, None), round_seconds(weights, SecureSum())
    return {
        "weights": weights,
        "plain": plain[0] * 1e3,
        "secure": secure[0] * 1e3,
        "plain up": plain[1],
        "secure up": secure[1],
    }


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure masks and rounds."""
    yield CostTable(
        "Masks on 100,000 numbers of 32 bits",
        (
            *(size("nodes"), size("neighbours"), ours("mask"), limit("addition")),
            ratio("mask / addition", "mask", "addition"),
            *(Column("per neighbour"), Column("open", "ms")),
        ),
        tuple(
            masking_row(*each)
            for each in ((3, None), (10, None), (50, None), (200, 20))[: 2 if quick else 4]
        ),
        "addition: of as many numbers, once. per neighbour: mask / addition, for each "
        "neighbour and the node itself.",
        grows_with="neighbours",
    )
    yield CostTable(
        "A round of FedAvg, five nodes in process that do not train",
        (
            *(size("weights"), obvious("plain"), ours("secure")),
            ratio("secure / plain", "secure", "plain"),
            *(Column("plain up", "bytes"), Column("secure up", "bytes")),
            ratio("bytes", "secure up", "plain up"),
        ),
        tuple(map(round_row, (650, 50_000) if quick else (650, 50_000, 1_000_000))),
        grows_with="weights",
    )
