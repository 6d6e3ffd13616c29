"""What do class moments give away? Rebuilt samples, and who is among them.

Two attackers at the server (`reconstruction` and `membership` of `gems_flwr.leaks`) get what a node
sends of one class, for several numbers of samples and several forms: full moments, a fixed rank,
the automatic form, and with noise for differential privacy. Samples of one node are rebuilt,
members of several nodes told from others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from gems_flwr.errors import SpaceError
from gems_flwr.leaks.membership import membership_auc
from gems_flwr.leaks.reconstruction import nearest_distances, rebuild
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.moments.private_release import PrivateRelease
from gems_flwr.runtime.seeding import derive_seed, generator
from gems_flwr.spaces.cone import ClassMomentCone, mean_values
from gems_flwr.typing import Float
from simulations.config import ConfigError, compose_config
from simulations.experiment.experiment import Experiment
from simulations.report.figures import COLOURS, new_figure, save
from simulations.report.tables import TextTable, print_table

SIZES = (8, 32, 64, 256)
FULL, FIXED, AUTOMATIC = "full moments", "rank 20", "automatic"
PRIVATE = "full, ε = 10"
FORMS: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rank": "full", "min_count": 2},
    FIXED: {"rank": 20},
    AUTOMATIC: {},
    PRIVATE: {"rank": "full"},
}
LOOKS = {FULL: COLOURS[1], FIXED: COLOURS[3], AUTOMATIC: COLOURS[2], PRIVATE: COLOURS[0]}
# A sample counts as rebuilt if a guess is so near, per feature, in units of the features' range.
NEAR = 0.1
# Nodes on which members are told from others, and the largest number of the attacker's own samples.
NODES, KNOWN = 4, 2500
ITERATIONS = 3000
SHOWN = 8


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the study; return the path of its figure."""
    experiment = Experiment(compose_config(overrides))
    samples = _widest_class(experiment)
    low, high = float(samples.min()), float(samples.max())
    known, rest = samples[: min(KNOWN, len(samples) // 2)], samples[len(samples) // 2 :]
    sizes = [size for size in SIZES if NODES * size + size <= len(rest) and 2 * size < len(known)]
    if not sizes:
        raise ConfigError(
            "the widest class has too few samples to attack: dataset=mnist has enough"
        )
    shown = min(sizes, key=lambda size: abs(size - 32))
    rows: list[dict[str, Any]] = []
    pictures: dict[str, Float] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("attacking", total=len(sizes) * len(FORMS))
        for size in sizes:
            nodes = [rest[k * size : (k + 1) * size] for k in range(NODES)]
            for form in FORMS:
                row, guesses = _attack(form, known, nodes, rest[NODES * size :], low, high)
                rows.append(row)
                if size == shown:
                    pictures |= {f"of {size} samples": nodes[0][:SHOWN], form: guesses}
                progress.advance(bar)
    output.mkdir(parents=True, exist_ok=True)
    stem = f"leaks-{experiment.config.names['dataset']}"
    (output / f"{stem}.json").write_text(json.dumps(rows, indent=2))
    title = f"Rebuilt (within {NEAR} per feature) · AUC of membership"
    print_table(_table(rows), console, title=title)
    path = output / f"{stem}.png"
    save(_figure(rows, pictures, experiment.dataset.input_shape, experiment), path)
    console.print(f"Figure: {path}")
    return path


def _widest_class(experiment: Experiment) -> Float:
    """Return the samples of the class that differ most, in an order by the seed.

    Of a narrow class (the digit 1) any stranger's sample is near everybody's.
    """
    pool = experiment.dataset.train
    inputs, labels = experiment.tensors(pool)
    table = inputs.reshape(len(inputs), -1).double().numpy()
    classes = [table[labels.numpy() == label] for label in range(experiment.dataset.classes)]
    widest = max(classes, key=lambda samples: float(samples.var(axis=0).sum()))
    return np.asarray(generator(experiment.config.seed, "leaks").permutation(widest))


def send(samples: Float, form: str) -> ClassMomentCone | None:
    """Return what a node with these samples of one class sends; None if it is nothing."""
    options = dict(FORMS[form])
    if form == PRIVATE:
        clip = float(np.median(np.linalg.norm(samples, axis=1)))
        options |= {"private": PrivateRelease(10.0, 1e-5, clip, (0,))}
        # Repeatable, and another for every node.
        digest = hashlib.blake2b(samples.tobytes()).hexdigest()
        options |= {"noise_seed": derive_seed(0, "leaks", digest)}
    try:
        return build_cone(
            torch.from_numpy(samples).float(), torch.zeros(len(samples)), 2, **options
        )
    except SpaceError:
        return None


def _attack(
    form: str, known: Float, nodes: Sequence[Float], others: Float, low: float, high: float
) -> tuple[dict[str, Any], Float]:
    """Return what both attackers reach, and guesses at the first samples of the first node."""

    def release(samples: Float) -> tuple[Float, Float] | None:
        cone = send(samples, form)
        return None if cone is None else (mean_values(cone)[0], cone.covariance.dense_matrix(0))

    row: dict[str, Any] = {"form": form, "samples": len(nodes[0])}
    strangers = nearest_distances(known, nodes[0]) / (high - low)
    row["near_strangers"] = int((strangers <= NEAR).sum())
    row["auc"] = membership_auc(known, nodes, others, release)
    cone = send(nodes[0], form)
    if cone is None:
        return row | {"rebuilt": 0, "nearest": None}, np.zeros((0, nodes[0].shape[1]))
    guesses = rebuild(cone, 0, low, high, iterations=ITERATIONS)
    distances = nearest_distances(guesses, nodes[0]) / (high - low)
    row |= {"rebuilt": int((distances <= NEAR).sum()), "nearest": float(distances.min())}
    first = [int(((guesses - sample) ** 2).sum(axis=1).argmin()) for sample in nodes[0][:SHOWN]]
    return row, guesses[first]


def _table(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    lines = []
    for size in sorted({row["samples"] for row in rows}):
        of_size = {row["form"]: row for row in rows if row["samples"] == size}
        cells = [str(size), str(of_size[AUTOMATIC]["near_strangers"])]
        for form in FORMS:
            row = of_size[form]
            if row["auc"] is None:
                cells.append("nothing sent")
            else:
                cells.append(f"{row['rebuilt']} of {size} · {row['auc']:.3f}")
        lines.append(cells)
    return TextTable.of(("samples", "near a stranger", *FORMS), lines, names=())


def _figure(
    rows: Sequence[Mapping[str, Any]],
    pictures: Mapping[str, Float],
    shape: Sequence[int],
    experiment: Experiment,
) -> Figure:
    """Return the two curves and, for images, true samples above rebuilt ones."""
    figure = new_figure(4.2, 13.0)
    name = experiment.config.names["dataset"]
    figure.suptitle(
        f"What the moments of one class of {name} give away, by the number of samples behind them",
        x=0.02,
        ha="left",
        fontsize=12,
    )
    grid = figure.add_gridspec(1, 3, width_ratios=(1, 1, 1.3))
    sizes = sorted({row["samples"] for row in rows})
    for place, (key, label) in enumerate(
        (("rebuilt", "share of samples rebuilt"), ("auc", "AUC of telling members"))
    ):
        axes = figure.add_subplot(grid[place])
        for form, colour in LOOKS.items():
            mine = {row["samples"]: row for row in rows if row["form"] == form}
            values = [
                mine[n]["rebuilt"] / n if key == "rebuilt" else mine[n]["auc"] or 0.5 for n in sizes
            ]
            axes.plot(sizes, values, marker="o", color=colour, label=form)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(n) for n in sizes])
        axes.set_xlabel("samples of the class")
        axes.set_ylabel(label)
        axes.set_ylim(-0.03 if key == "rebuilt" else 0.45, 1.03)
    axes.legend(frameon=False, fontsize=8)
    if len(shape) == 3:
        _show(figure, grid[2], pictures, shape)
    return figure


def _show(figure: Figure, place: Any, pictures: Mapping[str, Float], shape: Sequence[int]) -> None:
    inner = place.subgridspec(len(pictures), SHOWN, wspace=0.06, hspace=0.1)
    for line, (title, images) in enumerate(pictures.items()):
        for column in range(SHOWN):
            axes = figure.add_subplot(inner[line, column])
            axes.set_xticks([])
            axes.set_yticks([])
            for side in axes.spines.values():
                side.set_visible(False)
            if column < len(images):
                image = images[column].reshape(shape).transpose(1, 2, 0)
                axes.imshow(image.squeeze(), cmap="gray_r", vmin=0)
            if column == 0:
                axes.set_ylabel(title, rotation=0, ha="right", va="center", fontsize=7, labelpad=3)
