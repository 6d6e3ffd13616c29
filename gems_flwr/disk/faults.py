"""What the operating system says about a disk, as one sentence that tells what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from safetensors import SafetensorError

from gems_flwr.errors import DiskError

_OTHERWISE = "choose another folder"
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have the quota raised",
    errno.EROFS: f"make it writable, or {_OTHERWISE}",
    errno.EACCES: f"make it writable, or {_OTHERWISE}",
    errno.EPERM: f"make it writable, or {_OTHERWISE}",
    errno.EEXIST: f"a file is in the way: move it, or {_OTHERWISE}",
    errno.ENOTDIR: f"a file is in the way: move it, or {_OTHERWISE}",
    errno.EISDIR: f"a folder is in the way: move it, or {_OTHERWISE}",
    errno.ENOENT: "the folder is gone: bring it back",
    errno.EIO: "the disk itself reports an error",
}


def why(error: OSError) -> str:
    """Return what went wrong and what to do, without a line break."""
    reason = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0)
    return f"{reason} ({advice})" if advice else reason


def file_fault(error: OSError) -> str:
    """Return which file is at fault, what went wrong and what to do, without a line break."""
    return why(error) if error.filename is None else f"{error.filename}: {why(error)}"


@contextlib.contextmanager
def disk_faults(task: str) -> Iterator[None]:
    """Turn what the operating system raises into a `DiskError`.

    Parameters
    ----------
    task : str
        What is being done, as in ``"write runs/a/result.json"``.

    Raises
    ------
    DiskError
        Names the task, what went wrong and what to do.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(f"cannot {task}: {why(error)}") from error
    except SafetensorError as error:
        # Its writer is not Python's: the system's own number stands in the text alone.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise DiskError(f"cannot {task}: {why(OSError(code, os.strerror(code)))}") from error
