"""Where a run's results go under ``flwr run``.

Flower bundles an app and does not tell its ServerApp where the user's folder is: it works in the
folder in which the SuperLink was started. That one is the user's, or below it, whenever
``flwr run .`` started the SuperLink itself; otherwise ``output`` has to say where.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

FOLDER = "runs"


def results_folder(output: str, name: str, *, bundle: Path) -> Path:
    """Return the folder for the results of a run, as an absolute path.

    Parameters
    ----------
    output : str
        What the run config says. A path is taken as it is; if it ends with a slash, the run gets a
        folder of its own in it. Empty: below ``runs`` in the app's own folder, if the SuperLink
        was started in it, and else in the folder where it was started.
    name : str
        The run's own name.
    bundle : Path
        Where Flower has unpacked the app.
    """
    if output:
        folder = Path(output).expanduser()
        return (folder / name if output.endswith("/") else folder).absolute()
    return (app_folder(bundle) or Path.cwd()) / FOLDER / name


def app_folder(bundle: Path) -> Path | None:
    """Return the nearest folder above the working one that holds the bundled app itself."""
    wanted = _identity(bundle)
    if wanted is None:
        return None
    return next((folder for folder in _here_and_above() if _identity(folder) == wanted), None)


def _here_and_above() -> Iterator[Path]:
    starts = [Path.cwd()]
    # A shell's own word for it keeps the links by which the user got there.
    if (word := Path(os.environ.get("PWD", ""))).is_absolute():
        starts.append(word)
    for start in starts:
        yield from (start, *start.parents)


def _identity(folder: Path) -> tuple[str, str] | None:
    """Return publisher and name of the Flower app in a folder; None if there is none."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        return project["tool"]["flwr"]["app"]["publisher"], project["project"]["name"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
