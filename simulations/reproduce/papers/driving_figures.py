"""How models drive against what they have sent, and what was sent when (Figures 5.5 and A.5)."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from simulations.report.figures import COLOURS, SOFT, add_grid, new_figure, write_heading
from simulations.report.frontiers import Point, draw_frontiers
from simulations.reproduce.papers.driven_runs import L_DD
from simulations.reproduce.papers.equal_loss import BYTES
from simulations.reproduce.papers.findings import Findings

# Protocols that are no points of a frontier, and their lines.
_REFERENCES = {"nosync": "--", "serial": ":"}
_FAMILIES = {"b =": ("periodic", "-"), "Δ": ("dynamic", "--")}


def driving_and_bytes(found: Findings) -> Figure:
    """Draw L_dd against bytes, and bytes over time."""
    figure = new_figure(8.2, width=7.2)
    drivers, sent = figure.subplots(2, 1)
    _draw_drivers(drivers, found)
    write_heading(drivers, "Driving against communication", "L_dd on unseen tracks; 0 is perfect")
    _draw_bytes(sent, found)
    return figure


def _draw_drivers(axes: Axes, found: Findings) -> None:
    families: dict[str, list[Point]] = {}
    for loss in found.of(L_DD):
        sent = found.get(loss.setting, loss.method, BYTES)
        family = _family(loss.method)
        if family is not None and loss.values and sent is not None:
            families.setdefault(family, []).append((sent.mean, loss.mean, loss.method))
    draw_frontiers(axes, families, _plain)
    for method, line in _REFERENCES.items():
        each = next((f for f in found.of(L_DD) if f.method == method and f.values), None)
        if each is not None:
            axes.axhline(each.mean, color=SOFT, ls=line, lw=1.2, label=method)
    # Room below zero for the names of those that drive perfectly.
    top = max(axes.get_ylim()[1], 0.05)
    axes.set_ylim(-0.12 * top, top)
    axes.set_xlabel("MB in all, up + down")
    axes.set_ylabel("L_dd")
    axes.legend(frameon=False, fontsize=8)


def _draw_bytes(axes: Axes, found: Findings) -> None:
    curves = [each for each in found.timelines if _family(each.method)]
    for index, each in enumerate(curves):
        line = next(line for start, (_, line) in _FAMILIES.items() if each.method.startswith(start))
        axes.plot(
            each.rounds,
            each.megabytes,
            color=COLOURS[index % (len(curves) // 2 or 1) % len(COLOURS)],
            ls=line,
            lw=1.5,
            label=each.method,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("round")
    axes.set_ylabel("MB so far")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    add_grid(axes)
    write_heading(axes, "Communication over time", "first seed")


def _family(method: str) -> str | None:
    return next((name for start, (name, _) in _FAMILIES.items() if method.startswith(start)), None)


def _plain(megabytes: float) -> str:
    return f"{megabytes:,g}"
