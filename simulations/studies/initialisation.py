"""How different may nodes start? Noise on the initial weights against the averaging period.

Kamp et al. 2018, Figure A.8: ``python -m simulations.studies initialisation``. Every node adds
noise of scale ε, relative to the spread of the common initial weights, and learns from 50 batches;
shown is the test accuracy of the averaged model relative to ε = 0, b = 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from simulations.config import compose_config
from simulations.report.figures import COLOURS, MARKERS, new_figure, save, write_heading
from simulations.run import run

NOISES = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
PERIODS = (1, 2, 5, 10, 25, 50)
DELTA = 0.7

Accuracies = dict[str, dict[str, dict[str, float]]]


def run_all(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the study; return the path of its figure."""
    found: Accuracies = {}
    for name, options in (
        ("periodic", ["strategy=periodic", "strategy.b={}"]),
        ("dynamic", ["strategy=dynamic", f"strategy.delta={DELTA}", "strategy.check_every={}"]),
    ):
        for noise in NOISES:
            for period in PERIODS:
                chosen = [option.format(period) for option in options]
                config = compose_config(
                    [
                        "experiment=initialisation",
                        *chosen,
                        f"stream.initial_noise={noise}",
                        *overrides,
                        "progress=false",
                    ]
                )
                folder = output / "initialisation" / config.run_name()
                result = run(config, folder, Console(quiet=True))
                by_noise = found.setdefault(name, {})
                by_noise.setdefault(f"{noise:g}", {})[str(period)] = result["accuracy"]
    path = output / "initialisation.png"
    path.with_suffix(".json").write_text(json.dumps(found, indent=2))
    for name, rows in found.items():
        console.print(_table(name, rows))
    save(_figure(found), path)
    console.print(f"Figure: {path}")
    return path


def _table(name: str, rows: dict[str, dict[str, float]]) -> Table:
    table = Table(title=f"{name}: test accuracy of the averaged model", title_justify="left")
    for heading in ("ε", *(f"b={b}" for b in PERIODS)):
        table.add_column(heading, justify="right")
    for noise, by_period in rows.items():
        table.add_row(noise, *(f"{by_period[str(b)]:.3f}" for b in PERIODS))
    return table


def _figure(found: Accuracies) -> Figure:
    figure = new_figure(6.8)
    for axes, (name, rows) in zip(figure.subplots(2, 1, sharex=True), found.items(), strict=True):
        best = rows["0"]["1"]
        for index, (noise, by_period) in enumerate(rows.items()):
            axes.plot(
                PERIODS,
                [by_period[str(b)] / best for b in PERIODS],
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                markersize=5,
                label=f"ε = {noise}" if name == "periodic" else None,
            )
        axes.set_xscale("log")
        axes.set_xticks(PERIODS, [str(b) for b in PERIODS])
        axes.minorticks_off()
        axes.set_ylabel("relative accuracy")
        axes.grid(axis="y", color="#E5E5E5")
        setting = "10 nodes, 50 batches of 10 MNIST digits"
        write_heading(axes, name, setting if name == "periodic" else f"{setting}, Δ = {DELTA}")
    axes.set_xlabel("b, batches between averagings or checks")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return figure
