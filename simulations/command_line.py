"""What the command lines share: a user's mistake is one line and status 2, as argparse has it.

Statuses: 0 for success, 1 for runs that failed, 2 for a mistake in what was asked or for a folder
that cannot be used, 130 for an interrupt. `simulations.run` is Hydra's, with the same statuses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from gems_flwr import GemsError

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
# Whether this is the copy that comes with an installed library; see `setup.py`.
IS_BUNDLED = Path(__file__).resolve().parents[1].name == "bundled"


class UsageError(GemsError, ValueError):
    """What was asked for cannot be done; the message says what can."""


class CommandParser(argparse.ArgumentParser):
    """A parser that complains in one line, without the list of everything that is allowed."""

    def error(self, message: str) -> NoReturn:
        """End with the complaint and status 2."""
        self.exit(EXIT_MISTAKE, f"{self.prog}: error: {message} (--help lists the options)\n")


def program(name: str) -> str:
    """Return what to type for a command, such as ``run``, where this is installed."""
    return f"gems-flwr {name}" if IS_BUNDLED else f"python -m simulations.{name}"


def count(text: str) -> int:
    """Read a whole number of at least 1; the type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got '{text}'")
    return int(text)


def run_command(
    action: Callable[[], int],
    mistakes: tuple[type[Exception], ...] = (),
    explain: Callable[[Exception], str] | None = None,
) -> int:
    """Return the exit status of an action, or print in a line why it cannot be done.

    Parameters
    ----------
    action : callable
        Returns the exit status.
    mistakes : tuple of exception types
        What a user can cause beside errors of the library and of the disk.
    explain : callable, optional
        Turns an error into text; by default its own, or the file and the reason.
    """
    expected: tuple[type[Exception], ...] = (GemsError, OSError, *mistakes)
    try:
        return action()
    except expected as error:
        complain((explain or _explain)(error))
        return EXIT_MISTAKE


def complain(text: str) -> None:
    """Print an error as it is: a folder may be called "[red]"."""
    Console(stderr=True, soft_wrap=True).print(text, style="red", markup=False, highlight=False)
    sys.stderr.flush()


def _explain(error: Exception) -> str:
    # Not before: it takes Flower.
    from gems_flwr.core.disk import file_fault

    return file_fault(error) if isinstance(error, OSError) else str(error)
