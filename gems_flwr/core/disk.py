"""Files that are whole or not there, checksums, and folders that one process owns at a time.

A folder's owner holds a lock of the operating system on a file in the folder, so the lock ends with
the process, however it ends. The file says who the owner is. Within a process the lock follows the
flow of the program: what is called while a folder is held may hold it again, another thread may
not. Where a file system refuses any lock, a warning is given and the run goes on without.

A safetensors file has no checksum of its own. Ours notices damage: a flipped bit, a lost block. It
is no signature; whoever can write the file can write a checksum that fits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import re
import stat
import time
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from gems_flwr.errors import DiskError, FolderInUseError

_WRITABLE = "make it writable, or choose another folder"
_IN_THE_WAY = "a file is in the way: move it, or choose another folder"
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have the quota raised",
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _WRITABLE),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), _IN_THE_WAY),
    errno.EISDIR: _IN_THE_WAY.replace("file", "folder"),
    errno.ENOENT: "the folder is gone: bring it back",
    errno.EIO: "the disk itself reports an error",
}


def file_fault(error: OSError) -> str:
    """Return which file is at fault, what went wrong and what to do, without a line break."""
    return _why(error) if error.filename is None else f"{error.filename}: {_why(error)}"


def _why(error: OSError) -> str:
    reason = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0)
    return f"{reason} ({advice})" if advice else reason


@contextlib.contextmanager
def disk_faults(task: str) -> Iterator[None]:
    """Turn what the operating system raises into a `DiskError` that says what failed and why.

    The task is put as in ``"write runs/a/result.json"``.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(f"cannot {task}: {_why(error)}") from error
    except SafetensorError as error:
        # Its writer is not Python's: the system's own number stands in the text alone.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise DiskError(f"cannot {task}: {_why(OSError(code, os.strerror(code)))}") from error


# --- one owner -------------------------------------------------------------------------------

LOCK_FILE = ".gems-flwr.lock"
_POLL_SECONDS = 0.2
_TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)

# Folders that the code around us holds.
_held: ContextVar[Mapping[Path, IO[bytes]]] = ContextVar("held_folders", default={})  # noqa: B039


@contextlib.contextmanager
def hold_folder(folder: str | Path, *, wait: bool = False) -> Iterator[None]:
    """Own a folder as long as the context lasts; it is made if need be.

    The code around may hold it already. Another owner (a process, or a thread of this one) is
    waited for, or named by a `FolderInUseError`.
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
    """Raise a `DiskError` if a held folder that a path lies in was removed, or its disk is gone."""
    for folder, file in _held.get().items():
        inside = Path(path).resolve().is_relative_to(folder)
        if inside and not _is_at(file, folder / LOCK_FILE):
            raise DiskError(f"the folder {folder} was removed or replaced while the run used it")


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Make a folder, and those above it, where it is not there yet; `private`: for the owner."""
    check_held(folder)
    with disk_faults(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    if private:
        # A file system without modes has no way to say it; that is no reason to stop.
        with contextlib.suppress(OSError):
            folder.chmod(0o700)


def _acquired(place: Path, called: Path, wait: bool) -> IO[bytes]:
    """Return the lock file, locked and signed."""
    path = place / LOCK_FILE
    while True:
        with disk_faults(f"write in the folder {called}"):
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        try:
            # An owner that ends removes the file, so the one that was locked may be gone.
            if _locked(file, called) and _is_at(file, path):
                with disk_faults(f"write in the folder {called}"):
                    _sign(file)
                return file
            if not wait and _is_at(file, path):
                raise FolderInUseError(
                    f"{called} is in use by {_owner(file)}: wait until it ends, stop it, or "
                    "choose another folder"
                )
        except BaseException:
            file.close()
            raise
        file.close()
        time.sleep(_POLL_SECONDS)


def _locked(file: IO[bytes], called: Path) -> bool:
    """Return whether the lock is ours."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        warnings.warn(
            f"{called} cannot be locked, so nothing keeps a second run out: {_why(error)}",
            RuntimeWarning,
            stacklevel=2,
        )
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether an open file is the one that lies at a path now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _sign(file: IO[bytes]) -> None:
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()} since {since}".encode())
    file.flush()


def _owner(file: IO[bytes]) -> str:
    """Return who signed a lock file, in one line."""
    try:
        text = file.read(200).decode()
    except (OSError, ValueError):
        text = ""
    return text if text.startswith("process ") and text.isprintable() else "another process"


# --- whole files -----------------------------------------------------------------------------

_PRIVATE_FILE = 0o600


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Give a place beside `path` to write to; what was written there becomes `path` at the end.

    If that fails (`DiskError`), `path` is as it was, and nothing else is left behind. `private`:
    only the owner may read the file.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_faults(f"write {path}"):
            wanted = _PRIVATE_FILE if private else 0o666
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, wanted))
            mode = _PRIVATE_FILE if private else stat.S_IMODE(temporary.stat().st_mode)
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


CHECKSUM = "checksum"


def checksum(arrays: Mapping[str, NDArray], texts: Mapping[str, str]) -> str:
    """Return the checksum of arrays and of a header's texts, in whatever order they come."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(texts):
        if key != CHECKSUM:
            digest.update(repr((key, texts[key])).encode(errors="surrogatepass"))
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        digest.update(repr((name, array.dtype.name, array.shape)).encode(errors="surrogatepass"))
        # As in the file: little-endian, row by row.
        stored = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        digest.update(stored.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def verify_checksum(header: Mapping[str, str], arrays: Mapping[str, NDArray]) -> None:
    """Raise a ValueError if a file's arrays and header do not fit the checksum in that header."""
    if header.get(CHECKSUM) != checksum(arrays, header):
        raise ValueError("its checksum does not fit its contents, so it is damaged")
