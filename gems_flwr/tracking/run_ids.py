"""Which run of a tracker belongs to a folder, so that a resumed run goes on in it.

The folder is the run's `checkpoint_dir`: what has none cannot be resumed, and is a new run in the
tracker each time. The ids lie in ``tracking.json`` beside the checkpoint.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from gems_flwr.disk.files import write_atomically

FILE = "tracking.json"
# Several trackers of one run write to the file, each from a thread of its own.
_ONE_AT_A_TIME = threading.Lock()


def known_id(folder: Path | None, tracker: str) -> str | None:
    """Return the id of the run that an earlier process began for this folder, if there is one.

    Parameters
    ----------
    folder : Path or None
        The folder of the run.
    tracker : str
        The tracker's name.
    """
    with _ONE_AT_A_TIME:
        return _read(folder).get(tracker)


def keep_id(folder: Path | None, tracker: str, run_id: str) -> None:
    """Note which run of a tracker belongs to a folder."""
    if folder is not None:
        with _ONE_AT_A_TIME:
            ids = {**_read(folder), tracker: run_id}
            write_atomically(folder / FILE, json.dumps(ids, indent=2).encode())


def forget_ids(folder: Path) -> None:
    """Let the next run in a folder be a new one in all trackers."""
    (folder / FILE).unlink(missing_ok=True)


def _read(folder: Path | None) -> dict[str, str]:
    if folder is None or not (folder / FILE).exists():
        return {}
    try:
        ids = dict(json.loads((folder / FILE).read_bytes()))
    except (ValueError, TypeError):
        return {}  # then it is a new run in the tracker, which harms nobody
    return {str(key): str(value) for key, value in ids.items()}
