"""Command line: ``python -m simulations.report DIR… [--output DIR]``."""

import sys
from collections.abc import Sequence
from pathlib import Path

from simulations.command_line import CommandParser, program, run_command
from simulations.report.report import build_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a report; return 0, or 2 if there is no finished run or no place to write to."""
    parser = CommandParser(
        prog=program("report"),
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
    asked = parser.parse_args(arguments)
    paths: list[Path] = asked.paths
    output: Path = asked.output or (paths[0] if len(paths) == 1 else Path("runs", "report"))

    def write() -> int:
        build_report(paths, output)
        return 0

    return run_command(write)


if __name__ == "__main__":
    sys.exit(main())
