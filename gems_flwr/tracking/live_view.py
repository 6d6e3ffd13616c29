"""Watching a run in the terminal, or line by line in a log.

Drawing happens four times a second in a thread of `rich`'s, whatever the number of rounds: a
callback only notes what it hears. Where there is no terminal (a log file, a CI job, ``flwr run``)
there are plain lines instead, at most one a second.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from gems_flwr.server.settings import Callback
from gems_flwr.server.state import RoundRecord, RunResult
from gems_flwr.tracking.live_picture import KINDS, LivePicture, amount, ascii_text, clock, digits
from gems_flwr.tracking.live_state import LiveState, Row

_PER_SECOND = 4


class LiveView(Callback):
    """Show rounds, nodes, bytes and the course of the score while a run goes on.

    Parameters
    ----------
    title : str, optional
        What is running; by default the strategy's name.
    console : rich.console.Console, optional
        Where to draw; by default standard error.
    every_seconds : float, default 1.0
        Where there is no terminal: the shortest time between two lines.

    Examples
    --------
    >>> from gems_flwr import FedAvg, LiveView
    >>> strategy = FedAvg(callbacks=[LiveView("four wards")])
    """

    def __init__(
        self,
        title: str | None = None,
        *,
        console: Console | None = None,
        every_seconds: float = 1.0,
    ) -> None:
        self.title = title
        self.every_seconds = every_seconds
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._lock = threading.Lock()
        self._state = LiveState("")
        self._told_round, self._told_at = 0, -float("inf")
        self._history: tuple[RoundRecord, ...] = ()

    def on_setup(self, settings: Mapping[str, object], history: Sequence[RoundRecord]) -> None:
        """Note the rounds that are there already."""
        self._history = tuple(history)

    def on_start(self, strategy: str, num_rounds: int, finished_rounds: int) -> None:
        """Begin to draw."""
        self._state = LiveState(self.title or strategy)
        self._state.start(num_rounds, self._history)
        self._told_round, self._told_at = finished_rounds, -float("inf")
        if not self._console.is_terminal:
            done = f", {finished_rounds} of them done" if finished_rounds else ""
            self._print(f"{self._state.title}: {num_rounds} rounds{done}")
            return
        self._live = Live(
            get_renderable=self._picture, console=self._console, refresh_per_second=_PER_SECOND
        )
        self._live.start()
        self._lead_logs()

    def on_exchange(self, server_round: int, nodes: int) -> None:
        """Note how many nodes are asked."""
        with self._lock:
            self._state.exchange(server_round, nodes)

    def on_reply(self, server_round: int, node: str, usable: bool) -> None:
        """Note that one more has answered."""
        with self._lock:
            self._state.reply(usable)

    def on_round_end(self, record: RoundRecord) -> None:
        """Note what a round gave."""
        with self._lock:
            self._state.add(record)
        due = time.monotonic() - self._told_at >= self.every_seconds
        if self._live is None and (due or record.failures):
            self._print_round()

    def on_end(self, result: RunResult) -> None:
        """Draw for the last time; the picture stays."""
        self._stop(result.stopped_because)

    def on_error(self, error: BaseException) -> None:
        """Give the terminal back."""
        self._stop("interrupted" if not isinstance(error, Exception) else "ended by an error")

    def _stop(self, reason: str) -> None:
        with self._lock:
            if self._state.ended is not None:
                return
            self._state.end(reason)
        if self._live is not None:
            for handler, stream in self._streams:
                handler.setStream(stream)
            self._streams = []
            self._live.stop()
            self._live = None
            return
        if self._told_round < self._state.finished:
            self._print_round()
        sums = f"{amount(self._state.bytes_up)} up, {amount(self._state.bytes_down)} down"
        self._print(f"{self._state.title}: {reason} after {clock(self._state.elapsed)}, {sums}")

    # --- in a terminal ------------------------------------------------------------------------

    def _picture(self) -> RenderableType:
        with self._lock:
            # Drawn to the end here, since rich would read the state when it is changing.
            options = self._console.options
            lines = self._console.render_lines(LivePicture(self._state), options, pad=False)
        text = Text(no_wrap=True, overflow="crop", end="")
        for number, line in enumerate(lines):
            text.append("\n" * bool(number))
            for segment in line:
                text.append(segment.text, segment.style)
        return text

    def _lead_logs(self) -> None:
        """Let Flower's log lines scroll above the picture instead of through it."""
        for handler in logging.getLogger("flwr").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (
                sys.__stderr__,
                sys.__stdout__,
            ):
                # What rich has put in its place, which knows of the picture.
                self._streams.append((handler, handler.setStream(sys.stderr)))

    # --- in a log -----------------------------------------------------------------------------

    def _print_round(self) -> None:
        if not self._state.rows:
            return
        self._told_round, self._told_at = self._state.finished, time.monotonic()
        self._print(self._line(self._state.rows[-1]))

    def _line(self, row: Row) -> str:
        state = self._state
        parts = [
            f"round {row.round} of {state.rounds}: {row.answered} of {row.asked} answered",
            f"{amount(row.bytes_up)} up",
            f"{amount(row.bytes_down)} down",
            f"{row.seconds:.3g} s",
        ]
        if row.left_out and state.trouble:
            why, count, node = state.trouble[1][0]
            others = f" and {count - 1} more" if count > 1 else ""
            parts.insert(1, f"{row.left_out} left out (node {node}{others}: {why})")
        for kind in KINDS:
            name = state.followed(kind)
            if name is not None and name in row.numbers:
                parts.append(f"{name} {digits(row.numbers[name])}")
        return ", ".join(parts)

    def _print(self, text: str) -> None:
        if self._console.options.ascii_only:
            text = ascii_text(text)
        # A log that cannot be written to is no reason to end a run.
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
