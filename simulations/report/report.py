"""The whole report in one call: read, print, draw, write; and ``report.html``, its one page."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

from simulations.report.columns import (
    METRICS,
    MODELS_CAPTION,
    Column,
    caption_of,
    columns_of,
    method_fields,
    methods_table,
    models_table,
    run_fields,
    runs_table,
)
from simulations.report.pages import LONG_LIST, caption, document, figure, folded, note
from simulations.report.plots import Plot, draw_plots
from simulations.report.runs import NoRunsError, Setting, read_runs
from simulations.report.summary import SettingSummary, comparability_warnings, summarise
from simulations.report.tables import TextTable, html_table, print_table, write_csv


def build_report(paths: Sequence[Path], output: Path, console: Console | None = None) -> Path:
    """Print the table of all finished runs, write plots, CSV files and the page; return its path.

    Parameters
    ----------
    paths : Sequence[Path]
        Run directories, or folders that hold run directories at any depth.
    output : Path
        Folder to write to; made if missing. Gets ``report.html``, ``results.csv`` (one row per
        method), ``runs.csv`` (one row per run) and ``plots/*.png``.
    console : Console, optional
        Where to print; default: standard output.

    Raises
    ------
    NoRunsError
        If no path holds a finished, readable run. The message has what was found instead.
    """
    console = console or Console()
    collection = read_runs(paths)
    if not collection.runs:
        places = ", ".join(map(str, paths))
        found = "; ".join((*collection.unfinished, *collection.warnings))
        extra = f" (found: {found})" if found else ""
        raise NoRunsError(
            f"No finished run (a folder with a readable result.json) in {places}{extra}."
        )
    settings = summarise(collection.runs)
    warnings = (*collection.warnings, *comparability_warnings(settings))
    output.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(settings, output / "plots")
    rows = [method_fields(summary, method) for summary in settings for method in summary.methods]
    write_csv(output / "results.csv", rows)
    write_csv(output / "runs.csv", [run_fields(run) for each in settings for run in each.runs])
    report = output / "report.html"
    page = render_page(settings, plots, collection.unfinished, warnings)
    report.write_text(page, encoding="utf-8")
    _print_tables(settings, console)
    # Names and paths are data, not markup: a folder called "[red]" must print as it is.
    for warning in warnings:
        console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False)
    if collection.unfinished:
        names = ", ".join(collection.unfinished)
        text = f"Unfinished, left out ({len(collection.unfinished)}): {names}"
        console.print(text, style="yellow", markup=False, highlight=False)
    console.print(f"Report: {report}", markup=False, highlight=False, soft_wrap=True)
    return report


def _print_tables(settings: Sequence[SettingSummary], console: Console) -> None:
    """Print the methods under one heading per setting, columns aligned throughout."""
    columns = columns_of(settings)
    tables = [methods_table(summary, columns) for summary in settings]
    widths = [max(column) for column in zip(*(table.widths for table in tables), strict=True)]
    for summary, table in zip(settings, tables, strict=True):
        print_table(table, console, title=summary.setting.title, widths=widths)
        console.print()
        models = models_table(summary)
        if models is not None:
            print_table(models, console, caption=MODELS_CAPTION)
            console.print()
    console.print(Text(caption_of(columns), style="dim"))


_HOW_TO_READ = """
<section>
<h2>How to read this</h2>
<p>Each row is one way of learning from data that stay where they are. Against bytes, a good method
stands far to the left and high (accuracy) or low (error of numbers). <em>up, down</em> are payload
bytes from and to the nodes, summed over nodes and rounds; <em>accuracy, rmse</em> are of the final
model on the test data. <em>global</em> trains on all data in one place (its bytes are those of the
raw data), <em>local</em> lets each node learn alone: level lines. Methods with several rounds are
curves, averaged over seeds round by round, with a band of one standard deviation; thin lines are
single seeds, where some ran longer. <em>Cumulative loss</em> is of nodes that learn from a stream:
the loss on every batch before learning from it, summed. Of several models accuracy is the mean.</p>
</section>
"""


def render_page(
    settings: Sequence[SettingSummary],
    plots: Mapping[Setting, Sequence[Plot]],
    unfinished: Sequence[str],
    warnings: Sequence[str],
) -> str:
    """Return the report as one HTML page, without any reference to another file or host."""
    runs = sum(len(summary.runs) for summary in settings)
    counts = [_plural(runs, "finished run"), _plural(len(settings), "setting")]
    if unfinished:
        counts.append(f"{len(unfinished)} unfinished, left out")
    columns = columns_of(settings)
    # A phone shows the first columns without scrolling, so what everybody looks for comes first.
    columns.sort(key=lambda c: (c.heading != "method", c.heading not in METRICS))
    body = [
        "<h1>Federated learning runs compared</h1>",
        caption(" · ".join(counts)),
        note("Please note", warnings),
        note("Unfinished runs, left out", unfinished),
        *(_section(summary, columns, plots.get(summary.setting, ())) for summary in settings),
        _HOW_TO_READ,
    ]
    return document("Federated learning runs compared", "".join(body))


def _section(summary: SettingSummary, columns: Sequence[Column], plots: Sequence[Plot]) -> str:
    parts = [
        f"<section>\n<h2>{escape(summary.setting.title)}</h2>",
        html_table(methods_table(summary, columns)),
        caption(caption_of(columns)),
    ]
    models = models_table(summary)
    if models is not None:
        parts.append(f"<h3>Accuracy of every model</h3>\n{html_table(models)}")
        parts.append(caption(MODELS_CAPTION))
    if plots:
        shown = (figure(plot.path, f"{plot.title}; numbers: see the table.") for plot in plots)
        parts.append(f'<div class="plots">{"".join(shown)}</div>')
    parts.append(_failures(summary))
    every = html_table(runs_table(summary))
    parts.append(folded(f"Every run ({len(summary.runs)})", every, is_open=False))
    return "\n".join([*parts, "</section>\n"])


def _failures(summary: SettingSummary) -> str:
    """List failures once per run, node and reason, with the rounds."""
    rounds: dict[tuple[str, str, str, int], list[int]] = defaultdict(list)
    for run in summary.runs:
        for entry in run.history:
            for node, reason in entry.failures:
                rounds[node, reason, run.method, run.seed].append(entry.number)
    if not rounds:
        return ""
    # Node 10 after node 9.
    found = sorted(rounds.items(), key=lambda item: (len(item[0][0]), item[0]))
    rows = [(*map(str, key), ", ".join(map(str, numbers))) for key, numbers in found]
    headings = ("node", "reason", "method", "seed", "rounds")
    content = html_table(TextTable.of(headings, rows, names=(0, 1, 2, 4)), wide=(1, 4))
    return folded(f"Failures by node ({len(rows)})", content, len(rows) <= LONG_LIST)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
