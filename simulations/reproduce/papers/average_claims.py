"""Is the model that GEMS finds better than the average? Guha & Smith 2019, Tables 1 and 5."""

from __future__ import annotations

from matplotlib.figure import Figure

from simulations.report.figures import (
    COLOURS,
    SOFT,
    add_grid,
    legend_below,
    new_figure,
    write_heading,
)
from simulations.reproduce.papers.findings import Finding, Findings, Published, published

SPACES = ("GEMS ellipsoid", "GEMS ball")
AVERAGE = "Averaged"
SAME = 0.001


def _pairs(found: Findings, method: str) -> list[tuple[Finding, Finding]]:
    """Return the average and a kind of space in every setting that has both."""
    averages = [each for each in found.findings if each.method == AVERAGE and each.values]
    both = [(each, found.get(each.setting, method, each.quantity)) for each in averages]
    return [(average, ours) for average, ours in both if ours is not None]


def _is_same(average: Finding, ours: Finding) -> bool:
    """Whether both are as good in every seed, but for a sample or two of the test data."""
    pairs = zip(average.by_seed, ours.by_seed, strict=True)
    return all(a is not None and b is not None and abs(a - b) <= SAME for a, b in pairs)


def found(findings: Findings) -> str:
    """Say in how many settings the spaces give the average, seed by seed."""
    sentences = []
    for method in SPACES:
        pairs = _pairs(findings, method)
        if not pairs:
            continue
        same = [ours for average, ours in pairs if _is_same(average, ours)]
        gains = [ours.mean - average.mean for average, ours in pairs if ours not in same]
        rest = (
            f"; in the others it differs from it by {min(gains):+.3f} to {max(gains):+.3f}"
            if gains
            else ""
        )
        sentences.append(
            f"{method} has the accuracy of the average to a thousandth in {len(same)} of "
            f"{len(pairs)} settings, in each of {len(findings.seeds)} seeds{rest}."
        )
    return " ".join([*sentences, _papers_own(findings.name)]).strip()


def _papers_own(name: str) -> str:
    """Say how often the paper's own rows of GEMS and average agree within their spreads."""
    pairs = _published_pairs(name)
    gaps = [(ours.mean - average.mean, ours, average) for average, ours in pairs]
    inside = sum(
        abs(gap) <= 2 * ((a.sd or 0.0) ** 2 + (b.sd or 0.0) ** 2) ** 0.5 for gap, a, b in gaps
    )
    return (
        f"In the paper's own table the two are within twice their joint spread in {inside} of "
        f"{len(gaps)} settings."
    )


def _published_pairs(name: str) -> list[tuple[Published, Published]]:
    known = published(name)
    return [
        (known[key], known[setting, SPACES[0], quantity])
        for key in known
        for setting, method, quantity in [key]
        if method == AVERAGE and (setting, SPACES[0], quantity) in known
    ]


def draw(findings: Findings) -> Figure:
    """Draw accuracy of the spaces against that of the average; on the line they are the same."""
    figure = new_figure(5.4)
    axes = figure.subplots()
    axes.axline((0, 0), slope=1, color=SOFT, linewidth=1)
    theirs = _published_pairs(findings.name)
    axes.plot(
        [average.mean for average, _ in theirs],
        [ours.mean for _, ours in theirs],
        "D",
        color=SOFT,
        markerfacecolor="white",
        label="paper, ellipsoids",
    )
    for index, method in enumerate(SPACES):
        pairs = _pairs(findings, method)
        axes.plot(
            [average.mean for average, _ in pairs],
            [ours.mean for _, ours in pairs],
            "ox"[index],
            color=COLOURS[index],
            label=f"ours, {method.removeprefix('GEMS ')}s",
        )
    axes.set_xlim(0.1, 0.9)
    axes.set_ylim(0.1, 0.9)
    axes.set_aspect("equal")
    axes.set_xlabel("accuracy of the average")
    axes.set_ylabel("accuracy of GEMS, untuned")
    add_grid(axes)
    write_heading(axes, "Is GEMS better than the average?", "on the line it is the average")
    legend_below(figure, axes)
    return figure
