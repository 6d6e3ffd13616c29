"""How many hidden neurons does it take? Accuracy against size, with the ensembles beside.

GEMS 2019, Tables 3 and 9 to 11: m_epsilon (clusters) and epsilon_j (deviation) trade the size of
the merged layer against accuracy. The papers' head is a ball, fine-tuned on 1000 public samples;
beside it stands the class-moment cone, which needs none. Every neuron of every node is checked
to have a neuron of the result in its ball.

A node's training of the hidden layer is the same in all settings and done once per seed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.clientapp import ClientApp
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from gems_flwr import scoring
from gems_flwr.client.limits import UNLIMITED
from gems_flwr.client.task_app import task_client_app
from gems_flwr.networks.surgery import resize_model
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.seeding import generator
from gems_flwr.server.members import split_members
from gems_flwr.strategies.local_models import LocalModels
from gems_flwr.wire.records import to_numpy
from simulations.config import RunConfig, compose_config
from simulations.experiment.experiment import Experiment
from simulations.experiment.remembered import remember_training
from simulations.experiment.training import torch_threads
from simulations.report.figures import (
    COLOURS,
    add_grid,
    draw_means,
    legend_below,
    new_figure,
    save,
    write_heading,
)
from simulations.report.tables import TextTable, print_table

SEEDS = (0, 1, 2)
PUBLIC = 1000


@dataclass(frozen=True)
class Setting:
    """One way of merging."""

    merge: str
    clusters: int = 100
    epsilon: float = 1.0

    def __str__(self) -> str:
        if self.merge == "concat":
            return "side by side"
        if self.merge == "verified":
            return f"one pass, ε_j = {self.epsilon:g}"
        return f"m_ε = {self.clusters}, ε_j = {self.epsilon:g}"

    @property
    def overrides(self) -> list[str]:
        """Return what the strategy's config has to say."""
        return [
            f"strategy.merge={self.merge}",
            f"strategy.clusters={self.clusters}",
            f"strategy.neurons.epsilon={self.epsilon}",
        ]


SETTINGS = (
    Setting("kmeans", 25),
    Setting("kmeans", 50),
    Setting("kmeans", 75),
    Setting("kmeans", 100),
    Setting("kmeans", 100, 0.02),
    Setting("kmeans", 150),
    Setting("kmeans", 100, 0.01),
    Setting("verified", epsilon=0.02),
    Setting("verified", epsilon=0.01),
    Setting("concat"),
)
HEADS = {"ball": "ball", "ball, tuned": "ball", "cone": "cone"}
STYLES = {
    "cone": (COLOURS[0], "o"),
    "ball, tuned": (COLOURS[1], "s"),
    "ball": (COLOURS[4], "^"),
}

# For every row: hidden neurons, and the accuracy with each head, one value per seed.
Rows = dict[str, dict[str, list[float]]]


def run(
    overrides: Sequence[str], output: Path, console: Console, seeds: Sequence[int] | None = None
) -> Path:
    """Run the study; return the path of its figure."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    base = ["strategy=gems_layerwise", "model=mlp", *overrides]
    config = compose_config(base)
    rows: Rows = {}
    chosen = SEEDS if seeds is None else seeds
    steps = len(chosen) * len(SETTINGS) * len(HEADS)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("merging", total=steps)
        for seed in chosen:
            with torch_threads(config.backend.threads), remember_training():
                for _ in _one_seed([*base, f"seed={seed}"], rows):
                    progress.advance(bar)
    output.mkdir(parents=True, exist_ok=True)
    stem = f"layer_size-{config.names['dataset']}-{config.nodes}"
    (output / f"{stem}.json").write_text(json.dumps(rows, indent=2))
    title = "Test accuracy against hidden neurons, mean ± deviation over seeds"
    print_table(_table(rows), console, title=title)
    path = output / f"{stem}.png"
    save(_figure(rows, f"{config.names['dataset']} over {config.nodes} nodes"), path)
    console.print(f"Figure: {path}")
    return path


def _one_seed(base: Sequence[str], rows: Rows) -> Any:
    """Fill in one seed's column, yielding after every run."""
    first = Experiment(compose_config(base))
    app = task_client_app(
        lambda context: first.task(int(context.node_config["partition-id"])), limits=UNLIMITED
    )
    for setting in SETTINGS:
        row = rows.setdefault(str(setting), {"hidden": []})
        for name, head in HEADS.items():
            tune = min(PUBLIC, len(first.dataset.public)) if "tuned" in name else 0
            rank = ["strategy.head.space.rank=full"] if head == "cone" else []
            chosen = [f"strategy/head={head}", *rank, f"strategy.tune={tune}"]
            said = [*base, *setting.overrides, *chosen]
            accuracy, hidden, uncovered = _one_run(compose_config(said), first, app)
            if uncovered:
                raise RuntimeError(f"{setting}: {uncovered} neurons have none in their balls")
            row.setdefault(name, []).append(accuracy)
            if head == "cone":
                row["hidden"].append(hidden)
            yield
    members = _local(first, app)
    labels = first.dataset.test.labels
    neurons = float(sum(first.config.model["hidden"]) * len(members))
    votes = scoring.majority_vote(members, generator(first.config.seed, "ties"))
    for name, accuracy in (
        ("majority vote", scoring.accuracy(votes, labels)),
        ("softmax mean", scoring.score(scoring.softmax_mean(members), labels)["accuracy"]),
    ):
        row = rows.setdefault(f"ensemble, {name}", {"hidden": [], "ensemble": []})
        row["hidden"].append(neurons)
        row["ensemble"].append(accuracy)


def _one_run(config: RunConfig, first: Experiment, app: ClientApp) -> tuple[float, float, int]:
    experiment = Experiment(config)
    experiment.__dict__.update(dataset=first.dataset, shares=first.shares)
    strategy = experiment.strategy(None, [])
    result = strategy.start(InProcessGrid(app, config.nodes), experiment.initial_arrays())
    metrics = experiment.evaluate(strategy, result.arrays)
    assert metrics is not None
    score = metrics["accuracy"]
    assert isinstance(score, float)
    layers = result.details["layers"]
    return score, float(sum(result.details["hidden"])), sum(len(e["uncovered"]) for e in layers)


def _local(experiment: Experiment, app: ClientApp) -> list[np.ndarray]:
    """Return what each node's own network says of the test data."""
    config = experiment.config
    alone = LocalModels(min_nodes=1, seed=config.seed)
    result = alone.start(InProcessGrid(app, config.nodes), experiment.initial_arrays())
    return [
        experiment.predict(resize_model(experiment.build_model(), arrays), experiment.dataset.test)
        for arrays in split_members(to_numpy(result.arrays)).values()
    ]


def _table(rows: Rows) -> TextTable:
    lines = []
    for name, row in sorted(rows.items(), key=lambda item: float(np.mean(item[1]["hidden"]))):
        cells = [_spread(row[head]) if head in row else "–" for head in HEADS]
        if "ensemble" in row:
            cells = [_spread(row["ensemble"]), "–", "–"]
        lines.append((name, f"{np.mean(row['hidden']):.0f}", *cells))
    return TextTable.of(("method", "hidden neurons", *HEADS), lines)


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values):.3f}"


def _figure(rows: Rows, subtitle: str) -> Figure:
    figure = new_figure(4.8)
    axes = figure.subplots()
    for head, (colour, marker) in STYLES.items():
        points = sorted(
            (float(np.mean(r["hidden"])), float(np.mean(r[head])), float(np.std(r[head])))
            for r in rows.values()
            if head in r
        )
        sizes, means, spread = zip(*points, strict=True)
        label = f"head: {head}"
        draw_means(axes, sizes, means, spread, colour=colour, marker=marker, label=label, size=6)
    ensembles = {name: row for name, row in rows.items() if "ensemble" in row}
    for (name, row), marker in zip(ensembles.items(), "XP", strict=False):
        size, mean = float(np.mean(row["hidden"])), float(np.mean(row["ensemble"]))
        axes.plot([size], [mean], marker, color="#555555", label=name, markersize=9)
    axes.set_xlabel("hidden neurons")
    axes.set_ylabel("test accuracy")
    axes.set_ylim(0, 1)
    add_grid(axes, "y")
    write_heading(axes, "Size of the merged network", subtitle)
    legend_below(figure, fontsize=10)
    return figure
