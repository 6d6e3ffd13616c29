"""Runs as tables: methods, every run, and the models of runs that train several."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from simulations.report import multi_model_table
from simulations.report.columns import (
    COLUMNS,
    METHOD_FIELDS,
    RUN_COLUMNS,
    RUN_FIELDS,
    Column,
    is_needed,
)
from simulations.report.runs import Run
from simulations.report.summary import SettingSummary
from simulations.report.tables import Row, TextTable, print_table, write_csv


def columns_of(settings: Sequence[SettingSummary]) -> list[Column]:
    """Return the columns that are needed: that of failures only if a node failed, say."""
    methods = [method for summary in settings for method in summary.methods]
    return [column for column in COLUMNS if column.is_shown(methods)]


def caption_of(columns: Sequence[Column]) -> str:
    """Explain the columns that are shown, in one line of plain text."""
    return " ".join(each.caption for each in COLUMNS if each in columns and each.caption)


def methods_table(summary: SettingSummary, columns: Sequence[Column]) -> TextTable:
    """Return one row per method of a setting."""
    rows = []
    for method in summary.methods:
        shares = {i: column.bar(method) for i, column in enumerate(columns) if column.bar}
        bars = {index: share for index, share in shares.items() if share is not None}
        texts = tuple(column.text(method) for column in columns)
        rows.append(Row(texts, method.is_reference, bars))
    return TextTable(tuple(column.heading for column in columns), tuple(rows))


def models_table(summary: SettingSummary) -> TextTable | None:
    """Return the accuracy of every model, where there are several."""
    rows, models = multi_model_table.models_rows(summary), multi_model_table.models_of(summary)
    if not rows:
        return None
    texts = [multi_model_table.texts(row, models) for row in rows]
    return TextTable.of(texts[0], (text.values() for text in texts))


def runs_table(summary: SettingSummary) -> TextTable:
    """Return one row per run of a setting."""
    shown = [column for column in RUN_COLUMNS if is_needed(column[0], summary.runs)]
    return TextTable.of(
        (heading for heading, _, _ in shown),
        ([text(run) for _, text, _ in shown] for run in summary.runs),
        names=tuple(i for i, (_, _, is_words) in enumerate(shown) if is_words),
    )


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
    tables = [methods_table(summary, columns) for summary in settings]
    widths = [max(column) for column in zip(*(table.widths for table in tables), strict=True)]
    for summary, table in zip(settings, tables, strict=True):
        print_table(table, console, title=summary.setting.title, widths=widths)
        console.print()
        models = models_table(summary)
        if models is not None:
            print_table(models, console, caption=multi_model_table.CAPTION)
            console.print()
    console.print(Text(caption_of(columns), style="dim"))


def write_results_csv(settings: Sequence[SettingSummary], path: Path) -> None:
    """Write one row per method and setting, with full precision and units in the headings."""
    runs = [run for summary in settings for run in summary.runs]
    fields = {name: value for name, value in METHOD_FIELDS.items() if is_needed(name, runs)}
    write_csv(
        path,
        (
            {name: value(summary, method) for name, value in fields.items()}
            for summary in settings
            for method in summary.methods
        ),
    )


def write_runs_csv(runs: Sequence[Run], path: Path) -> None:
    """Write one row per run."""
    fields = {name: value for name, value in RUN_FIELDS.items() if is_needed(name, runs)}
    write_csv(path, ({name: value(run) for name, value in fields.items()} for run in runs))
