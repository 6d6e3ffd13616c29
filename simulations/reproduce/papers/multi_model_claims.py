"""What the multi-model findings say about the slides' claims: a few sentences, and one picture."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulations.report.figures import (
    add_grid,
    draw_means,
    legend_below,
    new_figure,
    style,
    write_heading,
)
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.multi_model_measures import LATE_ACCURACY, ROUNDS, accuracy_after
from simulations.reproduce.papers.multi_model_names import (
    AS_PUBLISHED,
    LARGE_STEPS,
    RULES,
    relative,
)

_FINAL = relative("accuracy")
_LATE = relative(LATE_ACCURACY)


def found(findings: Findings) -> str:
    """Return whether importance and old updates are worth it, and since which round."""
    sentences = [_stale_beside_gvr(findings, setting) for setting in (AS_PUBLISHED, LARGE_STEPS)]
    best, random = (findings.get(AS_PUBLISHED, rule, _FINAL) for rule in ("lvr", "random"))
    far, near = (findings.get(LARGE_STEPS, rule, _FINAL) for rule in ("random", "lvr"))
    if best and random and far and near:
        sentences.append(
            f"Sampling by loss has {_said(best)} of full participation's accuracy and random draws "
            f"{_said(random)}; with large local steps {_said(near)} and {_said(far)}: how much "
            "importance is worth hangs on the size of the local steps."
        )
    return " ".join(each for each in sentences if each)


def _stale_beside_gvr(findings: Findings, setting: str) -> str:
    pair = [findings.get(setting, rule, _LATE) for rule in ("stale", "gvr")]
    if pair[0] is None or pair[1] is None:
        return ""
    stale, gvr = pair[0], pair[1]
    gain, spread = stale.mean - gvr.mean, math.hypot(stale.sd or 0.0, gvr.sd or 0.0)
    verdict = "beyond" if gain > spread else "within"
    return (
        f"Old updates (GVR*) change GVR's accuracy by {gain:+.3f} over the last third of the "
        f"rounds ({setting}): {verdict} the joint spread of {spread:.3f}."
    )


def _said(each: Finding) -> str:
    return f"{each.mean:.3f}" + ("" if each.sd is None else f" ± {each.sd:.3f}")


def draw(findings: Findings) -> Figure:
    """Draw accuracy against rounds, a curve per rule, means and deviations over seeds."""
    settings = [each for each in (AS_PUBLISHED, LARGE_STEPS) if _has(findings, each)]
    figure = new_figure(4.4, width=10.4)
    panels = figure.subplots(1, max(1, len(settings)), squeeze=False, sharey=True)
    headings = {
        AS_PUBLISHED: "training as in the author's code, rate 0.01",
        LARGE_STEPS: "ten times the learning rate",
    }
    for axes, setting in zip(panels.flat, settings, strict=False):
        for index, rule in enumerate(RULES):
            _curve(axes, findings, setting, rule, index)
        axes.set_xlabel("round")
        add_grid(axes)
        write_heading(axes, setting, headings[setting])
    panels[0, 0].set_ylabel("test accuracy, mean of the models")
    legend_below(figure, panels[0, 0], columns=8)
    return figure


def _points(findings: Findings, setting: str, rule: str) -> list[tuple[int, Finding]]:
    rows = [(number, findings.get(setting, rule, accuracy_after(number))) for number in ROUNDS]
    return [(number, each) for number, each in rows if each is not None]


def _has(findings: Findings, setting: str) -> bool:
    return any(_points(findings, setting, rule) for rule in RULES)


def _curve(axes: Axes, findings: Findings, setting: str, rule: str, index: int) -> None:
    points = _points(findings, setting, rule)
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
