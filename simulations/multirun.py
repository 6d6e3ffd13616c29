"""What a run has to know of the multirun that it is part of.

Hydra's launcher says where the runs of a multirun are made: one after the other in this process
(``basic``), or in processes of their own (``joblib``, ``submitit_slurm`` …), whose errors and
progress bars get mixed up unless somebody sees to it. Its sweeper says which runs there are: all
that were listed (``basic``), or those that a search asks for, which goes by what the runs before
have returned (``optuna``).
"""

from __future__ import annotations

import re
from typing import Any

from hydra.types import RunMode

from gems_flwr.errors import GemsError

_BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
# What to install for a launcher or sweeper that Hydra does not bring along.
_PLUGINS = {
    "launcher/joblib": "'gems-flwr[launchers]'",
    "launcher/slurm": "hydra-submitit-launcher",
    "launcher/submitit_slurm": "hydra-submitit-launcher",
    "launcher/submitit_local": "hydra-submitit-launcher",
    "launcher/ray": "hydra-ray-launcher",
    "launcher/ray_cluster": "hydra-ray-launcher",
    "sweeper/optuna": "'gems-flwr[search]'",
}
_MODULES = {
    "hydra_plugins.hydra_submitit_launcher": "launcher/slurm",
    "hydra_plugins.hydra_ray_launcher": "launcher/ray_cluster",
}


class RunFailedError(GemsError):
    """A run of a multirun failed; carried from its process to the command's.

    The message says why if nobody has seen it yet, and is empty otherwise.
    """


def is_multirun(hydra: Any) -> bool:
    """Return whether Hydra's own config is that of a multirun."""
    return bool(hydra.get("mode") == RunMode.MULTIRUN)


def is_parallel(hydra: Any) -> bool:
    """Return whether runs are made in other processes than the command's own."""
    return is_multirun(hydra) and str(hydra.launcher.get("_target_")) != _BASIC_LAUNCHER


def shares_screen(hydra: Any) -> bool:
    """Return whether what a run prints is seen by whoever gave the command.

    Launchers of clusters write it to files.
    """
    return not is_parallel(hydra) or "joblib" in hydra.launcher.get("_target_", "")


def is_search(hydra: Any) -> bool:
    """Return whether which runs there are depends on what the runs before returned."""
    return is_multirun(hydra) and str(hydra.sweeper.get("_target_")) != _BASIC_SWEEPER


def missing_plugin(complaint: str) -> str | None:
    """Return what to install, if Hydra complains that it does not know a launcher or sweeper."""
    found = re.search(r"hydra/(launcher|sweeper)[/=](\w+)", complaint)
    wanted = None if found is None else f"{found.group(1)}/{found.group(2)}"
    if wanted is None:
        wanted = next((name for key, name in _MODULES.items() if key in complaint), None)
    if wanted not in _PLUGINS:
        return None
    return f"hydra/{wanted.replace('/', '=')} is a plugin: pip install {_PLUGINS[wanted]}"
