"""A folder has one owner at a time.

The owner holds a lock of the operating system on a file in the folder, so the lock ends with the
process, however it ends; a file that a killed process left behind blocks nobody. The file says who
the owner is, for whoever comes second. Within a process the lock follows the flow of the program:
what is called while a folder is held may hold it again, another thread may not.

On Windows the system's other kind of lock is used. Linux passes ``flock`` on to NFS servers, so
machines exclude each other there if the server keeps locks. Where a file system refuses any lock, a
warning says so and the run goes on without.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import IO

from gems_flwr.disk.faults import disk_faults, why
from gems_flwr.errors import DiskError, FolderInUseError

LOCK_FILE = ".gems-flwr.lock"
PRIVATE_FOLDER = 0o700
_POLL_SECONDS = 0.2
_TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)

# Folders that the code around us holds.
_held: ContextVar[Mapping[Path, IO[bytes]]] = ContextVar("held_folders", default={})  # noqa: B039

if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        # Locked bytes cannot be read by others, so the one that is locked lies behind the text.
        file.seek(1 << 20)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def hold_folder(folder: str | Path, *, wait: bool = False) -> Iterator[None]:
    """Own a folder as long as the context lasts; it is made if need be.

    Parameters
    ----------
    folder : path
        May be held already by the code around, which then goes on holding it.
    wait : bool, default False
        Whether to wait for as long as another owner takes, instead of raising an error.

    Raises
    ------
    FolderInUseError
        If another process, or another thread of this one, holds the folder. Says who.
    DiskError
        If the folder cannot be made or written to.
    """
    place = Path(folder).resolve()
    if place in _held.get():
        yield
        return
    new = not place.exists()
    make_folder(place)
    file = _acquired(place, Path(folder), wait)
    token = _held.set({**_held.get(), place: file})
    try:
        yield
    finally:
        _held.reset(token)
        # Removed while it is still locked; whoever waits for it sees that it is gone.
        with contextlib.suppress(OSError):
            if _is_at(file, place / LOCK_FILE):
                (place / LOCK_FILE).unlink()
        file.close()
        if new:
            with contextlib.suppress(OSError):
                place.rmdir()


def check_held(path: str | Path) -> None:
    """Make sure that the folders which the code around us holds are still the same.

    Parameters
    ----------
    path : path
        Where something is to be written; folders that it does not lie in are not looked at.

    Raises
    ------
    DiskError
        If one was removed, or its disk is gone or another one.
    """
    held = _held.get()
    if not held:
        return
    place = Path(path).resolve()
    for folder, file in held.items():
        if place.is_relative_to(folder) and not _is_at(file, folder / LOCK_FILE):
            raise DiskError(f"the folder {folder} was removed or replaced while the run used it")


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Make a folder, and those above it, where it is not there yet.

    Parameters
    ----------
    folder : Path
        May exist already.
    private : bool
        Whether nobody but the owner may look into it; an existing folder is closed, too.

    Raises
    ------
    DiskError
        If it cannot be made, or lies in a folder that we held and that is gone.
    """
    check_held(folder)
    with disk_faults(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    if private:
        # A file system without modes has no way to say it; that is no reason to stop.
        with contextlib.suppress(OSError):
            folder.chmod(PRIVATE_FOLDER)


def _acquired(place: Path, called: Path, wait: bool) -> IO[bytes]:
    path = place / LOCK_FILE
    while True:
        with disk_faults(f"write in the folder {called}"):
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        try:
            if _locked(file, called, wait) and _is_at(file, path):
                with disk_faults(f"write in the folder {called}"):
                    _sign(file)
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _locked(file: IO[bytes], called: Path, wait: bool) -> bool:
    """Return whether the lock is ours; False to try again."""
    try:
        _lock(file)
    except OSError as error:
        if error.errno not in _TAKEN:
            warnings.warn(
                f"{called} cannot be locked, so nothing keeps a second run out: {why(error)}",
                RuntimeWarning,
                stacklevel=2,
            )
            return True
        if not wait:
            raise FolderInUseError(
                f"{called} is in use by {_owner(file)}: wait until it ends, stop it, or choose "
                "another folder"
            ) from None
        time.sleep(_POLL_SECONDS)
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether an open file is the one that lies at a path now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _sign(file: IO[bytes]) -> None:
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    owner = {"host": platform.node(), "pid": os.getpid(), "since": since}
    file.seek(0)
    file.truncate()
    file.write(json.dumps(owner).encode())
    file.flush()


def _owner(file: IO[bytes]) -> str:
    """Return who signed a lock file, in words."""
    try:
        owner = json.loads(file.read(4096))
        host, pid, since = str(owner["host"]), int(owner["pid"]), str(owner["since"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process (it has not said which)"
    here = host == platform.node()
    mark = " (this one)" if here and pid == os.getpid() else ""
    if here and not mark and not _lives(pid):
        # Locks are inherited: a worker may have outlived whoever started it.
        mark = " (it has ended, but one that it started still runs)"
    return f"process {pid}{mark} on {host} since {since}"


def _lives(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # there a signal 0 is no question
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True
