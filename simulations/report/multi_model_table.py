"""Runs with several models: accuracy of each, and relative to full participation.

"Relative" is that of the slides' Table I: the mean accuracy of a run's models over that of the run
with full participation and the same seed. So what a seed makes easy or hard does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from simulations.report.runs import Run
from simulations.report.summary import Method, SettingSummary, Spread, format_bytes, spread

# What results call `FullParticipation`.
FULL = "full"


@dataclass(frozen=True)
class ModelsRow:
    """One method: accuracies over seeds, by model and in the mean, and relative to `full`."""

    method: Method
    by_model: dict[str, Spread]
    mean: Spread
    relative: Spread | None


def models_of(summary: SettingSummary) -> list[str]:
    """Return the names of the models in a setting, in order."""
    return list(dict.fromkeys(name for run in summary.runs for name in run.accuracies))


def several_models(summary: SettingSummary) -> list[Method]:
    """Return the methods of a setting that trained several models."""
    return [m for m in summary.methods if any(run.accuracies for run in m.runs)]


def models_rows(summary: SettingSummary) -> list[ModelsRow]:
    """Return one row per method that trained several models, in the order of the table."""
    full = {
        run.seed: run.accuracy
        for run in summary.runs
        if run.sampling == FULL and run.accuracy is not None
    }
    rows = []
    for method in several_models(summary):
        by_model = {}
        for name in models_of(summary):
            accuracies = spread(run.accuracies.get(name) for run in method.runs)
            if accuracies is not None:
                by_model[name] = accuracies
        mean = spread(run.accuracy for run in method.runs)
        if mean is not None:
            rows.append(ModelsRow(method, by_model, mean, _relative(method.runs, full)))
    return rows


def _relative(runs: Sequence[Run], full: dict[int, float]) -> Spread | None:
    return spread(
        run.accuracy / full[run.seed]
        for run in runs
        if run.accuracy is not None and full.get(run.seed)
    )


def texts(row: ModelsRow, models: Sequence[str]) -> dict[str, str]:
    """Return a row as text, by column."""
    memory = max((run.server_memory_bytes or 0 for run in row.method.runs), default=0)
    return {
        "method": row.method.name,
        "relative": _text(row.relative),
        "mean": _text(row.mean),
        **{name: _text(row.by_model.get(name)) for name in models},
        "server memory": format_bytes(memory),
    }


CAPTION = (
    "relative: mean accuracy over that of full participation with the same seed. mean: over the "
    "models. All ± sample standard deviation over seeds. server memory: old updates and control "
    "variates that the server keeps."
)


def _text(value: Spread | None) -> str:
    if value is None:
        return "–"
    return f"{value.mean:.3f}" if value.sd is None else f"{value.mean:.3f} ± {value.sd:.3f}"
