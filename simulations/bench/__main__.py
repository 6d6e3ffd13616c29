"""What messages, spaces, memory and the rest cost, as ratios: tables on the screen."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from rich.console import Console

from simulations.command_line import CommandParser, UsageError, run_command

# Each is a module NAME_cost with a function `report`.
PARTS = (
    "messages",
    "compression",
    "spaces",
    "moments",
    "memory",
    "neurons",
    "merging",
    "averaging",
    "sampling",
    "lockstep",
    "secure",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return the exit status."""
    parser = CommandParser(prog="python -m simulations.bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"which of {', '.join(PARTS)}; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, about a minute")
    asked = parser.parse_args(arguments)
    return run_command(lambda: _bench(asked.parts or PARTS, asked.quick))


def _bench(parts: Sequence[str], quick: bool) -> int:
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise UsageError(f"there is no '{unknown[0]}'; there are {', '.join(PARTS)}")
    console = Console()
    for part in parts:
        bench = import_module(f"{__package__}.{part}_cost")
        # After the import: the first one of Flower sets a level of its own.
        logging.getLogger("flwr").setLevel(logging.ERROR)
        bench.report(console, quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
