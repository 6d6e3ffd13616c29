"""What messages, spaces, memory and the rest cost, as ratios: tables on the screen, and a page.

Each part is a module ``NAME_cost`` with a generator ``measure(quick)`` of `CostTable`; one that has
only ``report(console, quick)``, which prints, is taken as well, and its text put into the page.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gems_flwr.errors import describe_fault
from simulations.command_line import (
    EXIT_FAILED,
    CommandParser,
    UsageError,
    program,
    run_command,
)

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
    """Measure, print the tables and write the page; return the exit status."""
    parser = CommandParser(prog="python -m simulations.bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"which of {', '.join(PARTS)}; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, about a minute")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/bench"),
        metavar="FOLDER",
        help="where index.html, bench.json and bench.csv go (build/bench)",
    )
    parser.add_argument(
        "--compare", type=Path, metavar="BEFORE", help="a bench.json: print what changed since"
    )
    parser.add_argument(
        "--now",
        type=Path,
        metavar="AFTER",
        help="another bench.json, to be compared with BEFORE instead of measuring",
    )
    asked = parser.parse_args(arguments)
    if asked.now and not asked.compare:
        parser.error("--now needs --compare BEFORE")
    words = ["bench", *asked.parts, *(["--quick"] if asked.quick else [])]
    return run_command(
        lambda: (
            _compare(asked.compare, asked.now)
            if asked.now
            else _bench(asked.parts or PARTS, asked.quick, asked.output, asked.compare, words)
        )
    )


def _bench(
    parts: Sequence[str], quick: bool, output: Path, before: Path | None, words: Sequence[str]
) -> int:
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise UsageError(f"there is no '{unknown[0]}'; there are {', '.join(PARTS)}")
    # Not before a mistake is found: this takes matplotlib.
    from simulations.bench.bench_files import PartResult, changes, read_parts
    from simulations.bench.bench_page import write_page
    from simulations.bench.machine_facts import machine_facts
    from simulations.bench.measuring import measure_part

    old = read_parts(before) if before else []
    facts = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": " ".join([program(words[0]), *words[1:]]),
        **machine_facts(),
    }
    console, measured, status = Console(), list[PartResult](), 0
    for part in parts:
        bench = import_module(f"{__package__}.{part}_cost")
        # After the import: the first one of Flower sets a level of its own.
        logging.getLogger("flwr").setLevel(logging.ERROR)
        try:
            measured.append(measure_part(part, bench, quick, console))
        except Exception as error:  # what the others have taken minutes for is not lost
            measured.append(PartResult(part, text=f"failed: {describe_fault(error)}"))
            console.print(Text(f"{part} {measured[-1].text}", style="red"))
            status = EXIT_FAILED
    changed = changes(old, measured)
    page = write_page(output, measured, facts, changed)
    if before:
        _print_changes(changed, console)
    console.print(Text(str(page)))
    return status


def _compare(before: Path, now: Path) -> int:
    from simulations.bench.bench_files import changes, read_parts

    _print_changes(changes(read_parts(before), read_parts(now)), Console())
    return 0


def _print_changes(changed: Sequence, console: Console) -> None:  # type: ignore[type-arg]
    from simulations.bench.bench_files import change_table
    from simulations.report.tables import print_table

    if not changed:
        console.print("Nothing that both runs have measured.")
        return
    print_table(
        change_table(changed),
        console,
        title="What changed",
        caption="by limit: after both are divided by their run's limit; below 1 is better.",
    )


if __name__ == "__main__":
    sys.exit(main())
