"""Finding and starting the ready simulations, which are no part of the library.

They lie beside the library in a checkout, and in ``gems_flwr/bundled`` where a wheel was installed.
What they need beyond the library is the extra ``simulations``. They are started by name: nothing
here imports them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gems_flwr.errors import NotInstalledError

_PACKAGE = Path(__file__).resolve().parent.parent
# Commands, what each runs, and what it does in a few words.
COMMANDS = {
    "run": ("simulations.run", "simulate federated learning; -m: each of several options"),
    "report": ("simulations.report.__main__", "table, plots and page of finished runs"),
    "reproduce": ("simulations.reproduce.__main__", "the papers' tables, our studies, the demo"),
    "driving": ("simulations.driving.__main__", "record a driver that models learn from"),
}
# What the extra brings, by the names under which it is imported.
_NEEDED = ("flwr_datasets", "hydra", "matplotlib", "ray", "rich", "torchvision")


def simulations_folder() -> Path:
    """Return the folder that holds ``simulations`` and ``conf``."""
    for folder in (_PACKAGE / "bundled", _PACKAGE.parent):
        if (folder / "simulations" / "run.py").is_file() and (folder / "conf").is_dir():
            return folder
    raise NotInstalledError(
        f"the ready simulations do not lie beside {_PACKAGE}: install gems-flwr from its wheel, "
        "its sdist or a checkout"
    )


def start_simulations(command: str, arguments: Sequence[str]) -> int:
    """Run one of `COMMANDS` with the arguments behind it; return its exit status."""
    folder = str(simulations_folder())
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NotInstalledError(
            f"pip install 'gems-flwr[simulations]' (in a checkout '.[simulations]'): gems-flwr "
            f"{command} needs {', '.join(missing)}, which the library alone does not"
        )
    # First, so that a folder of the user's that is called like them is not taken for them; and
    # also for Ray's workers and other processes that this one starts.
    sys.path.insert(0, folder)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{inherited}" if inherited else folder
    # Hydra reads the arguments from there.
    sys.argv = [f"gems-flwr {command}", *arguments]
    return int(importlib.import_module(COMMANDS[command][0]).main())
