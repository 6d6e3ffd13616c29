"""What our experiments say about claims of Guha & Smith 2019: a sentence and a picture each.

A claim reads the kept findings of one experiment (``measured/NAME.json``). Sentences have no number
that is not computed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from matplotlib.figure import Figure

from simulations.report.figures import (
    COLOURS,
    MARKERS,
    SOFT,
    add_grid,
    draw_means,
    legend_below,
    new_figure,
    write_heading,
)
from simulations.reproduce.papers.findings import Finding, Findings, compare
from simulations.reproduce.papers.gems2019_check_figures import (
    draw_points,
    found_points,
    mean_text,
    over_seeds,
)


class Claim(NamedTuple):
    """A claim of the paper, and what reads which experiment to say whether it holds."""

    name: str
    title: str
    experiment: str
    found: Callable[[Findings], str]
    draw: Callable[[Findings], Figure]


def _curve(found: Findings, method: str, quantity: str) -> list[Finding]:
    own = [f for f in found.of(quantity) if f.method == method and f.values and f.x is not None]
    return sorted(own, key=lambda each: each.x or 0.0)


_SPACES = ("GEMS ball", "GEMS ellipsoid")


def found_average(found: Findings) -> str:
    """Say up to which ε the paper's two spaces give the plain average."""
    parts = []
    for method in _SPACES:
        shares = _curve(found, method, "is average")
        if not shares:
            continue
        always = [f.x for f in shares if f.mean == 1]
        never = [f.x for f in shares if f.mean < 1]
        empty = [f.x for f in _curve(found, method, "empty") if f.mean == 1]
        text = f"{method}: the plain average of the nodes' models, in all {len(found.seeds)} seeds"
        text += f", up to ε = {max(filter(None, always)):g}" if always else ", at no ε"
        if never:
            first = min(filter(None, never))
            other = next(f for f in _curve(found, method, "accuracy") if f.x == first)
            text += f"; at ε = {first:g} it is not, and has {mean_text(other)}"
        if empty:
            text += f"; proved to have no common model from ε = {min(filter(None, empty)):g} on"
        parts.append(text)
    return ". ".join(parts) + "."


def draw_average(found: Findings) -> Figure:
    """Draw accuracy against ε: filled where GEMS is the average, hollow where it is not."""
    figure = new_figure(3.6)
    axes = figure.subplots()
    for index, method in enumerate(_SPACES):
        curve = _curve(found, method, "accuracy")
        shares = {f.x: f.mean for f in _curve(found, method, "is average")}
        empty = {f.x: f.mean for f in _curve(found, method, "empty")}
        shift = (index - 0.5) * 0.008
        axes.plot(
            [(f.x or 0) + shift for f in curve],
            [f.mean for f in curve],
            color=COLOURS[index],
            linewidth=1,
        )
        for kind, label, fill in (
            (1, f"{method}: is the average", COLOURS[index]),
            (0, f"{method}: is not", "white"),
        ):
            own = [f for f in curve if (shares.get(f.x, 0) == 1) == bool(kind)]
            if own:
                draw_means(
                    axes,
                    [(f.x or 0) + shift for f in own],
                    [f.mean for f in own],
                    [f.sd or 0 for f in own],
                    colour=COLOURS[index],
                    marker=MARKERS[index],
                    label=label,
                    line="none",
                    markerfacecolor=fill,
                    size=6,
                )
        apart = [f for f in curve if empty.get(f.x, 0) == 1]
        if apart:
            axes.plot(
                [(f.x or 0) + shift for f in apart],
                [f.mean for f in apart],
                "x",
                color="black",
                markersize=9,
                zorder=5,
                label=None if index else "no common model, proved",
            )
    axes.set_xlabel("ε, the accuracy that is good enough")
    axes.set_ylabel("test accuracy")
    axes.set_ylim(0, None)
    add_grid(axes)
    write_heading(axes, "Convex GEMS is the average", over_seeds(found, "MNIST by label, 5 nodes"))
    legend_below(figure, axes, columns=2, fontsize=9)
    return figure


def _compared(found: Findings) -> list[str]:
    """Return the settings in which sampled and worst-direction radii were compared."""
    return list(dict.fromkeys(f.setting for f in found.findings if f.method == "radii worst"))


def found_radii(found: Findings) -> str:
    """Say by what factor sampled radii are too large, and what a node gets of the promise."""
    parts = []
    for setting in _compared(found):
        ratios = [
            value
            for f in found.findings
            if f.setting == setting and f.method == "sampled / worst"
            for value in f.values
        ]
        scores = [
            value
            for f in found.findings
            if f.setting == setting and f.method == "radii sampled" and f.quantity.startswith("acc")
            if "node" in f.quantity
            for value in f.values
        ]
        promised = float(setting.rpartition("= ")[2])
        broken = sum(score < promised for score in scores)
        empty = found.get(setting, "radii worst", "empty")
        text = f"At ε = {promised:g} sampled radii are {min(ratios):.0f} to {max(ratios):.0f} times"
        text += f" the distance at which a failing model was found (mean {fmean(ratios):.0f})"
        text += f"; of {len(scores)} nodes, which were all promised {promised:g}, {broken} get less"
        text += f", the worst {min(scores):.3f}"
        if empty is not None and empty.mean == 1:
            text += "; with worst-direction radii the balls have no common model, which is proved"
        parts.append(text)
    return ". ".join(parts) + "."


def draw_radii(found: Findings) -> Figure:
    """Draw radii on the left, and on the right what the common model gives each node."""
    settings = _compared(found)
    figure = new_figure(3.6, width=7.4)
    left, right = figure.subplots(1, 2)
    looks = {"radii sampled": (COLOURS[1], -0.14), "radii worst": (COLOURS[0], 0.14)}
    for place, setting in enumerate(settings):
        for method, (colour, shift) in looks.items():
            for node in range(5):
                x = place + shift + (node - 2) * 0.035
                label = method if place == node == 0 else None
                radius = found.get(setting, method, f"radius of node {node}")
                if radius:
                    left.plot([x] * len(radius.values), radius.values, "o", color=colour, ms=3.5)
                score = found.get(setting, method, f"accuracy of node {node}")
                if score:
                    right.plot(
                        [x] * len(score.values),
                        score.values,
                        "o",
                        color=colour,
                        ms=3.5,
                        label=label,
                    )
        promised = float(setting.rpartition("= ")[2])
        label = "promised: ε" if place == 0 else None
        right.plot([place - 0.35, place + 0.35], [promised] * 2, color="#444444", label=label)
    for axes in (left, right):
        axes.set_xticks(range(len(settings)), [each.split(", ")[-1] for each in settings])
        add_grid(axes, "y")
    left.set_yscale("log")
    left.set_ylabel("radius")
    right.set_ylabel("accuracy on the node's own data")
    seeds = f"a dot is a node, {len(found.seeds)} seeds"
    write_heading(left, "How far balls reach", f"MNIST, 5 nodes; {seeds}")
    write_heading(right, "What nodes get", "of the common model, or the least bad one")
    legend_below(figure, right, columns=3, fontsize=9)
    return figure


_GAINS = ("over raw", "over tuned average", "over tuned local")
_CASES = ("all, as released", "all, equal rates of 0.001", "all, equal rates of 0.01")


def found_tuning(found: Findings) -> str:
    """Say what is left of the gain of fine-tuned GEMS at equal learning rates."""
    gain = "gain with 100 samples"
    raw = {case: found.get(case, "over raw", gain) for case in _CASES}
    texts = [
        f"{mean_text(each)} {case.removeprefix('all, ').replace('equal', 'at equal')}"
        for case, each in raw.items()
        if each is not None
    ]
    known = {
        (line.finding.setting, line.finding.method): line.published.mean
        for line in compare(found)
        if line.published is not None
    }
    theirs = known.get(("all, as released", "over raw"))
    paper = "" if theirs is None else f" (the paper: {theirs:.3f})"
    return (
        f"With 100 public samples fine-tuned GEMS gains {', '.join(texts)} over training on the "
        f"public sample alone{paper}, averaged over data sets and models."
    )


def draw_tuning(found: Findings) -> Figure:
    """Draw the gains over each baseline, as released and at equal rates, beside the paper's."""
    figure = new_figure(3.2)
    axes = figure.subplots()
    lines = {(e.finding.setting, e.finding.method): e for e in compare(found)}
    for index, case in enumerate(_CASES):
        own = [lines[case, method] for method in _GAINS if (case, method) in lines]
        draw_means(
            axes,
            [e.finding.mean for e in own],
            [-_GAINS.index(e.finding.method) - (index - 1) * 0.18 for e in own],
            [e.finding.sd or 0.0 for e in own],
            colour=COLOURS[index],
            marker=MARKERS[index],
            label=case.removeprefix("all, "),
            line="none",
            along_x=True,
        )
    theirs = [e for e in lines.values() if e.published is not None and e.finding.method in _GAINS]
    axes.plot(
        [e.published.mean for e in theirs if e.published],
        [-_GAINS.index(e.finding.method) + 0.36 for e in theirs],
        "D",
        color=SOFT,
        markerfacecolor="white",
        label="paper",
    )
    axes.axvline(0, color=SOFT, linewidth=1)
    axes.set_yticks([-float(i) for i in range(len(_GAINS))], _GAINS)
    axes.set_xlabel("gain in accuracy of fine-tuned GEMS")
    axes.set_xlim(-0.01, None)
    add_grid(axes, "x")
    write_heading(
        axes, "Fine-tuning with 100 samples", over_seeds(found, "mean over data sets and models")
    )
    legend_below(figure, axes, columns=4, fontsize=9)
    return figure


CLAIMS = (
    Claim(
        "average",
        "On MNIST convex GEMS is the average at the paper's ε of 0.4",
        "gems2019_spaces",
        found_average,
        draw_average,
    ),
    Claim(
        "points",
        "On features the released ellipsoids leave the average out, and the point matters",
        "gems2019_ellipsoids",
        found_points,
        draw_points,
    ),
    Claim(
        "radii",
        "Sampled radii promise more than they keep",
        "gems2019_spaces",
        found_radii,
        draw_radii,
    ),
    Claim(
        "tuning",
        "How much of the gain of fine-tuned GEMS over raw training is the learning rate's",
        "gems2019_tuning",
        found_tuning,
        draw_tuning,
    ),
)
