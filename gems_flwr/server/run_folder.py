"""A strategy and its `checkpoint_dir`: who owns it, and replies that it has no room for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from flwr.app import RecordDict

from gems_flwr.disk.lock import hold_folder
from gems_flwr.errors import CheckpointError, DiskError
from gems_flwr.runtime.checkpoint import CheckpointFolder
from gems_flwr.server.log import log_warning
from gems_flwr.server.settings import LoopSettings

Loop = TypeVar("Loop", bound=LoopSettings)
P = ParamSpec("P")
R = TypeVar("R")


def owning_its_folder(
    start: Callable[Concatenate[Loop, P], R],
) -> Callable[Concatenate[Loop, P], R]:
    """Let a strategy's method hold the `checkpoint_dir`, if there is one, while it runs.

    It raises `FolderInUseError` if another run has it, and says what is kept if the disk fails.
    """

    @functools.wraps(start)
    def owner(self: Loop, /, *arguments: P.args, **options: P.kwargs) -> R:
        folder = self.checkpoint_dir
        if folder is None:
            return start(self, *arguments, **options)
        with hold_folder(folder):
            try:
                return start(self, *arguments, **options)
            except DiskError as error:
                raise CheckpointError(f"{error}{kept_in(Path(folder))}") from error

    return owner


class Inbox(CheckpointFolder):
    """A folder that keeps replies if it can: a full disk is no reason to lose the reply itself."""

    def keep_reply(self, exchange: str, node: str, content: RecordDict) -> None:
        """Put a reply on disk before it is used, or say that it is in memory alone."""
        try:
            super().keep_reply(exchange, node, content)
        except DiskError as error:
            log_warning("reply_not_kept", exchange=exchange, node=node, reason=error)


def kept_in(folder: Path) -> str:
    """Return where there is something to go on from, as the end of a message."""
    with contextlib.suppress(OSError):
        if not CheckpointFolder(folder).is_empty():
            return f"; what was saved before stays in {folder}, a resumed run goes on from it"
    return ""
