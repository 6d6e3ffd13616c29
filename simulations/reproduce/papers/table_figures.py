"""Tables as pictures: the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulations.report.figures import (
    COLOURS,
    SOFT,
    add_grid,
    draw_means,
    hide_frame,
    label_decades,
    legend_below,
    new_figure,
    style,
    write_heading,
)
from simulations.reproduce.papers.findings import Findings, Line, compare


def _columns(names: Sequence[str]) -> list[str]:
    """Return what stands before the first comma of the names: the data sets, say."""
    return list(dict.fromkeys(name.split(", ")[0] for name in names))


def method_panels(found: Findings) -> Figure:
    """Draw a table: a panel per setting, methods from top to bottom, paper beside ours."""
    lines = [each for each in compare(found) if "accuracy" in each.finding.quantity]
    settings = list(dict.fromkeys(each.finding.setting for each in lines))
    methods = list(dict.fromkeys(each.finding.method for each in lines))
    across = min(3, len(settings))
    down = -(-len(settings) // across)
    figure = new_figure(down * (0.24 * len(methods) + 0.9) + 0.6, width=4.2 + 2.2 * across)
    panels = figure.subplots(down, across, squeeze=False, sharex=False, sharey=True)
    places = {method: -index for index, method in enumerate(methods)}
    for axes in panels.flat[len(settings) :]:
        axes.set_visible(False)
    for index, (axes, setting) in enumerate(zip(panels.flat, settings, strict=False)):
        own = [each for each in lines if each.finding.setting == setting]
        _dots(axes, own, places)
        axes.set_title(setting, loc="left", fontsize=10, fontweight="bold")
        axes.set_yticks(list(places.values()), methods, fontsize=8.5)
        axes.set_xlim(0, 1)
        add_grid(axes)
        hide_frame(axes)
        if index + across >= len(settings):  # nothing stands below
            axes.set_xlabel(own[0].finding.quantity)
    legend_below(figure, panels[0, 0])
    return figure


def _dots(axes: Axes, lines: Sequence[Line], places: dict[str, int]) -> None:
    ours = [each for each in lines if each.finding.values]
    draw_means(
        axes,
        [each.finding.mean for each in ours],
        [places[each.finding.method] for each in ours],
        [each.finding.sd or 0.0 for each in ours],
        colour=COLOURS[0],
        marker="o",
        label="ours, ± deviation over seeds",
        line="none",
        along_x=True,
    )
    theirs = [each for each in lines if each.published is not None]
    if theirs:
        draw_means(
            axes,
            [each.published.mean for each in theirs if each.published],
            [places[each.finding.method] - 0.25 for each in theirs],
            [each.published.sd or 0.0 for each in theirs if each.published],
            colour=SOFT,
            marker="D",
            label="paper",
            line="none",
            size=4.5,
            along_x=True,
            markerfacecolor="white",
        )


def size_panels(found: Findings) -> Figure:
    """Draw accuracy against hidden neurons, a panel per data set."""
    titles = _columns(found.settings())
    figure = new_figure(4.2, width=3.0 + 2.6 * len(titles))
    panels = figure.subplots(1, len(titles), squeeze=False, sharey=True)
    lines = compare(found)
    for axes, title in zip(panels.flat, titles, strict=True):
        own = [e for e in lines if e.finding.setting.startswith(title)]
        accuracies = [e for e in own if "accuracy" in e.finding.quantity and e.finding.values]
        sizes = {
            (e.finding.setting, e.finding.method): e.finding.mean
            for e in own
            if e.finding.quantity == "hidden neurons" and e.finding.values
        }
        published = {
            e.finding.setting: e.published.mean
            for e in own
            if e.finding.quantity == "hidden neurons" and e.published
        }
        for index, method in enumerate(dict.fromkeys(e.finding.method for e in accuracies)):
            mine = [e.finding for e in accuracies if e.finding.method == method]
            points = sorted(
                (sizes.get((f.setting, f.method), f.x or 0.0), f.mean, f.sd or 0.0) for f in mine
            )
            xs, means, deviations = zip(*points, strict=True)
            look = style(index)
            draw_means(
                axes, xs, means, deviations, colour=look.colour, marker=look.marker, label=method
            )
        theirs = [
            (published[e.finding.setting], e.published.mean)
            for e in accuracies
            if e.published and e.finding.setting in published and "tuned" in e.finding.method
        ]
        axes.plot(
            *zip(*theirs, strict=True) if theirs else ([], []),
            "D",
            color=SOFT,
            markerfacecolor="white",
            label="paper: GEMS, tuned",
        )
        axes.set_xlabel("hidden neurons")
        add_grid(axes)
        axes.set_ylim(0, 1)
        write_heading(axes, title, "5 nodes")
    panels[0, 0].set_ylabel("accuracy (HAM10000: balanced)")
    legend_below(figure, panels[0, 0])
    return figure


def rounds_bars(found: Findings) -> Figure:
    """Draw the rounds to a target beside the published ones, column by column of the table."""
    lines = compare(found)
    columns = list(dict.fromkeys(each.finding.method for each in lines))
    lines = [each for column in columns for each in lines if each.finding.method == column]
    figure = new_figure(0.46 * len(lines) + 0.4 * len(columns) + 1.6)
    axes = figure.subplots()
    place, places, before = 0.0, [], ""
    for each in lines:
        # A gap between the columns of the table.
        place -= 1.0 if each.finding.method == before else 1.5
        before = each.finding.method
        places.append(place)
        _rounds_bar(axes, each, place)
    axes.set_ylim(place - 0.7, places[0] + 0.7)
    axes.set_xscale("log")
    axes.set_xlim(left=_LEAST_ROUNDS)
    # Room for the numbers beside the longest bars.
    axes.set_xlim(right=axes.get_xlim()[1] * 3)
    label_decades(axes.xaxis, lambda value: f"{value:,.0f}")
    names = [f"{each.finding.method}\n{each.finding.setting}" for each in lines]
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlabel("rounds to the target accuracy, log scale")
    add_grid(axes, "x")
    hide_frame(axes)
    write_heading(
        axes,
        "Rounds that FedAvg needs",
        "100 clients on MNIST, 2NN to 97 %, CNN to 99 %; dots are seeds",
    )
    for label, colour in (("paper", _PAPER), ("ours", COLOURS[0])):
        axes.barh([places[0]], [0], 0, color=colour, label=label)
    legend_below(figure, axes, columns=2)
    return figure


_PAPER = "#C8C8C8"
_LEAST_ROUNDS = 5


def _rounds_bar(axes: Axes, line: Line, place: float) -> None:
    found, known = line.finding, line.published
    bars = [(0.2, known.mean, _PAPER)] if known else []
    bars += [(-0.2, found.mean, COLOURS[0])] if found.values else []
    for above, rounds, colour in bars:
        axes.barh(place + above, rounds, 0.38, color=colour)
        right = max([rounds, *(found.values if above < 0 else [])])
        axes.text(right * 1.08, place + above, f"{rounds:,.0f}", va="center", fontsize=7.5)
    if len(found.values) > 1:
        axes.plot(found.values, [place - 0.2] * len(found.values), ".", color="black", ms=4)
    if found.missing:
        note = f"{found.missing} of {len(found.by_seed)} seeds not reached"
        axes.text(_LEAST_ROUNDS, place - 0.2, f" {note}", va="center", fontsize=7.5)
