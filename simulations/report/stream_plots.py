"""Runs on streams: what a byte buys, and what happened when.

Two plots, both of the cumulative loss that nodes suffer before they learn from each batch (Kamp et
al. 2018): its final value against the bytes of the whole run, one point per run of a protocol; and
loss and bytes over time, with lines at drifts and marks at full synchronisations.
"""

import math
import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from simulations.report.figures import COLOURS, MARKERS, new_figure, write_heading
from simulations.report.runs import Run
from simulations.report.summary import Method, SettingSummary, format_bytes

# More curves than this cannot be told apart.
_MOST_CURVES = 6
_MOST_MARKS = 300


# Where a family's labels stand beside its points: the side, and how many points of print away.
# Frontiers fall to the right, so there is room below on the left and above on the right, and points
# of several families often lie close together.
_LABEL_PLACES = ((-1, 4), (-1, 10), (1, 4), (1, 10))


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
    points: dict[str, list[tuple[float, float, str]]] = {}
    for method in _streamed(summary):
        if method.bytes_up + method.bytes_down > 0:
            losses = [run.cumulative_loss / run.setting.nodes for run in _complete(method)]
            point = (method.bytes_up + method.bytes_down, sum(losses) / len(losses), method.name)
            points.setdefault(family_of(method.name), []).append(point)
    if sum(map(len, points.values())) < 2:
        return None
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    for index, (family, members) in enumerate(sorted(points.items())):
        xs, ys, names = zip(*sorted(members), strict=True)
        axes.plot(
            xs,
            ys,
            label=family,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            linewidth=1.4,
            markersize=5.5,
        )
        for x, y, name in zip(xs, ys, names, strict=True):
            setting = name.removeprefix(family).strip()
            if len(points) <= 4:
                side, away = _LABEL_PLACES[index % len(_LABEL_PLACES)]
                axes.annotate(
                    setting,
                    (x, y),
                    xytext=(side * away, side * away),
                    textcoords="offset points",
                    fontsize=7.5,
                    color=COLOURS[index % len(COLOURS)],
                    ha="left" if side > 0 else "right",
                    va="bottom" if side > 0 else "top",
                )
    axes.set_xscale("log")
    axes.margins(x=0.14, y=0.13)  # room for what stands beside the points
    _label_bytes(axes, "x")
    axes.set_xlabel("bytes of the run, up + down (1 MB = 10⁶ bytes)")
    axes.set_ylabel("cumulative loss per node")
    axes.grid(True, which="major", color="#E3E3E3", linewidth=0.8)
    write_heading(axes, "Cumulative loss against bytes", summary.setting.title)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
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
        for drift in sorted({d for _, run in runs for d in run.drifts}):
            axes.axvline(drift, color="#5F5F5F", linestyle=(0, (4, 2)), linewidth=1.0, zorder=0)
        axes.grid(True, axis="y", color="#E3E3E3", linewidth=0.8)
    lower.set_yscale("log")
    _label_bytes(lower, "y")
    upper.set_ylabel("cumulative loss per node")
    lower.set_ylabel("bytes so far, up + down")
    lower.set_xlabel("round (dashed: drift; ×: full synchronisation)")
    for side in ("top", "right"):
        lower.spines[side].set_visible(False)
    write_heading(upper, "Loss and bytes over time", summary.setting.title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
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


def _label_bytes(axes: Axes, side: str) -> None:
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if side == "x" else (1,)))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: re.sub(r"\.0+(?= )", "", format_bytes(value)))
    )
    axis.set_minor_formatter(NullFormatter())
