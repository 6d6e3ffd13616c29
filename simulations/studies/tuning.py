"""What does a little public data add? Fine-tuning curves at equal learning rates.

GEMS 2019, Figure 3: the released code tunes GEMS and the average with Adam at 1e-2 but the model
trained on the public sample alone ("raw") at 1e-3. Here all have the same rate. The class-moment
cone takes the public sample into its objective instead, which has no rate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gems_flwr.construct import build_cone
from gems_flwr.intersect import solve_cones
from gems_flwr.tuning import fine_tune_linear, tune_cones
from simulations.config import compose_config
from simulations.experiment import Experiment
from simulations.report.figures import new_figure, save, write_heading
from simulations.studies.nodes import accuracy, trained_nodes
from simulations.training import torch_threads

SIZES = (100, 200, 500, 1000)
RATES = (1e-3, 1e-2)
SEEDS = (0, 1, 2)
STYLES = {
    "cone, joint objective": ("#0072B2", "o"),
    "average = ball": ("#D55E00", "s"),
    "public sample alone": ("#009E73", "D"),
}

Curves = dict[str, dict[str, dict[str, list[float]]]]


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the study; return the path of its figure."""
    curves: Curves = {}
    untuned: dict[str, list[float]] = {}
    for seed in track(
        SEEDS, "seeds", console=console, transient=True, disable=not console.is_terminal
    ):
        config = compose_config(["strategy=one_shot_average", *overrides, f"seed={seed}"])
        with torch_threads(config.backend.threads):
            _one_seed(Experiment(config), console, curves, untuned)
    output.mkdir(parents=True, exist_ok=True)
    stem = f"tuning-{config.names['dataset']}-{config.nodes}"
    result = {"curves": curves, "untuned": untuned}
    (output / f"{stem}.json").write_text(json.dumps(result, indent=2))
    console.print(_table(curves, untuned))
    path = output / f"{stem}.png"
    save(_figure(curves, untuned, f"{config.names['dataset']} over {config.nodes} nodes"), path)
    console.print(f"Figure: {path}")
    return path


def _one_seed(
    experiment: Experiment, console: Console, curves: Curves, untuned: dict[str, list[float]]
) -> None:
    classes, seed = experiment.dataset.classes, experiment.config.seed
    nodes = trained_nodes(experiment, console)
    average = np.mean([node.layer.center for node in nodes], axis=0).astype(np.float64)
    cones = [build_cone(node.inputs, node.labels, classes) for node in nodes]
    cone = solve_cones(cones).point
    public, labels = map(torch.from_numpy, experiment.output_inputs(experiment.dataset.public))
    test, truth = map(torch.from_numpy, experiment.output_inputs(experiment.dataset.test))

    def note(name: str, rate: float, size: int, point: np.ndarray) -> None:
        series = curves.setdefault(name, {}).setdefault(str(rate), {}).setdefault(str(size), [])
        series.append(accuracy(point, test, truth, classes))

    for name, point in (("cone, joint objective", cone), ("average = ball", average)):
        untuned.setdefault(name, []).append(accuracy(point, test, truth, classes))
    for size in [each for each in SIZES if each <= len(labels)]:
        x, y = public[:size], labels[:size]
        joint = tune_cones(cones, x, y, start=cone).point
        for rate in RATES:
            note("cone, joint objective", rate, size, joint)
            tuned = fine_tune_linear(average, x, y, classes, rate=rate, seed=seed)
            note("average = ball", rate, size, tuned)
            raw = fine_tune_linear(np.zeros_like(average), x, y, classes, rate=rate, seed=seed)
            note("public sample alone", rate, size, raw)


def _table(curves: Curves, untuned: dict[str, list[float]]) -> Table:
    table = Table(title="Test accuracy, mean over seeds", title_justify="left")
    sizes = _sizes(curves)
    for heading in ("Adam's rate", "method", "untuned", *sizes):
        table.add_column(heading, justify="right")
    for rate in RATES:
        for name in STYLES:
            before = f"{np.mean(untuned[name]):.3f}" if name in untuned else "–"
            series = curves[name][str(rate)]
            cells = [f"{np.mean(series[size]):.3f}" for size in sizes]
            table.add_row(f"{rate:g}", name, before, *cells)
    return table


def _figure(curves: Curves, untuned: dict[str, list[float]], subtitle: str) -> Figure:
    figure = new_figure(7.2)
    sizes = _sizes(curves)
    samples = [int(size) for size in sizes]
    for axes, rate in zip(figure.subplots(2, 1), RATES, strict=True):
        for name, (colour, marker) in STYLES.items():
            series = curves[name][str(rate)]
            means = [float(np.mean(series[size])) for size in sizes]
            spread = [float(np.std(series[size])) for size in sizes]
            label = name if rate == RATES[0] else None
            axes.errorbar(
                samples, means, spread, color=colour, marker=marker, label=label, capsize=3
            )
            if name in untuned:
                axes.axhline(float(np.mean(untuned[name])), color=colour, ls=":", lw=1.2)
        axes.set_xscale("log")
        axes.set_xticks(samples, sizes)
        axes.minorticks_off()
        axes.set_ylabel("test accuracy")
        axes.grid(axis="y", color="#E5E5E5")
        write_heading(axes, f"Fine-tuning, Adam at {rate:g}", f"{subtitle}; dotted: untuned")
    axes.set_xlabel("public samples")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return figure


def _sizes(curves: Curves) -> list[str]:
    """Return the sizes that there was enough public data for."""
    return list(curves[next(iter(STYLES))][str(RATES[0])])
