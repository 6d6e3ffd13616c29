"""A run in the terminal while it goes on: rounds, nodes, bytes, scores and failures.

In a terminal rich draws a progress bar; elsewhere (a log file, a CI job, ``flwr run``) there are
plain lines, at most one a second. Names and reasons come from nodes: they are text, never markup,
and are cut.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gems_flwr.core import Callback, RoundRecord, RunResult, Traffic
from gems_flwr.core.log import short
from gems_flwr.core.records import single_numbers

# Words by which a metric is known to be one that a run is followed by, or is not.
_WORDS, _OTHER_WORDS = ("acc", "rmse", "auc", "f1", "loss"), ("/", "cumulative", "sum")


class LiveView(Callback):
    """Show rounds, nodes, bytes and scores while a run goes on.

    Parameters
    ----------
    title : str, optional
        What is running; by default the strategy's name.
    console : rich.console.Console, optional
        Where to draw; by default standard error.

    Examples
    --------
    >>> from gems_flwr import FedAvg
    >>> from gems_flwr.tools import LiveView
    >>> strategy = FedAvg(callbacks=[LiveView("four wards")])
    """

    every_seconds = 1.0  # where there is no terminal, the shortest time between two lines

    def __init__(self, title: str | None = None, *, console: Console | None = None) -> None:
        self.title = title
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []

    def on_start(self, strategy: str, num_rounds: int, finished_rounds: int) -> None:
        """Start to draw."""
        self._name, self._rounds, self._score = self.title or strategy, num_rounds, ""
        self._traffic, self._asked, self._answered = Traffic(), 0, 0
        self._printed_at = -float("inf")
        if not self._console.is_terminal:
            done = f", {finished_rounds} of them done" if finished_rounds else ""
            return self._print(f"{self._name}: {num_rounds} rounds{done}")
        columns = (TextColumn("{task.fields[status]}", markup=False), TimeElapsedColumn())
        self._bar = Progress(
            *(*Progress.get_default_columns()[:2], MofNCompleteColumn(), *columns),
            console=self._console,
            transient=True,
        )
        name = escape(self._name)
        self._bar.add_task(name, total=num_rounds, completed=finished_rounds, status="")
        self._bar.start()
        # Flower's log lines scroll above the bar instead of through it.
        for handler in logging.getLogger("flwr").handlers:
            own = (sys.__stderr__, sys.__stdout__)
            if isinstance(handler, logging.StreamHandler) and handler.stream in own:
                self._streams.append((handler, handler.setStream(sys.stderr)))

    def on_exchange(self, server_round: int, nodes: int) -> None:
        """Count the nodes that are asked."""
        self._asked, self._answered = nodes, 0
        self._show()

    def on_reply(self, server_round: int, node: str, usable: bool) -> None:
        """Count the nodes that have answered."""
        self._answered += 1
        self._show()

    def on_round_end(self, record: RoundRecord) -> None:
        """Advance; print who failed, and whose name another node has."""
        self._traffic += record.traffic
        self._score = "".join(f" · {name} {v:.4g}" for name, v in followed(record).items())
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=record.round)
            self._show()
        for failure in record.failures:
            trouble = f"node {short(failure.node, 40)}: {short(failure.reason, 200)}"
            self._print(f"round {record.round}: {trouble}", style="yellow")
        answered = f"{len(record.nodes_answered)}/{len(record.nodes_asked)} nodes"
        is_due = time.monotonic() - self._printed_at >= self.every_seconds
        if self._bar is None and record.round and (is_due or record.round == self._rounds):
            self._print(f"round {record.round} of {self._rounds}: {answered}{self._cost()}")
            self._printed_at = time.monotonic()

    def on_end(self, result: RunResult) -> None:
        """Give the terminal back."""
        self._stop(result.stopped_because)

    def on_error(self, error: BaseException) -> None:
        """Give the terminal back."""
        self._stop("ended by an error" if isinstance(error, Exception) else "interrupted")

    def _show(self) -> None:
        if self._bar is not None:
            status = f"{self._answered}/{self._asked} nodes{self._cost()}"
            self._bar.update(self._bar.task_ids[0], status=status)

    def _cost(self) -> str:
        up, down = decimal(self._traffic.bytes_up), decimal(self._traffic.bytes_down)
        return f" · {up} up, {down} down{self._score}"

    def _stop(self, reason: str) -> None:
        for handler, stream in self._streams:
            handler.setStream(stream)
        self._streams = []
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        else:
            self._print(f"{self._name}: {reason}{self._cost()}")

    def _print(self, text: str, style: str | None = None) -> None:
        # A log that cannot be written to is no reason to end a run.
        with contextlib.suppress(OSError):
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def followed(record: RoundRecord) -> dict[str, float]:
    """Return two scores or losses to follow a run by, the server's own before the nodes'."""
    sources = {"": "server_metrics", "eval ": "evaluate_metrics", "train ": "train_metrics"}
    found = {
        short(f"{source}{name}", 30): value
        for source, metrics in sources.items()
        for name, value in single_numbers(getattr(record, metrics)).items()
        if any(w in name for w in _WORDS) and not any(w in name for w in _OTHER_WORDS)
    }
    return dict(list(found.items())[:2])
