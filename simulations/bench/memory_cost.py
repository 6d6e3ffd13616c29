"""What the server's memory takes on top of the replies, in a process of its own.

The most memory that a process ever had is told by the system, for the whole of it: Python's own
tools do not see torch's. So a fresh process makes the replies of all nodes, notes what it has,
plays the round, and notes the most it had.

    python -m simulations.bench.memory_cost round 1000 784 20      # what such a process prints
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from gems_flwr.runtime.flower_internals import number_message
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import LowRankCovariance, quantize
from gems_flwr.spaces.output_layer import find_output_layer
from gems_flwr.strategies.gems import Gems
from gems_flwr.wire.records import payload_bytes, to_record
from gems_flwr.wire.space_replies import pack_space_reply, unpack_space_reply
from gems_flwr.wire.space_requests import Cone
from simulations.bench.cost_tables import Column, CostTable, limit, obvious, ours, ratio, size
from simulations.bench.plain_cones import solve_plainly

CLASSES = 10
Way = Literal["round", "plain"]


@dataclass(frozen=True)
class Cost:
    """What a round costs the server.

    Parameters
    ----------
    received : int
        Bytes of the replies.
    on_top : int
        The most memory while it worked minus that before, which held the replies, in bytes.
    seconds : float
        How long it worked.
    """

    received: int
    on_top: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Memory on top over bytes received."""
        return self.on_top / self.received


def random_cone(node: int, features: int, rank: int) -> ClassMomentCone:
    """Return what a node with two classes might send; its samples do not exist."""
    rng = np.random.default_rng(node)
    labels = np.array([node % CLASSES, (node + 1) % CLASSES])
    centers = np.random.default_rng(2**32).normal(size=(CLASSES, features))
    means = centers[labels] + 0.3 * rng.normal(size=(2, features))
    # The first direction of ten times the variance of the last.
    factors = rng.normal(size=(2, features, rank)) * np.geomspace(2, 0.6, rank)
    deviations = rng.uniform(1, 2, size=(2, features))
    covariance = LowRankCovariance(quantize(factors, 1), quantize(deviations, 1, round_up=True))
    counts = rng.integers(100, 200, size=2)
    return ClassMomentCone(CLASSES, labels, counts, quantize(means, 1), covariance)


class AnsweredGrid(InProcessGrid):
    """A grid of nodes whose replies are there already, so that only the server works.

    Like a network, it gives a reply away and keeps nothing of it.

    Parameters
    ----------
    replies : list of RecordDict
        What each node answers, once, whatever it is asked.
    """

    def __init__(self, replies: list[RecordDict]) -> None:
        super().__init__(ClientApp(), len(replies))
        self._replies = replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages without copying the model in them for every node."""
        for message in messages:
            self._pending[number_message(message)] = message
        return list(self._pending)

    def _deliver(self, message: Message, timeout: float | None) -> Message:
        return Message(self._replies.pop(), reply_to=message)


def replies_of(nodes: int, features: int, rank: int) -> list[RecordDict]:
    """Return the replies of all nodes, as they come in."""
    return [
        pack_space_reply(random_cone(node, features, rank), name=str(node)) for node in range(nodes)
    ]


def model(features: int) -> dict[str, NDArray]:
    """Return a linear model."""
    return {
        "weight": np.zeros((CLASSES, features), np.float32),
        "bias": np.zeros(CLASSES, np.float32),
    }


def play_round(replies: list[RecordDict], features: int, rank: int) -> None:
    """Play a round of `Gems` at the server (unpack, check, aggregate); uses up the replies."""
    strategy = Gems(space=Cone(rank=rank), min_nodes=len(replies))
    strategy.start(AnsweredGrid(replies), to_record(model(features)))


def play_plainly(replies: list[RecordDict], features: int, rank: int) -> None:
    """Do the same with all factors in double precision at once."""
    layer, request = find_output_layer(model(features)), Gems(space=Cone(rank=rank)).request()
    cones = [unpack_space_reply(replies.pop(), request, layer) for _ in range(len(replies))]
    solve_plainly([cone for cone in cones if isinstance(cone, ClassMomentCone)])


def cost_here(way: Way, nodes: int, features: int, rank: int) -> Cost:
    """Make the replies and measure what is done with them, in this process."""
    ways = {"round": play_round, "plain": play_plainly}
    # Libraries load parts of themselves when they are first used.
    for warm_up in ways.values():
        warm_up(replies_of(3, 16, 2), 16, 2)
    replies = replies_of(nodes, features, rank)
    received = sum(payload_bytes(reply) for reply in replies)
    before, started = memory_bytes("VmRSS"), time.perf_counter()
    ways[way](replies, features, rank)
    seconds = time.perf_counter() - started
    return Cost(received, memory_bytes("VmHWM") - before, seconds)


def memory_bytes(which: Literal["VmRSS", "VmHWM"]) -> int:
    """Return the memory that this process has, or the most that it had."""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:  # macOS knows only the most so far, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not from getrusage, which on Linux begins with what the parent process had.
    return 1024 * int(status.split(f"{which}:")[1].split()[0])


def cost_of(way: Way, nodes: int, features: int, rank: int) -> Cost:
    """Return what `cost_here` does, from a process of its own."""
    arguments = [way, *map(str, (nodes, features, rank))]
    command = [sys.executable, "-m", "simulations.bench.memory_cost", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def row(nodes: int, features: int, rank: int, with_plain: bool) -> dict[str, float | None]:
    """Return seconds and memory of a round, and of the plain way beside it."""
    cost = cost_of("round", nodes, features, rank)
    plain = cost_of("plain", nodes, features, rank) if with_plain else None
    return {
        "nodes": nodes,
        "received": cost.received / 1e6,
        "on top": cost.on_top / 1e6,
        "plain": plain.on_top / 1e6 if plain else None,
        "round": cost.seconds,
        "plain time": plain.seconds if plain else None,
    }


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure rounds of several sizes."""
    features, rank = 784, 20
    counts = (50, 200) if quick else (100, 1000, 5000)
    yield CostTable(
        f"Memory of a round of Gems at the server: cones of rank {rank}, {features} features",
        (
            *(size("nodes"), limit("received", "MB"), ours("on top", "MB")),
            *(obvious("plain", "MB"), ratio("on top ×", "on top", "received")),
            ratio("plain ×", "plain", "received"),
            *(
                Column("round", "s"),
                Column("plain time", "s"),
                ratio("time ×", "plain time", "round"),
            ),
        ),
        tuple(row(nodes, features, rank, nodes <= 1000) for nodes in counts),
        "Two classes a node, int8. on top: memory beside the replies. plain: the same with "
        "all in float64 at once. ×: of what was received.",
        grows_with="nodes",
    )


if __name__ == "__main__":
    name, *sizes = sys.argv[1:]
    assert name in get_args(Way)
    print(json.dumps(asdict(cost_here(name, *map(int, sizes)))))  # type: ignore[arg-type]
