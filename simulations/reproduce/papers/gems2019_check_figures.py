"""Sentences and pictures of the checks behind our explanations of GEMS 2019's numbers."""

from __future__ import annotations

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
from simulations.reproduce.papers.findings import Finding, Findings, compare, published


def mean_text(each: Finding) -> str:
    """Return mean ± deviation."""
    spread = "" if each.sd is None else f" ± {each.sd:.3f}"
    return f"{each.mean:.3f}{spread}"


def over_seeds(found: Findings, what: str) -> str:
    """Return a subtitle that says how many seeds there were."""
    return f"{what}; mean ± deviation over {len(found.seeds)} seeds"


_POINTS = {"of the average": "average", "": "ours", "by descent on Eq. 2": "released descent"}


def _points(found: Findings, setting: str) -> dict[str, Finding]:
    own = {f.quantity: f for f in found.findings if f.setting == setting and f.values}
    base = next(q for q in own if q.endswith("accuracy"))
    return {
        name: own[f"{base} {what}".strip()]
        for what, name in _POINTS.items()
        if f"{base} {what}".strip() in own
    }


def found_points(found: Findings) -> str:
    """Say what the points of the ellipsoids give, setting by setting."""
    parts = []
    for setting in found.settings():
        texts = [f"{name} {mean_text(each)}" for name, each in _points(found, setting).items()]
        level = next(f for f in found.of("largest level of the average") if f.setting == setting)
        parts.append(f"{setting}: {', '.join(texts)} (level of the average {level.mean:.2f})")
    return "; ".join(parts) + ". A level above 1 is outside of a node's ellipsoid."


def draw_points(found: Findings) -> Figure:
    """Draw what the average, our point and the released descent give, with the paper's two."""
    settings = found.settings()
    figure = new_figure(0.5 * len(settings) + 1.6)
    axes = figure.subplots()
    for index, name in enumerate(_POINTS.values()):
        own = [(-i, _points(found, s).get(name)) for i, s in enumerate(settings)]
        known = [(place, each) for place, each in own if each is not None]
        draw_means(
            axes,
            [each.mean for _, each in known],
            [place - (index - 1) * 0.2 for place, _ in known],
            [each.sd or 0.0 for _, each in known],
            colour=COLOURS[index],
            marker=MARKERS[index],
            label=name,
            line="none",
            along_x=True,
        )
    tables = published("gems2019_convex")
    for method, marker in (("Averaged", "<"), ("GEMS ellipsoid", ">")):
        theirs = [
            (known.mean, -float(settings.index(setting)) + 0.38)
            for (setting, of, _), known in tables.items()
            if of == method and setting in settings
        ]
        if theirs:
            axes.plot(
                *zip(*theirs, strict=True),
                marker,
                color=SOFT,
                markerfacecolor="white",
                label=f"paper: {'average' if method == 'Averaged' else 'GEMS'}",
            )
    axes.set_yticks([-float(i) for i in range(len(settings))], settings)
    axes.set_xlabel("test accuracy (HAM10000: balanced)")
    axes.set_xlim(0, None)
    add_grid(axes)
    write_heading(axes, "Which point of the ellipsoids", over_seeds(found, "at the paper's ε"))
    legend_below(figure, axes, columns=3, fontsize=9)
    return figure


def found_output_layers(found: Findings) -> str:
    """Say what the output layer's start and its epochs make of GEMS networks."""
    parts = []
    for setting in found.settings():
        own = [f for f in found.findings if f.setting == setting and "accuracy" in f.quantity]
        texts = [f"{each.method} {mean_text(each)}" for each in own if each.values]
        parts.append(f"{setting}: {', '.join(texts)}")
    return ". ".join(parts) + "."


def draw_output_layers(found: Findings) -> Figure:
    """Draw the variants' accuracies, a panel per number of nodes, beside the paper's."""
    settings, methods = found.settings(), found.methods()
    figure = new_figure(0.3 * len(methods) + 1.7, width=3.4 + 2.2 * len(settings))
    panels = figure.subplots(1, len(settings), squeeze=False, sharex=True, sharey=True)
    lines = compare(found)
    for axes, setting in zip(panels.flat, settings, strict=True):
        own = [e for e in lines if e.finding.setting == setting and "acc" in e.finding.quantity]
        known = [e for e in own if e.finding.values]
        draw_means(
            axes,
            [e.finding.mean for e in known],
            [-float(methods.index(e.finding.method)) for e in known],
            [e.finding.sd or 0.0 for e in known],
            colour=COLOURS[0],
            marker="o",
            label="ours, ± deviation over seeds",
            line="none",
            along_x=True,
        )
        papers = {e.published.mean for e in own if e.published}
        for place in papers:
            axes.axvline(place, color=SOFT, linestyle="--", label="paper")
        axes.set_yticks([-float(i) for i in range(len(methods))], methods)
        axes.set_xlabel("test accuracy")
        axes.set_xlim(0, 0.6)
        add_grid(axes)
        axes.set_title(setting, loc="left", fontsize=10, fontweight="bold")
        hide_frame(axes)
    legend_below(figure, panels[0, 0], columns=2)
    return figure


# Hidden neurons of the paper where it prints them, by the setting's name here: Tables 10 and 11.
_PRINTED = {
    "CIFAR-10, 5 nodes, ε_j = 0.3": "CIFAR-10, m_ε = 200, ε_j = 0.3",
    "HAM10000, 5 nodes, ε_j = 0.07": "HAM10000, m_ε = 100, ε_j = 0.07",
}


def found_neuron_sizes(found: Findings) -> str:
    """Say how many neurons merged layers have at which deviation, and how good they are."""
    parts = []
    for size in found.of("hidden neurons"):
        if size.values:
            own = [f for f in found.findings if f.setting == size.setting and f is not size]
            score = next(f for f in own if "accuracy" in f.quantity)
            parts.append(f"{size.setting}: {size.mean:.0f} neurons, {mean_text(score)}")
    return "; ".join(parts) + "."


def draw_neuron_sizes(found: Findings) -> Figure:
    """Draw the neurons of merged layers against ε_j, beside the paper's."""
    titles = list(dict.fromkeys(f.setting.rpartition(", ")[0] for f in found.findings))
    figure = new_figure(3.2, width=3.0 * len(titles) + 0.6)
    panels = figure.subplots(1, len(titles), squeeze=False)
    sizes = published("gems2019_model_size")
    for axes, title in zip(panels.flat, titles, strict=True):
        own = [f for f in found.of("hidden neurons") if f.setting.startswith(title) and f.values]
        own = sorted(own, key=lambda each: each.x or 0.0)
        draw_means(
            axes,
            [f.x or 0.0 for f in own],
            [f.mean for f in own],
            [f.sd or 0.0 for f in own],
            colour=COLOURS[0],
            marker="o",
            label="ours",
        )
        known = [(f.x or 0.0, sizes.get(_key_of(f.setting))) for f in own]
        theirs = [(x, each.mean) for x, each in known if each is not None]
        label = "paper" if axes is panels[0, 0] else None
        axes.plot(
            [x for x, _ in theirs],
            [y for _, y in theirs],
            "D",
            color=SOFT,
            markerfacecolor="white",
            label=label,
        )
        axes.set_xscale("log")
        axes.set_xticks([f.x or 0.0 for f in own], [f"{f.x:g}" for f in own])
        axes.minorticks_off()
        axes.set_xlabel("ε_j")
        axes.set_ylim(0, None)
        add_grid(axes)
        write_heading(
            axes, title, f"{len(found.seeds)} seeds" if len(found.seeds) > 1 else "seed 0"
        )
    panels[0, 0].set_ylabel("hidden neurons")
    legend_below(figure, panels[0, 0], columns=2)
    return figure


def _key_of(setting: str) -> tuple[str, str, str]:
    return (_PRINTED.get(setting, ""), "GEMS, tuned", "hidden neurons")
