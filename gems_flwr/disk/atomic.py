"""Writing so that a reader sees the whole new file, or what was there before."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gems_flwr.disk.faults import disk_faults
from gems_flwr.disk.lock import make_folder

PRIVATE_FILE = 0o600


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Give a place beside `path` to write to; what was written there becomes `path` at the end.

    Parameters
    ----------
    path : Path
        The file to replace; its folder is made if need be.
    private : bool
        Whether nobody but the owner may read the file.

    Raises
    ------
    DiskError
        If it cannot be written, or lies in a folder that we held and that is gone. `path` is as it
        was, and nothing else is left behind.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_faults(f"write {path}"):
            wanted = PRIVATE_FILE if private else 0o666
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, wanted))
            mode = PRIVATE_FILE if private else stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            # Writers that replace the file themselves (safetensors) choose a mode of their own.
            with contextlib.suppress(OSError):
                temporary.chmod(mode)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file so that a reader sees all of it or what was there before; see `replacing`."""
    with replacing(path, private=private) as temporary:
        temporary.write_bytes(data)
