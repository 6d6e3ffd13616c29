"""Where the results of a Flower app go, if it is told.

``flwr run`` bundles an app, and its ServerApp works in the folder in which the SuperLink was
started: nothing tells it where the user's files are. An app that has the key ``output`` in its run
config can be told. `output_for` says what to tell it; a SuperLink on another machine cannot use a
path of this one.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KEY = "output"
FOLDER = "runs"
# As Flower reads ``-c``: quoted values may hold blanks and further signs of equality.
_PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")
# Addresses by which Flower's config names the SuperLink that ``flwr run`` starts itself.
_MANAGED = (":local:", ":local-in-memory:")


def output_for(app: str, superlink: str | None, run_config: Sequence[str] = ()) -> str | None:
    """Return what ``output`` should be: below the app's own folder, or None to leave it alone.

    Parameters
    ----------
    app : str
        The app's folder, as given to ``flwr run``.
    superlink : str, optional
        Name of the connection in Flower's config; its default one if not given.
    run_config : sequence of str
        What the user sets, as given to ``flwr run -c``.

    Returns
    -------
    str or None
        An absolute path that ends with a slash: a folder that takes the results of many runs. None
        if the app's config has no such key or a value for it, if the user sets it, or if the
        SuperLink is not on this machine.
    """
    folder = Path(app).expanduser().resolve()
    if _app_config(folder).get(KEY) != "" or not is_local(superlink):
        return None
    if any(_sets_output(text) for text in run_config):
        return None
    path = f"{folder / FOLDER}{os.sep}"
    # Flower's option has no way to write both kinds of quotes, or a line break.
    return path if path.isprintable() and '"' not in path and "\\" not in path else None


def is_local(superlink: str | None) -> bool:
    """Return whether a SuperLink runs on this machine, by its address in Flower's config."""
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    if not (home / "config.toml").is_file():
        # Flower writes one with its own local SuperLink as the default.
        return superlink in (None, "local")
    connections = _table(_read(home / "config.toml"), "superlink")
    name = connections.get("default") if superlink is None else superlink
    connection = _table(connections, str(name))
    address = connection.get("address")
    if address is None:
        return "options" in connection  # an older way to name the local one
    if address in _MANAGED:
        return True
    host = str(address).rpartition(":")[0].strip("[]") or str(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _sets_output(text: str) -> bool:
    if text.endswith(".toml"):
        return True  # Flower takes a file or pairs, not both
    return any(key == KEY for key, _ in _PAIR.findall(text))


def _app_config(folder: Path) -> Mapping[str, Any]:
    values: Mapping[str, Any] = _read(folder / "pyproject.toml")
    for key in ("tool", "flwr", "app", "config"):
        values = _table(values, key)
    return values


def _read(path: Path) -> Mapping[str, Any]:
    # What is wrong with a file of Flower's, Flower says itself.
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}
