"""Command line: ``python -m simulations.report DIR… [--output DIR]``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gems_flwr.disk.faults import file_fault
from gems_flwr.errors import GemsError
from simulations.report.write_report import build_report

EXIT_NO_REPORT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Make a report from the command line.

    Parameters
    ----------
    argv : Sequence[str], optional
        The arguments after the program's name; default: those of this process.

    Returns
    -------
    int
        Exit status: 0 for a report, 2 if there was no finished run to report on, or no place to
        write to.
    """
    parser = argparse.ArgumentParser(
        prog="python -m simulations.report",
        description="Compare finished runs: a table, plots, results.csv and report.html.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="a run directory, or a folder that holds run directories at any depth",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where to write; default: DIR itself if one is given, runs/report if several",
    )
    arguments = parser.parse_args(argv)
    paths: list[Path] = arguments.paths
    output: Path = arguments.output or (paths[0] if len(paths) == 1 else Path("runs", "report"))
    try:
        build_report(paths, output)
    except (GemsError, OSError) as error:
        text = file_fault(error) if isinstance(error, OSError) else str(error)
        Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
        return EXIT_NO_REPORT
    return 0


if __name__ == "__main__":
    sys.exit(main())
