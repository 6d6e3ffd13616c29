"""What fine-tuning gains, and how much of it is the learning rate's. Guha & Smith 2019, 4.4."""

from __future__ import annotations

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
from simulations.reproduce.papers.findings import Finding, Findings, published

GAIN = "gain with 100 samples"
RELEASED = "all, as released"


def _gains(findings: Findings) -> dict[str, dict[str, Finding]]:
    """Return the gains by case of rates, then by what is compared with."""
    cases: dict[str, dict[str, Finding]] = {}
    for each in findings.of(GAIN):
        if each.values:
            cases.setdefault(each.setting, {})[each.method] = each
    return cases


def found(findings: Findings) -> str:
    """Say what is gained as released, and at equal rates."""
    cases = _gains(findings)
    released = cases[RELEASED]
    known = published(findings.name)
    ours = ", ".join(
        f"{each.mean:.3f} {over} (paper {known[RELEASED, over, GAIN].mean:.3f})"
        for over, each in released.items()
    )
    equal = "; ".join(
        f"at {case.removeprefix('all, ')}: "
        + ", ".join(f"{each.mean:.3f} {over}" for over, each in gains.items())
        for case, gains in cases.items()
        if case != RELEASED
    )
    return (
        f"As released, where GEMS and the average are tuned at ten times the rate of the others, "
        f"GEMS gains {ours}. {equal[0].upper()}{equal[1:]}."
    )


def draw(findings: Findings) -> Figure:
    """Draw the gain over each rival of the paper: its own number, ours, ours at equal rates."""
    cases = _gains(findings)
    rows = list(cases[RELEASED])
    figure = new_figure(0.75 * len(rows) + 1.9)
    axes = figure.subplots()
    for index, (case, gains) in enumerate(cases.items()):
        draw_means(
            axes,
            [gains[row].mean for row in rows],
            [-place - 0.16 * index for place in range(len(rows))],
            [gains[row].sd or 0.0 for row in rows],
            colour=COLOURS[index],
            marker=MARKERS[index],
            label=f"ours, {case.removeprefix('all, ')}",
            line="none",
            along_x=True,
        )
    known = published(findings.name)
    axes.plot(
        [known[RELEASED, row, GAIN].mean for row in rows],
        [-place + 0.16 for place in range(len(rows))],
        "D",
        color=SOFT,
        markerfacecolor="white",
        label="paper",
    )
    axes.axvline(0, color=SOFT, linewidth=1)
    axes.set_yticks([-place - 0.1 for place in range(len(rows))], rows)
    axes.set_ylim(-len(rows) + 0.4, 0.5)
    axes.set_xlabel("gain of GEMS in accuracy, mean over data sets and models")
    add_grid(axes, "x")
    write_heading(axes, "What fine-tuning on 100 samples gains", f"{len(findings.seeds)} seeds")
    legend_below(figure, axes, columns=2)
    return figure
