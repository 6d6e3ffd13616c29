"""How many hidden neurons does it take? Accuracy against size, with the ensembles beside.

GEMS 2019, Tables 3 and 9 to 11: m_epsilon (clusters) and epsilon_j (deviation) trade the size of
the merged layer against accuracy. The papers' head is a ball, fine-tuned on 1000 public samples;
beside it stands the class-moment cone, which needs none. Every neuron of every node is checked
to have a neuron of the result in its ball.

A node's training of the hidden layer is the same in all settings and done once per seed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from gems_flwr import scoring, wire
from gems_flwr.client import Report, task_client_app
from gems_flwr.runtime import InProcessGrid
from gems_flwr.runtime.seeding import generator
from simulations.config import RunConfig, compose_config
from simulations.experiment import Experiment, NodeTask
from simulations.report.figures import new_figure, save, write_heading
from simulations.training import torch_threads

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
            f"strategy.epsilon_hidden={self.epsilon}",
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
    "cone": ("#0072B2", "o"),
    "ball, tuned": ("#D55E00", "s"),
    "ball": ("#E69F00", "^"),
}

# For every row: hidden neurons, and the accuracy with each head, one value per seed.
Rows = dict[str, dict[str, list[float]]]


class RememberingTask(NodeTask):
    """A node that trains the same network from the same seed only once."""

    def __init__(self, experiment: Experiment, node: int) -> None:
        super().__init__(experiment, node)
        self.trained: dict[str, dict[str, torch.Tensor]] = {}

    def train(self, model: nn.Module, *, seed: int, config: Mapping[str, Any]) -> Report:
        """Train, or load what the same training gave before."""
        digest = hashlib.blake2b(f"{seed} {wire.NEURON_REQUEST in config}".encode())
        for weight in model.state_dict().values():
            digest.update(weight.numpy().tobytes())
        key = digest.hexdigest()
        if key not in self.trained:
            super().train(model, seed=seed, config=config)
            self.trained[key] = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(self.trained[key])
        return Report(1)


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the study; return the path of its figure."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    base = ["strategy=gems_layerwise", "model=mlp", *overrides]
    config = compose_config(base)
    rows: Rows = {}
    steps = len(SEEDS) * len(SETTINGS) * len(HEADS)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("merging", total=steps)
        for seed in SEEDS:
            with torch_threads(config.backend.threads):
                for _ in _one_seed([*base, f"seed={seed}"], rows):
                    progress.advance(bar)
    output.mkdir(parents=True, exist_ok=True)
    stem = f"layer_size-{config.names['dataset']}-{config.nodes}"
    (output / f"{stem}.json").write_text(json.dumps(rows, indent=2))
    console.print(_table(rows))
    path = output / f"{stem}.png"
    save(_figure(rows, f"{config.names['dataset']} over {config.nodes} nodes"), path)
    console.print(f"Figure: {path}")
    return path


def _one_seed(base: Sequence[str], rows: Rows) -> Any:
    """Fill in one seed's column, yielding after every run."""
    first = Experiment(compose_config(base))
    tasks = [RememberingTask(first, node) for node in range(first.config.nodes)]
    app = task_client_app(lambda context: tasks[int(context.node_config["partition-id"])])
    for setting in SETTINGS:
        row = rows.setdefault(str(setting), {"hidden": []})
        for name, head in HEADS.items():
            tune = min(PUBLIC, len(first.dataset.public)) if "tuned" in name else 0
            said = [*base, *setting.overrides, f"strategy.head={head}", f"strategy.tune={tune}"]
            accuracy, hidden, uncovered = _one_run(compose_config(said), first, app)
            if uncovered:
                raise RuntimeError(f"{setting}: {uncovered} neurons have none in their balls")
            row.setdefault(name, []).append(accuracy)
            if head == "cone":
                row["hidden"].append(hidden)
            yield
    members = [_local(first, task) for task in tasks]
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


def _one_run(config: RunConfig, first: Experiment, app: Any) -> tuple[float, float, int]:
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


def _local(experiment: Experiment, task: RememberingTask) -> np.ndarray:
    """Return what a node's own network says of the test data."""
    model = experiment.build_model()
    model.load_state_dict(next(iter(task.trained.values())))
    return experiment.predict(model, experiment.dataset.test)


def _table(rows: Rows) -> Table:
    table = Table(
        title="Test accuracy against hidden neurons, mean ± deviation over seeds",
        title_justify="left",
    )
    for heading in ("method", "hidden neurons", *HEADS):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, row in sorted(rows.items(), key=lambda item: float(np.mean(item[1]["hidden"]))):
        cells = [_spread(row[head]) if head in row else "–" for head in HEADS]
        if "ensemble" in row:
            cells = [_spread(row["ensemble"]), "–", "–"]
        table.add_row(name, f"{np.mean(row['hidden']):.0f}", *cells)
    return table


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
        axes.errorbar(
            sizes, means, spread, color=colour, marker=marker, label=f"head: {head}", capsize=3
        )
    ensembles = {name: row for name, row in rows.items() if "ensemble" in row}
    for (name, row), marker in zip(ensembles.items(), "XP", strict=False):
        size, mean = float(np.mean(row["hidden"])), float(np.mean(row["ensemble"]))
        axes.plot([size], [mean], marker, color="#555555", label=name, markersize=9)
    axes.set_xlabel("hidden neurons")
    axes.set_ylabel("test accuracy")
    axes.set_ylim(0, 1)
    axes.grid(axis="y", color="#E5E5E5")
    write_heading(axes, "Size of the merged network", subtitle)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return figure
