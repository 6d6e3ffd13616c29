"""Whether a node leaves the run that it takes part in.

``withdraw`` in its ``--node-config`` says so: ``true``, or the path of a file, for a SuperNode that
is not to be started anew; the node leaves as soon as the file is there. What it is asked for then
is not computed; see `gems_flwr.wire.withdrawals`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gems_flwr.errors import OptionError

_KEY = "withdraw"


def is_withdrawing(config: Mapping[str, Any]) -> bool:
    """Return whether a node's own config says that it leaves.

    Raises
    ------
    OptionError
        If it says something else.
    """
    said = config.get(_KEY, False)
    if isinstance(said, str) and said:
        return Path(said).expanduser().exists()
    if not isinstance(said, bool):
        raise OptionError(f"node-config {_KEY}: expected true, false or a path, got {said!r}")
    return said
