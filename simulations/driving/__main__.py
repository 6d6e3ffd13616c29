"""Command line: ``python -m simulations.driving record``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from simulations.command_line import EXIT_INTERRUPTED, CommandParser, count, program, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Record; return 0, 2 for a mistake in what was asked, 130 if interrupted."""
    parser = CommandParser(
        prog=program("driving"),
        description="Let the controller drive; write images and steering angles. How models of "
        f"these drive is shown by {program('reproduce')} dynamic_driving.",
    )
    parser.add_argument("command", choices=["record"])
    parser.add_argument("--tracks", type=count, default=10, help="how many; 10")
    parser.add_argument(
        "--frames-per-track",
        type=count,
        default=4800,
        metavar="N",
        help="25 a second, half of them in each direction; 4800",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="files go to DIR/driving; default: the environment variable GEMS_FLWR_DATA",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the tracks; 0")
    parser.add_argument(
        "--noise",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="largest disturbance of the steering, a share of full lock; 1",
    )
    asked = parser.parse_args(arguments)
    try:
        return run_command(lambda: _record(asked))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED


def _record(asked: argparse.Namespace) -> int:
    from simulations.data import data_folder
    from simulations.driving.recording import RecordingOptions, record

    options = RecordingOptions(asked.tracks, asked.frames_per_track, asked.seed, asked.noise)
    record(options, data_folder(asked.data_dir, "driving"), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
