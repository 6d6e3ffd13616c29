"""What a node's low-rank class moments cost: from the samples, against full moments first.

`gems_flwr.moments.cone_streaming` never makes a D x D matrix; the other way, which small D still
goes, sums outer products, checks the full cone and compresses it. Each is measured in a process of
its own, which makes the samples and notes its memory before and the most that it had.

    python -m simulations.bench.moments_cost samples 4000 6000      # what such a process prints
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch

from gems_flwr.moments.class_sums import in_chunks, sum_classes
from gems_flwr.moments.cone_building import cone_from_sums
from gems_flwr.moments.cone_streaming import Components, stream_cone
from gems_flwr.moments.low_rank import compress
from simulations.bench.cost_tables import Column, CostTable, limit, obvious, ours, ratio, size
from simulations.bench.memory_cost import memory_bytes
from simulations.bench.spaces_cost import timed

CLASSES, RANK = 2, 20
Way = Literal["samples", "full"]


@dataclass(frozen=True)
class Cost:
    """What building a cone costs a node: seconds, and bytes on top of its samples."""

    seconds: float
    on_top: int


def samples(count: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two classes whose variances fall as those of images do."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(count, features, generator=source)
    x *= torch.arange(1, features + 1) ** -0.7
    return x, torch.arange(count) % CLASSES


def build(way: Way, x: torch.Tensor, y: torch.Tensor) -> None:
    """Build a cone of rank 20."""
    if way == "samples":
        stream_cone(x, Components.of(y), CLASSES, rank=RANK)
    else:
        compress(cone_from_sums(sum_classes(in_chunks(x, y), CLASSES)), RANK)


def cost_here(way: Way, count: int, features: int) -> Cost:
    """Make the samples and measure what is done with them, in this process."""
    # Libraries load parts of themselves when they are first used.
    build(way, *samples(200, 100))
    x, y = samples(count, features)
    before, started = memory_bytes("VmRSS"), time.perf_counter()
    build(way, x, y)
    return Cost(time.perf_counter() - started, memory_bytes("VmHWM") - before)


def cost_of(way: Way, count: int, features: int) -> Cost:
    """Return what `cost_here` does, from a process of its own."""
    arguments = [way, str(features), str(count)]
    command = [sys.executable, "-m", "simulations.bench.moments_cost", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def row(count: int, features: int) -> dict[str, float]:
    """Return seconds and memory of both ways, and seconds of one product with the samples."""
    streamed, full = cost_of("samples", count, features), cost_of("full", count, features)
    x, narrow = samples(count, features)[0], torch.randn(features, RANK)
    _, product = timed(lambda: x @ narrow)
    return {
        "D": features,
        "samples": streamed.seconds,
        "full": full.seconds,
        "X·U": product,
        "on top": streamed.on_top / 1e6,
        "full on top": full.on_top / 1e6,
    }


def measure(quick: bool) -> Iterator[CostTable]:
    """Measure cones of several widths."""
    count = 2000 if quick else 6000
    yield CostTable(
        f"A node's cone of rank {RANK} from {count:,} samples of {CLASSES} classes",
        (
            *(size("D"), ours("samples", "s"), obvious("full", "s"), limit("X·U", "s")),
            ratio("full ×", "full", "samples"),
            ratio("samples / X·U", "samples", "X·U"),
            *(Column("on top", "MB"), Column("full on top", "MB")),
            ratio("MB ×", "full on top", "on top"),
        ),
        tuple(row(count, features) for features in (1000, 2000, *(() if quick else (4000,)))),
        "samples: from the samples, without a D × D matrix. full: by way of full moments. X·U:"
        " one product of all samples with as many directions as the rank. on top: memory beside "
        "the samples.",
        grows_with="D",
    )


if __name__ == "__main__":
    name, *sizes = sys.argv[1:]
    assert name in get_args(Way)
    features_here, count_here = map(int, sizes)
    print(json.dumps(asdict(cost_here(name, count_here, features_here))))  # type: ignore[arg-type]
