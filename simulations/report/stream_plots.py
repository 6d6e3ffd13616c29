"""Runs on streams: what a byte buys, and what happened when.

Two plots, both of the cumulative loss that nodes suffer before they learn from each batch (Kamp et
al. 2018): its final value against the bytes of the whole run, one point per run of a protocol; and
loss and bytes over time, with lines at drifts and marks at full synchronisations.
"""

import math
import re
from collections.abc import Sequence

from matplotlib.figure import Figure

from simulations.report.figures import (
    COLOURS,
    add_grid,
    hide_frame,
    label_decades,
    legend_below,
    mark_drifts,
    new_figure,
    write_heading,
)
from simulations.report.frontiers import Point, draw_frontiers
from simulations.report.runs import Run
from simulations.report.summary import Method, SettingSummary, tick_bytes

# More curves than this cannot be told apart.
_MOST_CURVES = 6
_MOST_MARKS = 300
_LONGEST_NAME = 32  # characters
# Points of more families than this leave no room for names.
_MOST_NAMED = 4


def family_of(name: str) -> str:
    """Return a method's name without its setting: ``dynamic Δ=0.7`` is one of ``dynamic``."""
    return re.sub(r"\s+\S+=.*$", "", name)


def frontier_figure(summary: SettingSummary) -> Figure | None:
    """Draw the cumulative loss of each protocol against its bytes.

    Returns
    -------
    Figure | None
        None if fewer than two methods have a cumulative loss and have sent anything.
    """
    points: dict[str, list[Point]] = {}
    for method in _streamed(summary):
        if method.bytes_up + method.bytes_down > 0:
            losses = [run.cumulative_loss / run.setting.nodes for run in _complete(method)]
            point = (method.bytes_up + method.bytes_down, sum(losses) / len(losses), method.name)
            points.setdefault(family_of(method.name), []).append(point)
    if sum(map(len, points.values())) < 2:
        return None
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    families = dict(sorted(points.items()))
    draw_frontiers(axes, families, tick_bytes, with_names=len(families) <= _MOST_NAMED)
    axes.set_xlabel("bytes of the run, up + down (1 MB = 10⁶ bytes)")
    axes.set_ylabel("cumulative loss per node")
    write_heading(axes, "Cumulative loss against bytes", summary.setting.title)
    legend_below(figure, fontsize=10)
    return figure


def timeline_figure(summary: SettingSummary) -> Figure | None:
    """Draw cumulative loss and cumulative bytes over rounds, for a choice of protocols.

    Of each family the run in the middle is drawn, so that as many families as possible are seen.

    Returns
    -------
    Figure | None
        None if no run has a cumulative loss by round.
    """
    chosen = _middle_of_each_family(_streamed(summary))[:_MOST_CURVES]
    runs = [(m.name, run) for m in chosen for run in _complete(m)[:1] if _timed(run)]
    if not runs:
        return None
    figure = new_figure(6.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for index, (name, run) in enumerate(runs):
        colour = COLOURS[index % len(COLOURS)]
        rounds = [r.number for r in run.history if r.cumulative_loss is not None]
        losses = [r.cumulative_loss for r in run.history if r.cumulative_loss is not None]
        upper.plot(
            rounds, [x / run.setting.nodes for x in losses], color=colour, label=name, lw=1.5
        )
        numbers, sums, total = [], [], 0
        for entry in run.history:
            total += entry.bytes_up + entry.bytes_down
            numbers.append(entry.number)
            sums.append(total)
        if total == 0:
            continue
        lower.plot(numbers, sums, color=colour, lw=1.5, drawstyle="steps-post")
        at = dict(zip(numbers, sums, strict=True))
        full = [r for r in run.full_synchronisations if at.get(r)]
        if len(full) <= _MOST_MARKS:
            lower.plot(
                full, [at[r] for r in full], color=colour, marker="x", ms=3.5, ls="none", mew=0.8
            )
    for axes in (upper, lower):
        mark_drifts(axes, (drift for _, run in runs for drift in run.drifts))
        add_grid(axes, "y")
    lower.set_yscale("log")
    label_decades(lower.yaxis, tick_bytes)
    upper.set_ylabel("cumulative loss per node")
    lower.set_ylabel("bytes so far, up + down")
    lower.set_xlabel("round (dashed: drift; ×: full synchronisation)")
    hide_frame(lower)
    write_heading(upper, "Loss and bytes over time", summary.setting.title)
    # Two long names side by side would run over the edge.
    columns = 2 if max(len(name) for name, _ in runs) <= _LONGEST_NAME else 1
    legend_below(figure, columns=columns, fontsize=10)
    return figure


def _streamed(summary: SettingSummary) -> list[Method]:
    return [method for method in summary.methods if _complete(method)]


def _complete(method: Method) -> list[Run]:
    return [run for run in method.runs if not math.isnan(run.cumulative_loss)]


def _timed(run: Run) -> bool:
    return sum(entry.cumulative_loss is not None for entry in run.history) > 1


def _middle_of_each_family(methods: Sequence[Method]) -> list[Method]:
    families: dict[str, list[Method]] = {}
    for method in methods:
        families.setdefault(family_of(method.name), []).append(method)
    return [
        sorted(members, key=lambda m: m.bytes_up + m.bytes_down)[len(members) // 2]
        for _, members in sorted(families.items())
    ]
