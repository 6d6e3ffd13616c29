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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gems_flwr.errors import ModelError, NotInstalledError

if TYPE_CHECKING:
    from torch import nn

_PACKAGE = Path(__file__).resolve().parent.parent
# Commands, what each runs, and what it does in a few words.
COMMANDS = {
    "run": ("simulations.run", "simulate federated learning; -m: each of several options"),
    "report": ("simulations.report.__main__", "table, plots and page of finished runs"),
    "reproduce": ("simulations.reproduce.__main__", "the papers' tables, our studies, the demo"),
    "driving": ("simulations.driving.__main__", "record a driver, let trained models drive"),
}
# What the extra brings, by the names under which it is imported.
_NEEDED = ("flwr_datasets", "hydra", "matplotlib", "ray", "rich", "torchvision")


def simulations_folder() -> Path:
    """Return the folder that holds ``simulations`` and ``conf``.

    Raises
    ------
    NotInstalledError
        If this library was installed without them.
    """
    for folder in (_PACKAGE / "bundled", _PACKAGE.parent):
        if (folder / "simulations" / "run.py").is_file() and (folder / "conf").is_dir():
            return folder
    raise NotInstalledError(
        f"the ready simulations do not lie beside {_PACKAGE}: install gems-flwr from its wheel, "
        "its sdist or a checkout"
    )


def start_simulations(command: str, arguments: Sequence[str]) -> int:
    """Run one of `COMMANDS`; return its exit status.

    Parameters
    ----------
    command : str
        Which.
    arguments : sequence of str
        What stands behind it on the command line, as it is.

    Raises
    ------
    NotInstalledError
        If something is missing.
    """
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


def network_of(
    network: Mapping[str, Any], input_shape: Sequence[int], classes: int
) -> Callable[[], nn.Module]:
    """Return what builds the network of a run, by the name in the run's own file.

    Only functions of the simulations are called: a folder that came from somebody else can name
    anything.

    Parameters
    ----------
    network : mapping from str to object
        ``_target_``, and options.
    input_shape : sequence of int
        Shape of one example.
    classes : int
        Number of classes; 0 for a number.

    Raises
    ------
    ModelError
        If there is no such function, or it does not take the options.
    NotInstalledError
        If this library was installed without the simulations.
    """
    options = dict(network)
    target = options.pop("_target_", None)
    module, _, name = str(target).rpartition(".")
    if not module.startswith("simulations."):
        raise ModelError(
            f"the network is built by {target!r}, which is none of this project's functions: say "
            "how to build it, --model module:name"
        )
    folder = str(simulations_folder())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        build: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"there is no network {target}: {error}") from error
    # Not what that module has imported from elsewhere.
    if getattr(build, "__module__", None) != module or not callable(build):
        raise ModelError(f"{target} is no function of {module}")

    def made() -> nn.Module:
        try:
            built: nn.Module = build(input_shape=tuple(input_shape), classes=classes, **options)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{target} does not build a network: {error}") from error
        return built

    return made
