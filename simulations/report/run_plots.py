"""All plots of a report, as PNG files."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simulations.report.accuracy_plot import SCORE_NAMES, accuracy_figure
from simulations.report.figures import Style, save, style
from simulations.report.labels_plot import labels_figure
from simulations.report.multi_model_plots import models_figure, sampled_figure, steps_figure
from simulations.report.runs import Setting
from simulations.report.stream_plots import frontier_figure, timeline_figure
from simulations.report.summary import SettingSummary

# Styles are given out in this order, so that a strategy looks alike in most reports.
_KNOWN = (
    "fedavg",
    "one_shot_average",
    "ensemble",
    "gems",
    "gems_layerwise",
    "dynamic",
    "periodic",
    "nosync",
    "serial",
    "multi_model",
    "public_only",
    "merge",
)


@dataclass(frozen=True)
class Plot:
    """A plot on disk, and what to say to someone who cannot see it."""

    path: Path
    title: str
    description: str


def draw_plots(settings: Sequence[SettingSummary], folder: Path) -> dict[Setting, tuple[Plot, ...]]:
    """Draw the plots of every setting.

    Parameters
    ----------
    settings : Sequence[SettingSummary]
        What to draw.
    folder : Path
        Where to write the PNG files; made if missing.

    Returns
    -------
    dict[Setting, tuple[Plot, ...]]
        The plots of each setting. One that would be empty is left out: accuracy against bytes
        if nothing was sent, for instance, or labels if no run wrote its division of the data.
    """
    folder.mkdir(parents=True, exist_ok=True)
    styles = assign_styles(settings)
    plots: dict[Setting, tuple[Plot, ...]] = {}
    for summary, stem in zip(settings, _file_stems(settings), strict=True):
        drawn: list[Plot] = []
        for against in ("bytes", "rounds"):
            figure = accuracy_figure(summary, styles, by_bytes=against == "bytes")
            if figure is not None:
                path = folder / f"{stem}-{summary.metric}-{against}.png"
                save(figure, path)
                title = f"{SCORE_NAMES[summary.metric][0]} against {against}"
                drawn.append(Plot(path, title, _final_scores(summary)))
        for kind, title, stream_figure in (
            ("frontier", "Cumulative loss against bytes", frontier_figure(summary)),
            ("timeline", "Loss and bytes over time", timeline_figure(summary)),
        ):
            if stream_figure is not None:
                path = folder / f"{stem}-{kind}.png"
                save(stream_figure, path)
                drawn.append(Plot(path, title, _final_losses(summary)))
        for kind, title, models_plot in (
            ("models", "Accuracy of every model", models_figure(summary)),
            ("sampled", "Who was drawn", sampled_figure(summary)),
            ("steps", "Steps and their variance", steps_figure(summary, styles)),
        ):
            if models_plot is not None:
                path = folder / f"{stem}-{kind}.png"
                save(models_plot, path)
                drawn.append(Plot(path, title, _final_scores(summary)))
        if summary.division is not None:
            seed, division = summary.division
            path = folder / f"{stem}-labels.png"
            save(labels_figure(summary.setting.title, seed, division), path)
            each = "range" if division.edges else "class"
            text = f"training examples of each {each} at each of {len(division.names)} nodes."
            drawn.append(Plot(path, "Labels per node", text))
        plots[summary.setting] = tuple(drawn)
    return plots


def assign_styles(settings: Sequence[SettingSummary]) -> dict[str, Style]:
    """Give each method one look in the whole report.

    Parameters
    ----------
    settings : Sequence[SettingSummary]
        Everything that will be drawn.

    Returns
    -------
    dict[str, Style]
        By the method's name; reference runs have none.
    """
    methods = {
        (_KNOWN.index(method.strategy) if method.strategy in _KNOWN else len(_KNOWN), method.name)
        for summary in settings
        for method in summary.methods
        if not method.is_reference
    }
    return {name: style(index) for index, (_, name) in enumerate(sorted(methods))}


def _file_stems(settings: Sequence[SettingSummary]) -> list[str]:
    stems: list[str] = []
    for summary in settings:
        stem = re.sub(r"[^a-z0-9._]+", "-", summary.setting.title.lower()).strip("-.")
        # Two titles may differ only in characters that a file name should not have.
        unique, number = stem, 1
        while unique in stems:
            number += 1
            unique = f"{stem}-{number}"
        stems.append(unique)
    return stems


def _final_losses(summary: SettingSummary) -> str:
    parts = [
        f"{method.name} {method.runs[0].cumulative_loss / summary.setting.nodes:.1f}"
        for method in summary.methods
        if not math.isnan(method.runs[0].cumulative_loss)
    ]
    return f"cumulative loss per node {', '.join(parts)}."


def _final_scores(summary: SettingSummary) -> str:
    parts = [
        f"{method.name} {method.score.mean:.3f}"
        for method in summary.methods
        if method.score is not None
    ]
    return f"final {summary.metric} {', '.join(parts)}."
