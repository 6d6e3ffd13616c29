"""What does a byte buy? Cumulative loss against bytes, over protocols and their settings.

Kamp et al. 2018, Section 5: ``python -m simulations.studies frontiers experiment=mnist_100``, or
another of ``conf/experiment``. Single runs say little, since a protocol that talks less loses more;
compared are frontiers: how many bytes periodic averaging would need for the same loss, read off
between its own runs. Finished runs are not repeated; ``rounds=100`` gives a quick look.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from simulations.config import RunConfig, compose_config
from simulations.report.write_report import build_report
from simulations.run import run

PERIODS = (16, 4, 64, 8, 2, 32, 1)
THRESHOLDS = (0.7, 0.3, 1.5, 0.1, 3.0)
FRACTIONS = (0.3, 0.5, 0.7)
# How long after a drift communication counts as a reaction to it.
REACTION_ROUNDS = 50


@dataclass(frozen=True)
class Outcome:
    """One run of one protocol."""

    family: str
    label: str
    loss: float
    total_bytes: int
    models: float
    burst: float | None


def protocols() -> list[tuple[str, str, list[str]]]:
    """Return family, label and overrides of every protocol, those that tell most first."""
    variants = {
        "dynamic total": ["strategy.condition=total", "strategy.augmentation=all"],
        "dynamic": [],
        "dynamic all": ["strategy.augmentation=all"],
    }
    periodic = [
        ("periodic", f"periodic b={b}", ["strategy=periodic", f"strategy.b={b}"]) for b in PERIODS
    ]
    dynamic = {
        family: [
            (family, f"{family} Δ={d}", ["strategy=dynamic", f"strategy.delta={d}", *options])
            for d in THRESHOLDS
        ]
        for family, options in variants.items()
    }
    fedavg = [
        (
            "fedavg",
            f"fedavg C={c}",
            ["strategy=periodic", "strategy.b=5", f"strategy.fraction={c}"],
        )
        for c in FRACTIONS
    ]
    first = [
        pair
        for row in zip(periodic, dynamic["dynamic total"], dynamic["dynamic"], strict=False)
        for pair in row
    ]
    alone = [
        ("nosync", "nosync", ["strategy=nosync", "strategy.report_every=50"]),
        ("serial", "serial", ["strategy=serial"]),
    ]
    return [*first, *fedavg, *alone, *dynamic["dynamic all"], *periodic[len(THRESHOLDS) :]]


def run_all(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the study; return the path of its report."""
    outcomes = []
    for family, label, options in protocols():
        # The cost of a last synchronisation is not the protocol's.
        last = [] if family in ("nosync", "serial") else ["strategy.final_sync=false"]
        quiet = ["progress=false", f"label='{label}'"]
        config = compose_config([*options, *last, *overrides, *quiet])
        folder = _folder(output, overrides) / config.run_name()
        outcomes.append(_outcome(family, label, config, run(config, folder, console), folder))
        console.print(_table(outcomes))
    return build_report([_folder(output, overrides)], _folder(output, overrides), console)


def _folder(output: Path, overrides: Sequence[str]) -> Path:
    chosen = [each.split("=")[1] for each in overrides if each.startswith("experiment=")]
    return output / "-".join(["frontiers", *chosen])


def _outcome(
    family: str, label: str, config: RunConfig, result: dict[str, Any], folder: Path
) -> Outcome:
    details = result["details"]
    moved = details.get("models_up", 0) + details.get("models_down", 0)
    return Outcome(
        family=family,
        label=label,
        loss=details["cumulative_loss"] / config.nodes,
        total_bytes=result["bytes_up"] + result["bytes_down"],
        models=moved / config.nodes,
        burst=burst(folder, details.get("drifts", [])),
    )


def burst(folder: Path, drifts: Sequence[int]) -> float | None:
    """Return how much more is sent per round right after a drift than in quiet times.

    The first rounds of a run, when everything is new, count as neither.
    """
    sent: dict[int, float] = {}
    for line in (folder / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        sent[record["round"]] = record["bytes_up"] + record["bytes_down"]
    excited = {r for d in drifts for r in range(d, d + REACTION_ROUNDS)}
    after = [each for number, each in sent.items() if number in excited]
    quiet = [
        each for number, each in sent.items() if number > REACTION_ROUNDS and number not in excited
    ]
    if not after or not quiet or not sum(quiet):
        return None
    return float(np.mean(after) / np.mean(quiet))


def equal_loss_bytes(periodic: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return the bytes that periodic averaging would need for a loss; None beyond its runs.

    Between two of its runs, given as pairs of loss and bytes, the logarithm of the bytes is taken
    to be linear in the loss.
    """
    points = sorted((at, np.log(sent)) for at, sent in periodic)
    if len(points) < 2 or not points[0][0] <= loss <= points[-1][0]:
        return None
    losses, logs = zip(*points, strict=True)
    return float(np.exp(np.interp(loss, losses, logs)))


def _table(outcomes: Sequence[Outcome]) -> Table:
    periodic = [(each.loss, each.total_bytes) for each in outcomes if each.family == "periodic"]
    table = Table(title="Per learner; bytes beside periodic averaging at equal loss")
    headings = ("protocol", "loss", "models", "MB in all", "of periodic's", "burst after drift")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "protocol" else "right")
    for each in sorted(outcomes, key=lambda outcome: (outcome.family, outcome.loss)):
        same = equal_loss_bytes(periodic, each.loss)
        share = "–" if same is None else f"{each.total_bytes / same:.2f}"
        factor = "–" if each.burst is None else f"{each.burst:.1f}"
        megabytes = f"{each.total_bytes / 1e6:,.0f}"
        table.add_row(
            each.label, f"{each.loss:.1f}", f"{each.models:.1f}", megabytes, share, factor
        )
    return table
