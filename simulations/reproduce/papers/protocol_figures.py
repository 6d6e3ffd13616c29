"""What a byte buys on streams: loss against bytes, and both over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from simulations.report.figures import (
    COLOURS,
    MARKERS,
    SOFT,
    add_grid,
    draw_means,
    hide_frame,
    mark_drifts,
    new_figure,
    write_heading,
)
from simulations.report.frontiers import Point, draw_frontiers
from simulations.reproduce.papers.equal_loss import AT_EQUAL_LOSS, BYTES, LOSS
from simulations.reproduce.papers.findings import Findings, Timeline

# Protocols without messages to speak of, and their lines.
_REFERENCES = {"nosync": "--", "serial": ":"}


def frontier_and_timeline(found: Findings) -> Figure:
    """Draw loss against bytes, and both over time."""
    figure = new_figure(9.6, width=7.2)
    frontier, losses, sent = figure.subplots(3, 1, height_ratios=(1.5, 1, 1))
    setting = found.settings()[0]
    _frontier(frontier, found, setting)
    drifts = sorted({d for t in found.timelines for d in t.drifts})
    chosen = _spread_out([t for t in found.timelines if t.setting == setting])
    for index, each in enumerate(chosen):
        # Some report their loss only when they synchronise.
        known = [
            (number, loss)
            for i, (number, loss) in enumerate(zip(each.rounds, each.loss, strict=True))
            if i == 0 or loss != each.loss[i - 1]
        ]
        losses.plot(*zip(*known, strict=True), color=COLOURS[index], label=each.method, lw=1.5)
        if each.megabytes[-1] > 0:
            sent.plot(each.rounds, each.megabytes, color=COLOURS[index], lw=1.5)
    for axes in (losses, sent):
        mark_drifts(axes, drifts)
        add_grid(axes)
    losses.set_ylabel("loss per learner so far")
    sent.set_ylabel("MB so far")
    sent.set_yscale("log")
    sent.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    sent.yaxis.set_minor_formatter(NullFormatter())
    hide_frame(sent)
    sent.set_xlabel("round (dashed: drift)" if drifts else "round")
    write_heading(losses, "Over time", "a choice of protocols")
    losses.legend(frameon=False, fontsize=8.5, ncols=2)
    return figure


def _spread_out(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Return some of each kind of protocol: more curves than six cannot be told apart."""
    kinds: dict[str, list[Timeline]] = {}
    for each in timelines:
        kinds.setdefault(_family(each.method), []).append(each)
    chosen = [members[len(members) // 2] for members in kinds.values()]
    return chosen[: len(COLOURS) - 1]


def frontier_panels(found: Findings) -> Figure:
    """Draw loss against bytes, a panel per setting."""
    settings = found.settings()
    figure = new_figure(4.4, width=3.6 * len(settings) + 0.4)
    panels = figure.subplots(1, len(settings), squeeze=False)
    for axes, setting in zip(panels.flat, settings, strict=True):
        _frontier(axes, found, setting)
    return figure


def shares_by_interval(found: Findings) -> Figure:
    """Draw bytes beside periodic averaging's at equal loss, against rounds between drifts."""
    figure = new_figure(4.6)
    axes = figure.subplots()
    draw_shares(axes, found, lambda setting: int(setting.split()[3]))
    axes.set_yscale("log")
    ticks = (0.1, 0.2, 0.5, 1.0, 2.0)
    axes.set_yticks(ticks, [f"{each:g}" for each in ticks])
    axes.minorticks_off()
    axes.set_xlabel("rounds between drifts")
    write_heading(axes, "What quiet times are worth", "30 learners; dashed: as periodic averaging")
    return figure


def draw_shares(axes: Axes, found: Findings, place: Callable[[str], int]) -> None:
    """Draw bytes beside periodic averaging's at equal loss, a curve per protocol.

    Parameters
    ----------
    axes : Axes
        Where to draw.
    found : Findings
        With the shares.
    place : callable
        Gets a setting, returns where it stands on the axis.
    """
    shares = [each for each in found.of(AT_EQUAL_LOSS) if each.values]
    for index, method in enumerate(dict.fromkeys(each.method for each in shares)):
        own = [each for each in shares if each.method == method]
        points = sorted((place(each.setting), each.mean, each.sd or 0.0) for each in own)
        xs, means, deviations = zip(*points, strict=True)
        draw_means(
            axes, xs, means, deviations, colour=COLOURS[index], marker=MARKERS[index], label=method
        )
    axes.axhline(1.0, color=SOFT, lw=1.2, ls="--")
    axes.set_xscale("log")
    places = sorted({place(each.setting) for each in shares})
    axes.set_xticks(places, [f"{each}" for each in places])
    axes.minorticks_off()
    add_grid(axes)
    axes.set_ylabel(AT_EQUAL_LOSS)
    axes.legend(frameon=False, fontsize=8.5)


def _frontier(axes: Axes, found: Findings, setting: str) -> None:
    families: dict[str, list[Point]] = {}
    for loss in found.of(LOSS):
        sent = found.get(loss.setting, loss.method, BYTES)
        if loss.setting == setting and loss.values and sent is not None:
            families.setdefault(_family(loss.method), []).append(
                (sent.mean, loss.mean, loss.method)
            )
    draw_frontiers(axes, families, _plain, left_out=_REFERENCES)
    # The references would stretch the axis; where they are out of view, the legend has them.
    low, high = axes.get_ylim()
    for family in _REFERENCES:
        for _, at, _ in families.get(family, ()):
            shown = low < at < high
            axes.axhline(
                at if shown else low,
                color=SOFT,
                ls=_REFERENCES[family],
                lw=1.2 if shown else 0.0,
                label=family if shown else f"{family}: {at:.1f}, not in view",
            )
    axes.set_ylim(low, high)
    axes.set_xlabel("MB in all, up + down")
    axes.set_ylabel(LOSS)
    axes.legend(frameon=False, fontsize=8)
    write_heading(axes, "Loss against communication", setting)


def _plain(megabytes: float) -> str:
    return f"{megabytes:,g}"


def _family(method: str) -> str:
    if method.startswith("b ="):
        return "periodic"
    if method.startswith("Δ"):
        return "dynamic"
    return method.split(", ")[0]
