"""The columns of a report: a new one is an entry here, in the table and in the CSV file.

The table in the terminal and the page show `COLUMNS`, one row per method; the page also shows
`RUN_COLUMNS`, one row per run. ``results.csv`` and ``runs.csv`` hold `METHOD_FIELDS` and
`RUN_FIELDS`, with full precision and units in the headings. A quantity that runs do not have yet is
read in `runs` and averaged in `summary`; what needs more than a line is explained in `run_page`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from simulations.report import multi_model_table
from simulations.report.runs import Run
from simulations.report.summary import (
    Method,
    SettingSummary,
    Spread,
    format_accuracy,
    format_bytes,
)


@dataclass(frozen=True)
class Column:
    """One column of the table of methods.

    Parameters
    ----------
    heading : str
        Above it.
    text : callable
        What a method's row says.
    bar : callable, optional
        Share of a bar behind the text in the page, 0 to 1; None for no bar.
    is_shown : callable
        Whether these methods need the column at all.
    caption : str
        What the heading does not say.
    """

    heading: str
    text: Callable[[Method], str]
    bar: Callable[[Method], float | None] | None = None
    is_shown: Callable[[Sequence[Method]], bool] = lambda methods: True
    caption: str = ""


def _rounds(method: Method) -> str:
    fewest, most = method.rounds
    return str(most) if fewest == most else f"{fewest}–{most}"


def _accuracy_share(method: Method) -> float | None:
    return None if method.accuracy is None else min(max(method.accuracy.mean, 0.0), 1.0)


def _has_classes(methods: Sequence[Method]) -> bool:
    return any(m.metric == "accuracy" for m in methods)


def _has_numbers(methods: Sequence[Method]) -> bool:
    return any(m.metric == "rmse" for m in methods)


# The first one is the method's name.
COLUMNS: list[Column] = [
    Column("method", lambda m: m.name),
    Column("rounds", _rounds),
    Column(
        "up",
        lambda m: format_bytes(m.bytes_up),
        caption="up, down: mean bytes per run from and to the nodes; 1 MB = 10^6 bytes, "
        "1 KB = 10^3 bytes.",
    ),
    Column("down", lambda m: format_bytes(m.bytes_down)),
    Column(
        "accuracy",
        lambda m: format_accuracy(m.accuracy, len(m.runs)),
        bar=_accuracy_share,
        is_shown=_has_classes,
        caption="accuracy: mean ± sample standard deviation over seeds, 0 to 1.",
    ),
    Column(
        "rmse",
        lambda m: format_accuracy(m.rmse, len(m.runs)),
        is_shown=_has_numbers,
        caption="rmse: root of the mean squared error, in the unit of what is predicted; mean ± "
        "sample standard deviation over seeds.",
    ),
    Column("seeds", lambda m: str(m.seeds)),
    Column(
        "seconds",
        lambda m: "–" if m.seconds is None else f"{m.seconds.mean:,.1f}",
        caption="seconds: mean per run.",
    ),
    Column(
        "failed",
        lambda m: str(m.nodes_failed),
        is_shown=lambda methods: any(m.nodes_failed for m in methods),
        caption="failed: nodes that failed, summed over runs.",
    ),
]

# Heading and text of every run's row in the page, and whether it is words.
RUN_COLUMNS: list[tuple[str, Callable[[Run], str], bool]] = [
    ("method", lambda r: r.method, True),
    ("seed", lambda r: str(r.seed), False),
    ("rounds", lambda r: str(r.rounds), False),
    ("accuracy", lambda r: "–" if r.accuracy is None else f"{r.accuracy:.4f}", False),
    ("rmse", lambda r: "–" if r.rmse is None else f"{r.rmse:.4f}", False),
    ("loss", lambda r: "–" if r.loss is None else f"{r.loss:.4f}", False),
    ("up", lambda r: format_bytes(r.bytes_up), False),
    ("down", lambda r: format_bytes(r.bytes_down), False),
    ("messages", lambda r: "–" if r.messages is None else f"{r.messages:,}", False),
    ("seconds", lambda r: "–" if r.seconds is None else f"{r.seconds:,.1f}", False),
    ("stopped because", lambda r: r.stopped_because or "", True),
    ("folder", lambda r: r.name, True),
]


def _mean(value: Spread | None) -> float | None:
    return None if value is None else value.mean


def _sd(value: Spread | None) -> float | None:
    return None if value is None else value.sd


def _relative(summary: SettingSummary, method: Method) -> Spread | None:
    rows = multi_model_table.models_rows(summary)
    return next((row.relative for row in rows if row.method is method), None)


METHOD_FIELDS: dict[str, Callable[[SettingSummary, Method], object]] = {
    "dataset": lambda s, m: s.setting.dataset,
    "partition": lambda s, m: s.setting.partition,
    "nodes": lambda s, m: s.setting.nodes,
    "model": lambda s, m: s.setting.model,
    "method": lambda s, m: m.name,
    "strategy": lambda s, m: m.strategy,
    "runs": lambda s, m: len(m.runs),
    "seeds": lambda s, m: m.seeds,
    "rounds_min": lambda s, m: m.rounds[0],
    "rounds_max": lambda s, m: m.rounds[1],
    "bytes_up_mean": lambda s, m: m.bytes_up,
    "bytes_down_mean": lambda s, m: m.bytes_down,
    "messages_mean": lambda s, m: _mean(m.messages),
    "accuracy_mean": lambda s, m: _mean(m.accuracy),
    "accuracy_sd": lambda s, m: _sd(m.accuracy),
    "rmse_mean": lambda s, m: _mean(m.rmse),
    "rmse_sd": lambda s, m: _sd(m.rmse),
    "loss_mean": lambda s, m: _mean(m.loss),
    "loss_sd": lambda s, m: _sd(m.loss),
    "relative_mean": lambda s, m: _mean(_relative(s, m)),
    "relative_sd": lambda s, m: _sd(_relative(s, m)),
    "seconds_mean": lambda s, m: _mean(m.seconds),
    "nodes_failed_sum": lambda s, m: m.nodes_failed,
}

RUN_FIELDS: dict[str, Callable[[Run], object]] = {
    "run": lambda r: r.name,
    "dataset": lambda r: r.setting.dataset,
    "partition": lambda r: r.setting.partition,
    "nodes": lambda r: r.setting.nodes,
    "model": lambda r: r.setting.model,
    "method": lambda r: r.method,
    "strategy": lambda r: r.strategy,
    "seed": lambda r: r.seed,
    "rounds": lambda r: r.rounds,
    "bytes_up": lambda r: r.bytes_up,
    "bytes_down": lambda r: r.bytes_down,
    "messages": lambda r: r.messages,
    "accuracy": lambda r: r.accuracy,
    "rmse": lambda r: r.rmse,
    "loss": lambda r: r.loss,
    "seconds": lambda r: r.seconds,
    "nodes_failed": lambda r: r.nodes_failed,
    "stopped_because": lambda r: r.stopped_because,
}

# Columns of one of the two things that runs are judged by, and of nothing else.
_BELONGS = {
    **dict.fromkeys(("accuracy", "accuracy_mean", "accuracy_sd"), "accuracy"),
    **dict.fromkeys(("relative_mean", "relative_sd"), "accuracy"),
    **dict.fromkeys(("rmse", "rmse_mean", "rmse_sd"), "rmse"),
}


def is_needed(name: str, runs: Iterable[Run]) -> bool:
    """Return whether these runs need a column: no accuracy where all predict numbers, say."""
    metric = _BELONGS.get(name)
    return metric is None or any(run.metric == metric for run in runs)
