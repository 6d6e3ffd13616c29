"""``make bench``, or ``python -m simulations.bench [parts] [--quick]``.

Parts: messages, spaces, memory, neurons, merging, averaging, sampling; all by default.
"""

from __future__ import annotations

import argparse
import logging
import sys

from rich.console import Console

from simulations.bench import averaging, memory, merging, messages, neurons, sampling, spaces

PARTS = {
    "messages": messages.report,
    "spaces": spaces.report,
    "memory": memory.report,
    "neurons": neurons.report,
    "merging": merging.report,
    "averaging": averaging.report,
    "sampling": sampling.report,
}


def main() -> int:
    """Print the tables; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m simulations.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"which of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, about a minute")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    console = Console()
    for name in options.parts or PARTS:
        PARTS[name](console, options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
