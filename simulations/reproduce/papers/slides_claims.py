"""What we found about the slides' FedAvg table, in a sentence and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from matplotlib.figure import Figure

from simulations.report.figures import (
    SOFT,
    add_grid,
    label_decades,
    legend_below,
    new_figure,
    style,
    write_heading,
)
from simulations.reproduce.papers.findings import Finding, Findings, Line, compare


def fedavg_found(findings: Findings) -> str:
    """Return how FedAvg's rounds compare with the published ones.

    Parameters
    ----------
    findings : Findings
        The kept ones of ``slides_fedavg``.
    """
    lines = [line for line in compare(findings) if line.published]
    ratios = [line.finding.mean / line.published.mean for line in _reached(lines) if line.published]
    if not ratios:
        return "No cell of FedAvg's table reached its target."
    said = (
        f"With rates searched on validation data FedAvg reaches its target in {len(ratios)} of "
        f"{len(lines)} cells of the table; it takes {min(ratios):.2f} to {max(ratios):.2f} times "
        f"the published rounds, {statistics.median(ratios):.2f} in the median."
    )
    gains = [_gain(findings, column) for column in findings.methods()]
    told = [gain for gain in gains if gain]
    return f"{said} Ten clients a round instead of one save {'; '.join(told)}." if told else said


def _reached(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line.finding.values]


def _gain(findings: Findings, column: str) -> str:
    """Return by what factor ten clients need fewer rounds than one, ours and the paper's."""
    pair = [
        line
        for setting in ("2NN, C = 0", "2NN, C = 0.1")
        for line in compare(findings)
        if (line.finding.setting, line.finding.method) == (setting, column)
    ]
    if len(pair) < 2 or len(_reached(pair)) < 2 or not all(line.published for line in pair):
        return ""
    one, ten = pair
    assert one.published is not None
    assert ten.published is not None
    ours = one.finding.mean / ten.finding.mean
    theirs = one.published.mean / ten.published.mean
    return f"a factor of {ours:.1f} ({column}; the paper {theirs:.1f})"


def fedavg_draw(findings: Findings) -> Figure:
    """Draw our rounds against the published ones: on the diagonal they are equal."""
    lines = [line for line in compare(findings) if line.published]
    reached = _reached(lines)
    figure = new_figure(4.6)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    ends = [line.published.mean for line in lines if line.published]
    ends += [line.finding.mean for line in reached]
    span = (min(ends) / 1.6, max(ends) * 1.6)
    axes.plot(span, span, color=SOFT, lw=1, label="as published")
    columns = list(dict.fromkeys(line.finding.method for line in reached))
    for index, column in enumerate(columns):
        look = style(index)
        for network, filled in (("2NN", True), ("CNN", False)):
            own = [
                line
                for line in reached
                if line.finding.method == column and line.finding.setting.startswith(network)
            ]
            if not own:
                continue
            axes.errorbar(
                [line.published.mean for line in own if line.published],
                [line.finding.mean for line in own],
                yerr=[_spread(line.finding) for line in own],
                fmt=look.marker,
                color=look.colour,
                markerfacecolor=look.colour if filled else "white",
                capsize=3,
                label=f"{network}, {column}",
            )
    axes.set_xlim(span)
    axes.set_ylim(span)
    for axis in (axes.xaxis, axes.yaxis):
        label_decades(axis, lambda value: f"{value:,.0f}")
    axes.set_xlabel("published rounds")
    axes.set_ylabel("our rounds")
    add_grid(axes)
    write_heading(
        axes, "FedAvg's rounds to the target", "± deviation over seeds, where there are several"
    )
    legend_below(figure, axes)
    return figure


def _spread(found: Finding) -> float:
    return found.sd or 0.0
