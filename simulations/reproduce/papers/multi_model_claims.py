"""What the multi-model findings say about the slides' claims: a few sentences, and one picture."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulations.report.figures import (
    COLOURS,
    SOFT,
    add_grid,
    draw_means,
    new_figure,
    style,
    write_heading,
)
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.multi_model_measures import (
    LATE_ACCURACY,
    ROUNDS,
    SHORT,
    accuracy_after,
)
from simulations.reproduce.papers.multi_model_names import (
    AS_PUBLISHED,
    LARGE_STEPS,
    RULES,
    UNIT_STEPS,
    WARM,
    relative,
)

_EARLY = relative(accuracy_after(SHORT))
_LATE = relative(LATE_ACCURACY)
_BASELINES = ("mifa", "scaffold", "fedvarp", "random")
_BARS = {
    AS_PUBLISHED: "rate 0.01",
    LARGE_STEPS: "rate 0.1",
    WARM: "… and every pair once first",
    UNIT_STEPS: "… and steps of size 1",
}


def found(findings: Findings) -> str:
    """Return whether old updates are worth it, and what the rules without importance lack."""
    sentences = [_stale_beside_gvr(findings)]
    names = (AS_PUBLISHED, LARGE_STEPS, WARM, UNIT_STEPS)
    rows = [findings.get(name, "random", _EARLY) for name in names]
    known = [row for row in rows if row is not None]
    if len(known) == len(names):
        small, large, warm, unit = known
        by_draws, by_size = warm.mean - large.mean, unit.mean - large.mean
        lacks = "an even step, Σ d/p, rather than draws"
        if by_draws >= by_size:
            lacks = "draws rather than an even step, Σ d/p"
        sentences.append(
            f"After {SHORT} rounds random draws have {_said(small)} of full participation's "
            f"accuracy at the author's rate and {_said(large)} at ten times that. There a first "
            f"draw of every pair makes it {_said(warm)}, and steps whose size does not vary "
            f"{_said(unit)}: what they lack is {lacks}."
        )
    return " ".join(each for each in sentences if each)


def _stale_beside_gvr(findings: Findings) -> str:
    stale, gvr = (findings.get(AS_PUBLISHED, rule, _LATE) for rule in ("stale", "gvr"))
    if stale is None or gvr is None:
        return ""
    gain, spread = stale.mean - gvr.mean, math.hypot(stale.sd or 0.0, gvr.sd or 0.0)
    verdict = f"{'beyond' if gain > spread else 'within'} the joint spread of {spread:.3f}"
    if stale.sd is None or gvr.sd is None:
        verdict = "of one seed, so without a spread"
    return (
        f"Old updates (GVR*) change GVR's relative accuracy by {gain:+.3f} over the last third of "
        f"the rounds: {verdict}."
    )


def _said(each: Finding) -> str:
    return f"{each.mean:.3f}" + ("" if each.sd is None else f" ± {each.sd:.3f}")


def draw(findings: Findings) -> Figure:
    """Draw accuracy against rounds by rule, and what helps the rules without importance."""
    figure = new_figure(4.6, width=10.4)
    curves, bars = figure.subplots(1, 2)
    for index, rule in enumerate(RULES):
        _curve(curves, findings, rule, index)
    curves.set_xlabel("round")
    curves.set_ylabel("test accuracy, mean of the models")
    add_grid(curves)
    write_heading(curves, "Accuracy by rule", "training as in the author's code, rate 0.01")
    _draw_bars(bars, findings)
    for axes, columns in ((curves, 4), (bars, 2)):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(
                loc="upper center",
                bbox_to_anchor=(0.5, -0.14),
                ncols=columns,
                frameon=False,
                fontsize=9,
            )
    return figure


def _curve(axes: Axes, findings: Findings, rule: str, index: int) -> None:
    rows = [(n, findings.get(AS_PUBLISHED, rule, accuracy_after(n))) for n in ROUNDS]
    points = [(number, each) for number, each in rows if each is not None]
    if points:
        look = style(index)
        draw_means(
            axes,
            [number for number, _ in points],
            [each.mean for _, each in points],
            [each.sd or 0.0 for _, each in points],
            colour=look.colour,
            marker=look.marker,
            line=look.line,
            label=rule,
        )


def _draw_bars(axes: Axes, findings: Findings) -> None:
    width = 0.8 / len(_BARS)
    for number, (setting, label) in enumerate(_BARS.items()):
        rows = [(at, findings.get(setting, rule, _EARLY)) for at, rule in enumerate(_BASELINES)]
        there = [(at, each) for at, each in rows if each is not None]
        if there:
            axes.bar(
                [at + (number - 1.5) * width for at, _ in there],
                [each.mean for _, each in there],
                width,
                yerr=[each.sd or 0.0 for _, each in there],
                error_kw={"capsize": 2, "elinewidth": 1},
                color=COLOURS[number],
                label=label,
            )
    axes.axhline(1.0, color=SOFT, linewidth=1)
    axes.set_xticks(range(len(_BASELINES)), _BASELINES)
    axes.set_ylabel("relative to full participation")
    add_grid(axes, "y")
    write_heading(axes, "Rules without importance", f"after {SHORT} rounds, one thing changed each")
