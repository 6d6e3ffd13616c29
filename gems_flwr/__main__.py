"""The command line: ``gems-flwr``, or ``python -m gems_flwr``.

``run``, ``report``, ``reproduce`` and ``driving`` are the ready simulations, each with options of
its own (``gems-flwr run --help``). ``submit`` submits a Flower app to a SuperLink, follows its log,
and ends with a status that tells success from failure. ``aggregate A B -o model.safetensors``
aggregates space files, ``--add`` a late one, and ``--remove`` takes a node out; ``inspect`` says
what one holds and gives away.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gems_flwr.core.disk import file_fault
from gems_flwr.errors import GemsError, OptionError
from gems_flwr.tools import COMMANDS, start_simulations


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns 0 for success, 1 for a run that failed, 2 for bad input, 4 for a space that gives a
    class away (``inspect``), 130 if it was interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in COMMANDS:
            _refuse_apps(*words)
            return start_simulations(words[0], words[1:])
        options = _parser().parse_args(words)
        return int(options.run(options))
    except GemsError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(file_fault(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    # Here, because the simulations have no use for these, which take a while to import.
    from gems_flwr.tools.leaks.command import add_inspect
    from gems_flwr.tools.offline import add_aggregate
    from gems_flwr.tools.submit import add_submit

    parser = argparse.ArgumentParser(prog="gems-flwr", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (_, help_text) in COMMANDS.items():
        commands.add_parser(name, help=help_text)
    for add in (add_aggregate, add_inspect, add_submit):
        add(commands)
    return parser


def _refuse_apps(command: str, first: str = "", second: str = "", *_: str) -> None:
    """Say what to write if a simulation is asked to run a Flower app, as ``flwr run`` does."""
    is_option = "=" in first or first.startswith(("-", "~", "+"))
    is_run_config = first in ("-c", "--run-config", "--federation-config") and "=" in second
    if command == "run" and ((first and not is_option) or is_run_config):
        app = "APP" if is_run_config else first
        raise OptionError(
            f"gems-flwr submit {app} submits a Flower app; gems-flwr run takes options of a "
            "simulation, such as strategy=gems"
        )


if __name__ == "__main__":
    sys.exit(main())
