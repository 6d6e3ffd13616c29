"""Curves over a setting, and the grid of two epsilons."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulations.report.figures import (
    COLOURS,
    MARKERS,
    add_grid,
    draw_means,
    legend_below,
    new_figure,
    write_heading,
)
from simulations.reproduce.papers.findings import Finding, Findings

_TUNED = {"GEMS": 0, "average": 1, "local": 2, "raw": 3}


def tuning_panels(found: Findings) -> Figure:
    """Draw fine-tuning curves: rows are data sets, columns are equal rates and as released."""
    curves = [f for f in found.findings if f.x is not None and "accuracy" in f.quantity]
    pairs = list(dict.fromkeys(tuple(f.setting.split(", ")[:2]) for f in curves))
    cases = {
        "equal rates of 0.001": dict.fromkeys(_TUNED, 0.001),
        "as released": {"GEMS": 0.01, "average": 0.01, "local": 0.001, "raw": 0.001},
        "equal rates of 0.01": dict.fromkeys(_TUNED, 0.01),
    }
    figure = new_figure(2.5 * len(pairs) + 0.8, width=10.4)
    panels = figure.subplots(len(pairs), len(cases), squeeze=False, sharex=True, sharey="row")
    for row, (title, model) in zip(panels, pairs, strict=True):
        own = [f for f in curves if f.setting.startswith(f"{title}, {model}, ")]
        for axes, (case, rates) in zip(row, cases.items(), strict=True):
            for method, index in _TUNED.items():
                _curve(axes, own, f"{method}, rate {rates[method]:g}", method, index)
            joint = next((f.method for f in own if "joint" in f.method), None)
            if joint:
                _curve(axes, own, joint, "GEMS cone, public sample in its objective", 4)
            axes.set_xscale("log")
            samples = sorted({f.x for f in own if f.x})
            axes.set_xticks(samples, [f"{each:g}" for each in samples])
            axes.minorticks_off()
            add_grid(axes)
            write_heading(axes, f"{title}, {model}", case)
        row[0].set_ylabel(own[0].quantity)
    for axes in panels[-1]:
        axes.set_xlabel("public samples")
    legend_below(figure, panels[0, 0], columns=5)
    return figure


def _curve(axes: Axes, own: Sequence[Finding], name: str, label: str, index: int) -> None:
    points = sorted((f.x or 0.0, f.mean, f.sd or 0.0) for f in own if f.method == name and f.values)
    if points:
        xs, means, deviations = zip(*points, strict=True)
        draw_means(
            axes,
            xs,
            means,
            deviations,
            colour=COLOURS[index],
            marker=MARKERS[index],
            label=label,
            # The second curve often lies on the first.
            line="--" if index == 1 else "-",
            size=4 if index == 1 else 6,
        )


def epsilon_grid(found: Findings) -> Figure:
    """Draw where two balls meet: an accuracy for every pair of ε, crosses where they do not."""
    kinds = list(dict.fromkeys(f.method for f in found.findings))
    figure = new_figure(5.0, width=5.2 * len(kinds))
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)
    shown = None
    for axes, kind in zip(panels.flat, kinds, strict=True):
        met, apart = [], []
        for each in found.of("accuracy"):
            if each.method != kind or not each.values:
                continue
            first, second = map(float, each.setting.removeprefix("ε = ").split(" and "))
            empty = found.get(each.setting, kind, "empty")
            if empty is not None and empty.mean > 0.5:
                apart.append((first, second))
            else:
                met.append((first, second, each.mean))
        if met:
            x, y, accuracy = zip(*met, strict=True)
            shown = axes.scatter(x, y, c=accuracy, cmap="viridis", vmin=0, vmax=1, s=90)
        if apart:
            axes.scatter(*zip(*apart, strict=True), marker="x", color=COLOURS[1], s=45)
        axes.set_xlabel("ε of the first node")
        axes.set_xlim(0, 1.03)
        axes.set_ylim(0, 1.03)
        write_heading(axes, kind, "×: the balls do not meet, proved")
    panels[0, 0].set_ylabel("ε of the second node")
    if shown is not None:
        figure.colorbar(shown, ax=list(panels.flat), label="test accuracy of the common model")
    return figure


def neuron_curves(found: Findings) -> Figure:
    """Draw hidden neurons and accuracy against ε."""
    figure = new_figure(6.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, quantity in ((upper, "hidden neurons"), (lower, "accuracy")):
        _by_method(axes, found, quantity)
        axes.set_xscale("log")
        axes.set_ylabel(quantity if quantity != "accuracy" else "test accuracy")
        add_grid(axes)
    write_heading(upper, "Size of the merged network", "two nodes with 50 hidden neurons each")
    lower.set_xlabel("ε: share by which the network's loss may rise if a neuron moves")
    legend_below(figure, lower, columns=2)
    return figure


def loss_curves(found: Findings) -> Figure:
    """Draw loss and accuracy against the mixing of the learners' data."""
    figure = new_figure(6.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, quantity in ((upper, "loss"), (lower, "accuracy")):
        _by_method(axes, found, quantity)
        axes.set_ylabel(f"test {quantity}")
        add_grid(axes)
    write_heading(upper, "How different the learners' data are", "γ = 0.5: alike; 1: disjoint")
    lower.set_xlabel("γ")
    legend_below(figure, lower)
    return figure


def _by_method(axes: Axes, found: Findings, quantity: str) -> None:
    for index, method in enumerate(found.methods()):
        _curve(axes, found.of(quantity), method, method, index)


def initialisation_curves(found: Findings) -> Figure:
    """Draw relative accuracy against the period, a curve per scale of noise."""
    methods = found.methods()
    figure = new_figure(3.4 * len(methods) + 0.5)
    panels = figure.subplots(len(methods), 1, squeeze=False, sharex=True)
    for axes, method in zip(panels.flat, methods, strict=True):
        own = [f for f in found.findings if f.method == method and f.values]
        best = next(f.mean for f in own if f.setting == "ε = 0, b = 1")
        for index, noise in enumerate(dict.fromkeys(f.setting.split(", ")[0] for f in own)):
            points = sorted(
                (f.x or 0.0, f.mean / best) for f in own if f.setting.startswith(f"{noise},")
            )
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index],
                markersize=5,
                label=noise,
            )
        axes.set_xscale("log")
        periods = sorted({f.x for f in own if f.x})
        axes.set_xticks(periods, [f"{each:g}" for each in periods])
        axes.minorticks_off()
        axes.set_ylabel("relative accuracy")
        add_grid(axes)
        write_heading(axes, method, "10 learners, 50 batches each; relative to ε = 0, b = 1")
    panels[-1, 0].set_xlabel("b, batches between averagings or checks")
    legend_below(figure, panels[0, 0], columns=6)
    return figure
