"""The whole report in one call: read, print, draw, write."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from simulations.report.run_page import render_page
from simulations.report.run_plots import draw_plots
from simulations.report.run_tables import print_tables, write_results_csv, write_runs_csv
from simulations.report.runs import NoRunsError, read_runs
from simulations.report.summary import comparability_warnings, summarise


def build_report(paths: Sequence[Path], output: Path, console: Console | None = None) -> Path:
    """Print the table of all finished runs and write plots, CSV files and ``report.html``.

    Parameters
    ----------
    paths : Sequence[Path]
        Run directories, or folders that hold run directories at any depth.
    output : Path
        Folder to write to; made if missing. Gets ``report.html``, ``results.csv`` (one row per
        method), ``runs.csv`` (one row per run) and ``plots/*.png``.
    console : Console, optional
        Where to print; default: standard output.

    Returns
    -------
    Path
        The path of ``report.html``.

    Raises
    ------
    NoRunsError
        If no path holds a finished, readable run. The message says what was found instead.
    """
    console = console or Console()
    collection = read_runs(paths)
    if not collection.runs:
        raise NoRunsError.explain(paths, collection)
    settings = summarise(collection.runs)
    warnings = (*collection.warnings, *comparability_warnings(settings))

    output.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(settings, output / "plots")
    write_results_csv(settings, output / "results.csv")
    write_runs_csv(collection.runs, output / "runs.csv")
    report = output / "report.html"
    report.write_text(
        render_page(settings, plots, collection.unfinished, warnings), encoding="utf-8"
    )

    print_tables(settings, console)
    # Names and paths are data, not markup: a folder called "[red]" must print as it is.
    for warning in warnings:
        console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False)
    if collection.unfinished:
        names = ", ".join(run.describe() for run in collection.unfinished)
        text = f"Unfinished, left out ({len(collection.unfinished)}): {names}"
        console.print(text, style="yellow", markup=False, highlight=False)
    console.print(f"Report: {report}", markup=False, highlight=False, soft_wrap=True)
    return report
