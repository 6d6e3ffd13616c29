"""Does a long run stay small? Memory over 200 rounds of dynamic averaging with failing nodes.

``python -m simulations.reproduce soak`` runs dynamic averaging on Ray. One reply in ten fails at
random, half of them before the node has trained and half after. After every round the study notes
how much memory the server's process and the largest Ray actor hold for themselves (``RssAnon``,
which leaves out what processes share), and compares the rounds around 50 with the last ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from rich.console import Console

from gems_flwr.runtime.flower_internals import ClientAppCallable
from gems_flwr.runtime.seeding import generator
from gems_flwr.server.settings import Callback
from gems_flwr.server.state import RoundRecord
from gems_flwr.wire.keys import INTRODUCE, TRAIN
from simulations.backends.launch import run_on_ray, simulated_client_app
from simulations.config import RunConfig, compose_config
from simulations.experiment.execution import run_server
from simulations.experiment.experiment import experiment_of
from simulations.report.tables import TextTable, print_table

SETTING = ["strategy=dynamic", "backend=ray", "model=mlp", "partition=iid", "nodes=10"]
# Every round checks, and a low threshold makes most checks move models: the busiest case.
SETTING += ["rounds=200", "strategy.delta=0.1", "evaluate_every=50", "progress=false"]
FAILING_SHARE = 0.1
# Rounds whose median is compared: single readings jump with the garbage collector.
WINDOW = 20


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the soak; return the path of its figures."""
    config = compose_config([*SETTING, *overrides])
    readings = Readings()
    folder = output / "run"

    def server(grid: Grid) -> dict[str, Any]:
        return run_server(experiment_of(config.to_json()), grid, folder, [readings])

    result = run_on_ray(unreliable_app(config), config.nodes, config.backend, server)
    summary = {
        "rounds": result["rounds"],
        "failed_replies": len(result["details"]["failures"]),
        "messages": result["messages"],
        "accuracy": result["accuracy"],
        "seconds": result["seconds"],
        **readings.growth(),
        "readings": readings.rows,
    }
    path = output / "soak.json"
    path.write_text(json.dumps(summary, indent=2))
    title = f"{summary['rounds']} rounds, {summary['failed_replies']} replies failed on purpose"
    print_table(_table(summary), console, title=title)
    console.print(f"Figures: {path}")
    return path


def unreliable_app(config: RunConfig, share: float = FAILING_SHARE) -> ClientApp:
    """Return the app of a run whose train replies fail at random."""
    inner = simulated_client_app(config)

    def unreliable(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        metadata = message.metadata
        place = (str(context.node_config["partition-id"]), metadata.group_id)
        rng = generator(config.seed, "unreliable", *place)
        fails = metadata.message_type == TRAIN and rng.random() < share
        after = rng.random() < 0.5
        if fails and not after:
            raise RuntimeError("failed before training, on purpose")
        reply = call_next(message, context)
        if fails:
            raise RuntimeError("failed after training, on purpose")
        return reply

    app = ClientApp(mods=[unreliable])
    app.train()(inner)
    app.evaluate()(inner)
    app.query(INTRODUCE.split(".")[1])(inner)
    return app


class Readings(Callback):
    """Memory after every round, in MB."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_round_end(self, record: RoundRecord) -> None:
        """Read what the kernel says."""
        actors = [private_megabytes(pid) for pid in descendants(os.getpid()) if is_actor(pid)]
        server = private_megabytes(os.getpid())
        row = {"round": record.round, "server": server, "actor": max(actors, default=0.0)}
        self.rows.append({**row, "actors": len(actors)})

    def growth(self, early: int = 50) -> dict[str, Any]:
        """Return medians around an early round and over the last ones, in MB."""
        window = min(WINDOW, max(1, len(self.rows) // 4))
        early = min(early, len(self.rows) // 2)
        parts = {"early": self.rows[early - window // 2 :][:window], "late": self.rows[-window:]}
        return {
            f"{who}_{when}_megabytes": median(row[who] for row in rows)
            for who in ("server", "actor")
            for when, rows in parts.items()
        }


def private_megabytes(pid: int) -> float:
    """Return the memory that a process shares with no other; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    kilobytes = [line.split()[1] for line in lines if line.startswith("RssAnon")]
    return int(kilobytes[0]) / 1000 if kilobytes else 0.0


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes that a process has started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2]
            except OSError:
                continue
            children.setdefault(int(after_name.split()[1]), []).append(int(entry.name))
    found, frontier = [], [pid]
    while frontier:
        fresh = children.get(frontier.pop(), [])
        found += fresh
        frontier += fresh
    return found


def is_actor(pid: int) -> bool:
    """Return whether a process is one of Flower's Ray actors."""
    try:
        return b"ClientAppActor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _table(summary: dict[str, Any]) -> TextTable:
    lines = []
    for who in ("server", "actor"):
        values = (summary[f"{who}_{when}_megabytes"] for when in ("early", "late"))
        lines.append((who, *(f"{value:.1f}" for value in values)))
    return TextTable.of(("process", "around round 50, MB", "at the end, MB"), lines)
