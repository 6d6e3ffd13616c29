"""What GEMS 2018's Table 1 shows: networks of one epoch, and what merging costs.

Reads the findings of ``gems2018_factors``.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulations.report.figures import (
    COLOURS,
    MARKERS,
    SOFT,
    add_grid,
    draw_means,
    hide_frame,
    legend_below,
    new_figure,
    write_heading,
)
from simulations.reproduce.papers.findings import Finding, Findings

NAME = "gems2018_factors"
BASE = "epochs: 1"
# Table 1, untuned, and its hidden neurons.
PAPER = 0.83
_CURVES = ("Side by side", "GEMS", "GEMS, second round", "Averaged", "Softmax mean", "Local")


def found(findings: Findings) -> str:
    """Return the claim in a few sentences, with the figures that were found."""
    beside, gems = (_accuracy(findings, BASE, name) for name in ("Side by side", "GEMS"))
    second = _accuracy(findings, BASE, "GEMS, second round")
    longest = max((each.x or 0.0 for each in findings.findings), default=0.0)
    late = [
        _accuracy(findings, f"epochs: {longest:g}", name)
        for name in ("Side by side", "GEMS, second round")
    ]
    width = findings.get(BASE, "GEMS", "hidden neurons")
    if beside is None or gems is None or second is None or width is None or None in late:
        return ""
    said = (
        f"How long the learners train decides. At one epoch, where the "
        f"paper's local, averaged and pooled networks are, our second round (an output layer from "
        f"each node, intersected) has {_shown(second)} on {width.mean:.0f} neurons; the paper has "
        f"{PAPER:.2f} on 68. After {longest:g} epochs the same has {_shown(late[1])}. The output "
        f"layer that the paper describes, made of merged outgoing weights, has {_shown(gems)} on "
        f"these neurons and {_shown(beside)} with nothing merged, which is the sum of the "
        f"learners' logits ({_shown(late[0])} after {longest:g} epochs)."
    )
    pairs = findings.get("all pairs that meet", "GEMS", "hidden neurons")
    if pairs is None:
        return said
    return (
        f"{said} All pairs of balls that meet, as its algorithm has it, make a layer of "
        f"{pairs.mean:.0f} at this ε, not of 68."
    )


def draw(findings: Findings) -> Figure:
    """Draw accuracy against epochs, and what each other choice does at one epoch."""
    figure = new_figure(6.8)
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
    _epochs(upper, findings)
    _choices(lower, findings)
    legend_below(figure, upper, columns=3)
    return figure


def _epochs(axes: Axes, findings: Findings) -> None:
    for index, method in enumerate(_CURVES):
        points = sorted(
            (each.x, each.mean, each.sd or 0.0)
            for each in findings.of("accuracy")
            if each.method == method and each.x is not None and each.values
        )
        if points:
            xs, means, deviations = zip(*points, strict=True)
            draw_means(
                axes,
                xs,
                means,
                deviations,
                colour=COLOURS[index],
                marker=MARKERS[index],
                label=method,
            )
    axes.axhline(PAPER, color=SOFT, linewidth=1, linestyle=":", label=f"the paper's {PAPER:.2f}")
    axes.set_xscale("log")
    ticks = sorted({each.x for each in findings.findings if each.x is not None})
    axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
    axes.minorticks_off()
    axes.set_xlabel("epochs of each learner")
    axes.set_ylabel("test accuracy")
    add_grid(axes)
    write_heading(axes, "Two networks stitched together", "MNIST and MNIST with permuted pixels")


def _choices(axes: Axes, findings: Findings) -> None:
    own = [
        each
        for each in findings.of("accuracy")
        if each.values
        and (each.x is None or each.setting == BASE)
        and _is_stitched(each)
        # Those are another experiment's.
        and not each.setting.startswith("tweets")
    ]
    names = list(dict.fromkeys(each.setting for each in own))
    places = {name: -index for index, name in enumerate(names)}
    for index, method in enumerate(("Side by side", "GEMS")):
        mine = [each for each in own if each.method == method]
        axes.plot(
            [each.mean for each in mine],
            [places[each.setting] for each in mine],
            color=COLOURS[index],
            marker=MARKERS[index],
            linestyle="none",
        )
    labels = [("as in Table 1" if name == BASE else name) for name in names]
    axes.set_yticks(list(places.values()), labels, fontsize=8.5)
    axes.axvline(PAPER, color=SOFT, linewidth=1, linestyle=":")
    axes.set_xlabel("test accuracy at one epoch")
    add_grid(axes)
    hide_frame(axes)


def _is_stitched(each: Finding) -> bool:
    return each.method in ("Side by side", "GEMS")


def _accuracy(findings: Findings, setting: str, method: str) -> Finding | None:
    return findings.get(setting, method, "accuracy")


def _shown(each: Finding | None) -> str:
    if each is None:
        return "–"
    spread = "" if each.sd is None else f" ± {each.sd:.3f}"
    return f"{each.mean:.3f}{spread}"
