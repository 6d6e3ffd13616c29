"""The table in the terminal, and the same numbers as CSV."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simulations.report import multi_model
from simulations.report.runs import Run
from simulations.report.summary import Method, SettingSummary, Spread, cell_texts

# What the table cannot say in its headings; the page prints it too.
CAPTION = (
    "up, down: mean bytes per run from and to the nodes; 1 MB = 10^6 bytes, 1 KB = 10^3 bytes. "
    "accuracy: mean ± sample standard deviation over seeds, 0 to 1. seconds: mean per run."
)
CAPTION_FAILED = " failed: nodes that failed, summed over runs."


def columns_of(settings: Sequence[SettingSummary]) -> list[str]:
    """Return the headings; the failures' column is there only if a node failed.

    Parameters
    ----------
    settings : Sequence[SettingSummary]
        Everything that is to be shown, at least one method.

    Returns
    -------
    list[str]
        Keys of `cell_texts`.
    """
    columns = list(cell_texts(settings[0].methods[0]))
    if not any(method.nodes_failed for summary in settings for method in summary.methods):
        columns.remove("failed")
    return columns


def caption_of(columns: Sequence[str]) -> str:
    """Explain the columns that are shown.

    Parameters
    ----------
    columns : Sequence[str]
        From `columns_of`.

    Returns
    -------
    str
        One line of plain text.
    """
    return CAPTION + (CAPTION_FAILED if "failed" in columns else "")


def print_tables(settings: Sequence[SettingSummary], console: Console) -> None:
    """Print the methods under one heading per setting, columns aligned throughout.

    Parameters
    ----------
    settings : Sequence[SettingSummary]
        What to print.
    console : Console
        Where to print.
    """
    columns = columns_of(settings)
    rows = {
        summary.setting: [cell_texts(method) for method in summary.methods] for summary in settings
    }
    widths = {
        column: max(len(column), *(len(row[column]) for group in rows.values() for row in group))
        for column in columns
    }
    # Rich would rather drop a last column than shrink a fixed one, so give way step by step:
    # first the space between columns, then the names of methods, which may fold.
    wanted = sum(widths.values())
    padding = 1 if wanted + 3 * (len(columns) - 1) <= console.width else 0
    if wanted + len(columns) - 1 > console.width:
        widths["method"] = len("method")
    for summary in settings:
        table = Table(
            title=Text(summary.setting.title, style="bold"),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, padding),
        )
        for column in columns:
            table.add_column(
                column,
                justify="left" if column == "method" else "right",
                min_width=widths[column],
                # A shortened number is a wrong number: let a narrow terminal fold names instead.
                no_wrap=column != "method",
                overflow="fold",
            )
        for method, row in zip(summary.methods, rows[summary.setting], strict=True):
            style = "dim" if method.is_reference else ""
            table.add_row(*(Text(row[column]) for column in columns), style=style)
        # Below that, a line that runs over is better than a column that is cut off.
        console.print(table, crop=False)
        console.print()
        _print_models(summary, console)
    console.print(Text(caption_of(columns), style="dim"))


def _print_models(summary: SettingSummary, console: Console) -> None:
    """Print the accuracy of every model, where there are several."""
    rows, models = multi_model.models_rows(summary), multi_model.models_of(summary)
    if not rows:
        return
    texts = [multi_model.texts(row, models) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for column in texts[0]:
        table.add_column(
            column,
            justify="left" if column == "method" else "right",
            # A shortened number is a wrong number; a line may run over.
            min_width=max(len(column), *(len(text[column]) for text in texts)),
            no_wrap=True,
        )
    for text in texts:
        table.add_row(*(Text(value) for value in text.values()))
    console.print(table, crop=False)
    console.print(Text(multi_model.CAPTION, style="dim"))
    console.print()


def write_results_csv(settings: Sequence[SettingSummary], path: Path) -> None:
    """Write one row per method and setting, with full precision and units in the headings.

    Parameters
    ----------
    settings : Sequence[SettingSummary]
        What to write.
    path : Path
        The file; overwritten.
    """
    _write_csv(
        path,
        (_result_row(summary, method) for summary in settings for method in summary.methods),
    )


def write_runs_csv(runs: Sequence[Run], path: Path) -> None:
    """Write one row per run.

    Parameters
    ----------
    runs : Sequence[Run]
        What to write.
    path : Path
        The file; overwritten.
    """
    _write_csv(path, (_run_row(run) for run in runs))


def _result_row(summary: SettingSummary, method: Method) -> dict[str, object]:
    setting = summary.setting
    fewest, most = method.rounds
    rows = multi_model.models_rows(summary)
    relative = next((row.relative for row in rows if row.method is method), None)
    return {
        "dataset": setting.dataset,
        "partition": setting.partition,
        "nodes": setting.nodes,
        "model": setting.model,
        "method": method.name,
        "strategy": method.strategy,
        "runs": len(method.runs),
        "seeds": method.seeds,
        "rounds_min": fewest,
        "rounds_max": most,
        "bytes_up_mean": method.bytes_up,
        "bytes_down_mean": method.bytes_down,
        "messages_mean": _mean(method.messages),
        "accuracy_mean": _mean(method.accuracy),
        "accuracy_sd": _sd(method.accuracy),
        "loss_mean": _mean(method.loss),
        "loss_sd": _sd(method.loss),
        "relative_mean": _mean(relative),
        "relative_sd": _sd(relative),
        "seconds_mean": _mean(method.seconds),
        "nodes_failed_sum": method.nodes_failed,
    }


def _run_row(run: Run) -> dict[str, object]:
    return {
        "run": run.name,
        "dataset": run.setting.dataset,
        "partition": run.setting.partition,
        "nodes": run.setting.nodes,
        "model": run.setting.model,
        "method": run.method,
        "strategy": run.strategy,
        "seed": run.seed,
        "rounds": run.rounds,
        "bytes_up": run.bytes_up,
        "bytes_down": run.bytes_down,
        "messages": run.messages,
        "accuracy": run.accuracy,
        "loss": run.loss,
        "seconds": run.seconds,
        "nodes_failed": run.nodes_failed,
        "stopped_because": run.stopped_because,
    }


def _write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows that share their keys; None becomes an empty field."""
    records = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def _mean(value: Spread | None) -> float | None:
    return None if value is None else value.mean


def _sd(value: Spread | None) -> float | None:
    return None if value is None else value.sd
