"""Plots of runs with several models: accuracies, who was drawn, steps and their variance."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from simulations.report.figures import COLOURS, MARKERS, Style, new_figure, write_heading
from simulations.report.labels_plot import COLOUR_MAP
from simulations.report.multi_model_table import FULL, models_of, models_rows, several_models
from simulations.report.runs import Run
from simulations.report.summary import Method, SettingSummary


def models_figure(summary: SettingSummary) -> Figure | None:
    """Draw the accuracy of every model and their mean, relative to full participation.

    Returns
    -------
    Figure | None
        None if no run has several models. Without a run of full participation the accuracies
        themselves are drawn.
    """
    rows = models_rows(summary)
    if not rows:
        return None
    models = models_of(summary)
    scale = next((r.mean.mean for r in rows if r.method.runs[0].sampling == FULL), 1.0)
    figure = new_figure(1.9 + 0.38 * len(rows))
    axes = figure.add_subplot()
    places = np.arange(len(rows))[::-1]
    for number, model in enumerate(models):
        shown = [
            (r.by_model[model].mean / scale, y)
            for r, y in zip(rows, places, strict=True)
            if model in r.by_model
        ]
        xs, ys = zip(*shown, strict=True)
        axes.plot(
            xs,
            np.array(ys) + 0.18,
            ls="none",
            marker=MARKERS[(number + 1) % len(MARKERS)],
            color=COLOURS[(number + 1) % len(COLOURS)],
            ms=4.5,
            alpha=0.75,
            label=model,
        )
    for row, y in zip(rows, places, strict=True):
        value = row.relative or row.mean
        axes.errorbar(
            value.mean,
            y - 0.1,
            xerr=value.sd or 0.0,
            marker="o",
            ms=6,
            capsize=3,
            color=COLOURS[0],
            label="mean of the models ± sd over seeds" if y == places[0] else None,
        )
        axes.annotate(
            f"{value.mean:.3f}",
            (value.mean, y - 0.1),
            xytext=(0, -12),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.set_yticks(places, [row.method.name for row in rows])
    axes.set_ylim(-0.65, len(rows) - 0.4)
    relative = any(row.relative for row in rows)
    axes.set_xlabel(
        "final accuracy relative to full participation" if relative else "final accuracy"
    )
    axes.grid(True, axis="x", color="#E3E3E3", linewidth=0.8)
    write_heading(axes, "Accuracy of every model", summary.setting.title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def sampled_figure(summary: SettingSummary) -> Figure | None:
    """Draw how often each node trained each model, one strip per method; one seed.

    Nodes are ordered by their data, so that sampling by importance shows as a gradient.

    Returns
    -------
    Figure | None
        None if no run says who was drawn.
    """
    runs = [(m.name, m.runs[0]) for m in several_models(summary) if m.runs[0].sampled]
    # Everybody is drawn every time: nothing to see.
    runs = [(name, run) for name, run in runs if run.sampling != FULL and run.rounds]
    if not runs:
        return None
    models = models_of(summary)
    runs = _without_repetitions(runs)
    first = runs[0][1]
    nodes = sorted(first.examples, key=lambda n: -sum(first.examples[n].values()))
    figure = new_figure(1.6 + 0.85 * len(runs))
    grid = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    tables = [_drawn_share(run, nodes, models) for _, run in runs]
    largest = max(float(np.nanmax(table)) for table in tables) or 1.0
    norm = Normalize(0, largest)
    image = None
    for axes, (name, _), table in zip(grid, runs, tables, strict=True):
        image = axes.imshow(
            np.ma.masked_less_equal(table, 0),
            cmap=COLOUR_MAP,
            norm=norm,
            aspect="auto",
            interpolation="nearest",
        )
        axes.set_yticks(range(len(models)), [str(i + 1) for i in range(len(models))])
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9.5)
        axes.tick_params(labelsize=7.5, length=0)
    write_heading(
        grid[0], "Who was drawn", f"{summary.setting.title}, seed {first.seed}; rows: models 1, 2 …"
    )
    for axes in grid:
        axes.tick_params(labelsize=7.5)
        axes.yaxis.label.set_fontsize(9.5)
        axes.spines[["top", "right"]].set_visible(True)
    grid[-1].set_xlabel("nodes, from most to fewest training examples", fontsize=10)
    grid[-1].xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    assert image is not None
    bar = figure.colorbar(image, ax=list(grid), pad=0.02, fraction=0.04)
    bar.set_label("share of the rounds", fontsize=9.5)
    bar.ax.tick_params(labelsize=8)
    return figure


def steps_figure(summary: SettingSummary, styles: dict[str, Style]) -> Figure | None:
    """Draw the spread of step sizes by method, and the variance of the step over the rounds.

    Returns
    -------
    Figure | None
        None if no run says anything of its steps.
    """
    methods = [m for m in several_models(summary) if any(r.step_sizes for r in m.runs[0].history)]
    if not methods:
        return None
    figure = new_figure(4.6 + 0.3 * len(methods))
    upper, lower = figure.subplots(
        2, 1, gridspec_kw={"height_ratios": [0.6 + 0.3 * len(methods), 3.0]}
    )
    for place, method in enumerate(reversed(methods)):
        sizes = [s for run in method.runs for r in run.history for s in r.step_sizes.values()]
        low, first, middle, third, high = np.quantile(sizes, [0.05, 0.25, 0.5, 0.75, 0.95])
        colour = styles[method.name].colour
        upper.plot([low, high], [place, place], color=colour, lw=1.2)
        upper.plot([first, third], [place, place], color=colour, lw=5, solid_capstyle="butt")
        upper.plot(middle, place, marker="o", color="white", mec=colour, ms=5)
    upper.set_yticks(range(len(methods)), [m.name for m in reversed(methods)])
    upper.set_ylim(-0.6, len(methods) - 0.4)
    upper.axvline(1, color="#7A7A7A", lw=0.9, ls=":")
    upper.set_xlabel("step size Σ d/p of a model in a round (5 to 95 %, quartiles, median)")
    upper.grid(True, axis="x", color="#E3E3E3", linewidth=0.8)
    write_heading(upper, "Steps and their variance", summary.setting.title)
    shown = _draw_variances(lower, methods, styles)
    if not shown:
        lower.set_visible(False)
    upper.xaxis.label.set_fontsize(10)
    return figure


def _draw_variances(axes: Axes, methods: Sequence[Method], styles: dict[str, Style]) -> bool:
    shown = False
    for method in methods:
        by_round: dict[int, list[float]] = {}
        for run in method.runs:
            for entry in run.history:
                if entry.variances:
                    mean = sum(entry.variances.values()) / len(entry.variances)
                    by_round.setdefault(entry.number, []).append(mean)
        rounds = sorted(by_round)
        values = np.array([np.mean(by_round[r]) for r in rounds])
        if not len(values) or values.max() <= 0:
            continue
        style = styles[method.name]
        values = _smoothed(values)
        axes.plot(rounds, values, color=style.colour, ls=style.line, lw=1.5, label=method.name)
        shown = True
    if shown:
        axes.set_yscale("log")
        axes.set_xlabel("round", fontsize=10)
        axes.set_ylabel("variance of the step\n(estimate, mean of 5 rounds)", fontsize=10)
        axes.grid(True, which="major", color="#E3E3E3", linewidth=0.8)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return shown


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over five rounds around each; fewer at the ends."""
    half = 2
    return np.array([np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def _without_repetitions(runs: Sequence[tuple[str, Run]]) -> list[tuple[str, Run]]:
    """Return each draw once, under the names of all: uniform methods draw alike with one seed."""
    merged: list[tuple[str, Run]] = []
    for name, run in runs:
        same = [i for i, (_, other) in enumerate(merged) if other.sampled == run.sampled]
        if same:
            merged[same[0]] = (f"{merged[same[0]][0]}\n{name}", merged[same[0]][1])
        else:
            merged.append((name, run))
    return merged


def _drawn_share(run: Run, nodes: Sequence[str], models: Sequence[str]) -> NDArray[np.float64]:
    return np.array(
        [[run.sampled.get(n, {}).get(m, 0) / run.rounds for n in nodes] for m in models]
    )
