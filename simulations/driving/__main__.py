"""Command line: ``python -m simulations.driving record|drive``."""

import sys
from collections.abc import Sequence

from simulations.command_line import EXIT_INTERRUPTED, CommandParser, program, run_command
from simulations.driving.drive_command import add_drive
from simulations.driving.record_command import add_record


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, or drive; see `simulations.driving`.

    Parameters
    ----------
    arguments : Sequence[str], optional
        The arguments after the program's name; default: those of this process.

    Returns
    -------
    int
        Exit status: 0 for success, 2 for a mistake in what was asked, 130 if it was interrupted.
    """
    parser = CommandParser(
        prog=program("driving"),
        description="Deep driving in closed loop: record a driver, let models drive.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    add_record(commands)
    add_drive(commands)
    asked = parser.parse_args(arguments)
    try:
        return run_command(lambda: int(asked.run(asked)))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
