"""What the tables and CSV files of a report have of a method, and of a run.

The table on the screen and on the page shows `COLUMNS`, one row per method: a new column is an
entry. ``results.csv`` and ``runs.csv`` hold `method_fields` and `run_fields`, with full precision
and units in the headings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulations.report.runs import Run
from simulations.report.summary import Method, SettingSummary, Spread, format_bytes, spread
from simulations.report.tables import Row, TextTable

METRICS = ("accuracy", "rmse")


@dataclass(frozen=True)
class Column:
    """One column of the table of methods.

    Parameters
    ----------
    heading : str
        Above it.
    text : callable
        What a method's row has.
    is_shown : callable
        Whether these methods need the column at all.
    caption : str
        What the heading does not say.
    """

    heading: str
    text: Callable[[Method], str]
    is_shown: Callable[[Sequence[Method]], bool] = lambda methods: True
    caption: str = ""


def _rounds(method: Method) -> str:
    fewest, most = method.rounds
    return str(most) if fewest == most else f"{fewest}–{most}"


def _metric(name: str, caption: str) -> Column:
    """Return ``mean ± sd`` of a metric, and how many runs have a value if not all do."""

    def text(method: Method) -> str:
        value, runs = method.mean(name), len(method.runs)
        if value is None:
            return "–"
        return str(value) if value.count == runs else f"{value} ({value.count} of {runs})"

    spread_of = "mean ± sample standard deviation over seeds"
    return Column(
        name,
        text,
        lambda methods: any(m.metric == name for m in methods),
        f"{name}: {caption}, {spread_of}.",
    )


def _seconds(method: Method) -> str:
    value = method.mean("seconds")
    return "–" if value is None else f"{value.mean:,.1f}"


def _failed(method: Method) -> int:
    return sum(run.nodes_failed for run in method.runs)


_BYTES = "up, down: mean bytes per run from and to the nodes; 1 MB = 10^6 bytes, 1 KB = 10^3 bytes."
COLUMNS: list[Column] = [
    Column("method", lambda m: m.name),
    Column("rounds", _rounds),
    Column("up", lambda m: format_bytes(m.bytes_up), caption=_BYTES),
    Column("down", lambda m: format_bytes(m.bytes_down)),
    _metric("accuracy", "share of right answers, 0 to 1"),
    _metric("rmse", "root of the mean squared error, in the unit of what is predicted"),
    Column("seeds", lambda m: str(m.seeds)),
    Column("seconds", _seconds, caption="seconds: mean per run."),
    Column(
        "failed",
        lambda m: str(_failed(m)),
        lambda methods: any(map(_failed, methods)),
        "failed: nodes that failed, summed over runs.",
    ),
]

_SETTING = ("dataset", "partition", "nodes", "model")
_RUN = (
    *("method", "strategy", "seed", "rounds", "bytes_up", "bytes_down", "messages", "accuracy"),
    *("rmse", "loss", "seconds", "nodes_failed", "stopped_because"),
)


def run_fields(run: Run) -> dict[str, object]:
    """Return a row of ``runs.csv``."""
    setting = {name: getattr(run.setting, name) for name in _SETTING}
    return {"run": run.name, **setting, **{name: getattr(run, name) for name in _RUN}}


def method_fields(summary: SettingSummary, method: Method) -> dict[str, object]:
    """Return a row of ``results.csv``."""

    def parts(name: str, value: Spread | None) -> dict[str, object]:
        return {f"{name}_{part}": getattr(value, part, None) for part in ("mean", "sd")}

    return {
        **{name: getattr(summary.setting, name) for name in _SETTING},
        **{"method": method.name, "strategy": method.strategy},
        **{"runs": len(method.runs), "seeds": method.seeds},
        **dict(zip(("rounds_min", "rounds_max"), method.rounds, strict=True)),
        **{"bytes_up_mean": method.bytes_up, "bytes_down_mean": method.bytes_down},
        **{"messages_mean": getattr(method.mean("messages"), "mean", None)},
        **parts("accuracy", method.mean("accuracy")),
        **parts("rmse", method.mean("rmse")),
        **parts("loss", method.mean("loss")),
        **parts("relative", summary.relative(method)),
        **{"seconds_mean": getattr(method.mean("seconds"), "mean", None)},
        **{"nodes_failed_sum": _failed(method)},
    }


def columns_of(settings: Sequence[SettingSummary]) -> list[Column]:
    """Return the columns that are needed: that of failures only if a node failed, say."""
    methods = [method for summary in settings for method in summary.methods]
    return [column for column in COLUMNS if column.is_shown(methods)]


def caption_of(columns: Sequence[Column]) -> str:
    """Explain the columns that are shown, in one line of plain text."""
    return " ".join(each.caption for each in COLUMNS if each in columns and each.caption)


def methods_table(summary: SettingSummary, columns: Sequence[Column]) -> TextTable:
    """Return one row per method of a setting."""
    rows = [
        Row(tuple(column.text(method) for column in columns), method.is_reference)
        for method in summary.methods
    ]
    return TextTable(tuple(column.heading for column in columns), tuple(rows))


MODELS_CAPTION = (
    "relative: mean accuracy over that of full participation with the same seed. mean: over the "
    "models. All ± sample standard deviation over seeds. server memory: old updates and control "
    "variates that the server keeps."
)


def models_table(summary: SettingSummary) -> TextTable | None:
    """Return the accuracy of every model, where runs train several."""
    methods = [m for m in summary.methods if any(run.accuracies for run in m.runs)]
    if not methods:
        return None

    def text(method: Method) -> list[str]:
        runs = method.runs
        models = [spread([run.accuracies.get(name) for run in runs]) for name in summary.models]
        memory = max(run.server_memory_bytes or 0 for run in runs)
        values = [summary.relative(method), method.mean("accuracy"), *models]
        return [method.name, *("–" if v is None else str(v) for v in values), format_bytes(memory)]

    headings = ("method", "relative", "mean", *summary.models, "server memory")
    return TextTable.of(headings, map(text, methods))


def runs_table(summary: SettingSummary) -> TextTable:
    """Return one row per run of a setting, without what all of them share."""

    def text(name: str, value: object) -> str:
        if isinstance(value, int) and name.startswith("bytes"):
            return format_bytes(value)
        return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

    rows = [run_fields(run) for run in summary.runs]
    known = {name for row in rows for name, value in row.items() if value is not None}
    names = [name for name in rows[0] if name in known and name not in _SETTING]
    return TextTable.of(
        (name.replace("_", " ") for name in names),
        ([text(name, row[name]) for name in names] for row in rows),
        names=tuple(i for i, name in enumerate(names) if isinstance(rows[0][name], str)),
    )
