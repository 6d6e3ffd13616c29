"""Are radii honest? Sampled, worst-direction and certified radii beside what they promise.

A ball of radius r for epsilon says: every model in it is right on a share epsilon of the node's
data. The study builds the three kinds of balls on every node, intersects them, and asks each node
how the resulting model really does on the data on which its ball was built.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from gems_flwr.errors import NotGoodEnoughError
from gems_flwr.intersect.balls import intersect_balls
from gems_flwr.radii.layer_radius import build_ball
from gems_flwr.radii.quality import Quality
from gems_flwr.spaces.radius import Method
from simulations.config import compose_config
from simulations.experiment.experiment import Experiment
from simulations.experiment.training import torch_threads
from simulations.report.figures import (
    COLOURS,
    add_grid,
    legend_below,
    new_figure,
    save,
    write_heading,
)
from simulations.report.tables import TextTable, print_table
from simulations.reproduce.studies.trained_nodes import accuracy, trained_nodes

METHODS: tuple[Method, ...] = ("sampled", "worst", "certified")
LOOKS = {"sampled": COLOURS[1], "worst": COLOURS[0], "certified": COLOURS[2]}
EPSILONS = (0.2, 0.4, 0.6, 0.8, 0.9)


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the study; return the path of its figure."""
    experiment = Experiment(compose_config(["strategy=one_shot_average", *overrides]))
    with torch_threads(experiment.config.backend.threads):
        nodes = trained_nodes(experiment, console)
        rows = [row for e in EPSILONS for m in METHODS for row in _measure(nodes, e, m, experiment)]
    output.mkdir(parents=True, exist_ok=True)
    config = experiment.config
    stem = f"honest-radii-{config.names['dataset']}-{config.nodes}"
    (output / f"{stem}.json").write_text(json.dumps(rows, indent=2))
    print_table(_table(rows), console, title="What the balls promise, and what the nodes get")
    path = output / f"{stem}.png"
    save(_figure(rows, f"{config.names['dataset']} by label over {config.nodes} nodes"), path)
    console.print(f"Figure: {path}")
    return path


def _measure(
    nodes: list[Any], epsilon: float, method: Method, experiment: Experiment
) -> list[dict[str, Any]]:
    classes, seed = experiment.dataset.classes, experiment.config.seed
    try:
        balls = [
            build_ball(node.layer, Quality(epsilon), method, directions=500, seed=seed)
            for node in nodes
        ]
    except NotGoodEnoughError:
        return []
    found = intersect_balls(balls)
    return [
        {
            "epsilon": epsilon,
            "method": method,
            "node": number,
            "radius": ball.radius.value,
            "status": found.status,
            "is_average": found.is_average,
            "accuracy": accuracy(found.point, node.layer.inputs, node.layer.labels, classes),
        }
        for number, (node, ball) in enumerate(zip(nodes, balls, strict=True))
    ]


def _table(rows: list[dict[str, Any]]) -> TextTable:
    headings = ("epsilon", "radii are", "radius", "intersection", "worst node's accuracy", "kept")
    lines = []
    for epsilon in EPSILONS:
        for method in METHODS:
            mine = [r for r in rows if r["epsilon"] == epsilon and r["method"] == method]
            if not mine:
                continue
            radii = [row["radius"] for row in mine]
            least = min(row["accuracy"] for row in mine)
            status = mine[0]["status"] + (" (the average)" if mine[0]["is_average"] else "")
            kept = "–" if mine[0]["status"] != "feasible" else "yes" if least >= epsilon else "no"
            between = f"{min(radii):.3g} … {max(radii):.3g}"
            lines.append((f"{epsilon}", method, between, status, f"{least:.3f}", kept))
    return TextTable.of(headings, lines, names=(0, 1, 3), group_by=0)


def _figure(rows: list[dict[str, Any]], subtitle: str) -> Figure:
    figure = new_figure(7.2)
    radii, scores = figure.subplots(2, 1)
    positions = np.arange(len(EPSILONS))
    for index, method in enumerate(METHODS):
        for column, epsilon in enumerate(EPSILONS):
            mine = [r for r in rows if r["epsilon"] == epsilon and r["method"] == method]
            if not mine:
                continue  # not even every centre is that good
            x = column + (index - 1) * 0.22 + np.linspace(-0.05, 0.05, len(mine))
            style = {"color": LOOKS[method], "s": 34, "zorder": 3}
            label = f"{method} radii" if column == 0 else None
            radii.scatter(x, [r["radius"] for r in mine], label=label, **style)
            empty = mine[0]["status"] != "feasible"
            marker = {"marker": "x" if empty else "o"}
            scores.scatter(x, [r["accuracy"] for r in mine], **style, **marker)
    for column, epsilon in enumerate(EPSILONS):
        label = "promised: epsilon" if column == 0 else None
        scores.plot([column - 0.4, column + 0.4], [epsilon] * 2, color="#444444", label=label)
    scores.scatter([], [], marker="o", color="#888888", label="balls meet")
    scores.scatter([], [], marker="x", color="#888888", label="no common model")
    radii.set_yscale("log")
    radii.set_ylabel("radius (units of the weights)")
    scores.set_ylabel("accuracy on the node's own data")
    scores.set_xlabel("epsilon")
    scores.set_ylim(-0.03, 1.03)
    for axes in (radii, scores):
        axes.set_xticks(positions, [str(e) for e in EPSILONS])
        add_grid(axes, "y")
    write_heading(radii, "How far good-enough models reach", f"{subtitle}; a dot is a node")
    write_heading(scores, "What the common model gives each node", subtitle)
    legend_below(figure, fontsize=10)
    return figure
