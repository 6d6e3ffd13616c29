"""A progress bar for one run, and lines for what goes wrong in it."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gems_flwr.server.settings import Callback
from gems_flwr.server.state import RoundRecord


class ProgressBar(Callback):
    """Shows rounds, the node that answered last, the accuracy or error and the bytes so far.

    Use it as a context manager around the run.

    Parameters
    ----------
    title : str
        What is running.
    console : Console
        Where to draw.
    """

    def __init__(self, title: str, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            transient=True,
            # In a log file a bar would leave an empty line for each run.
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=None, status="")
        self._asked = self._answered = 0
        self._bytes = 0
        self._score = ""

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def on_start(self, strategy: str, num_rounds: int, finished_rounds: int) -> None:
        """Set the bar's length."""
        self._progress.update(self._task, total=num_rounds, completed=finished_rounds)

    def on_exchange(self, server_round: int, nodes: int) -> None:
        """Count the nodes that are asked."""
        self._asked, self._answered = nodes, 0
        self._show()

    def on_reply(self, server_round: int, node: str, usable: bool) -> None:
        """Count the nodes that have answered."""
        self._answered += 1
        self._show()

    def on_round_end(self, record: RoundRecord) -> None:
        """Advance the bar and say who failed, and who is called as another is."""
        self._bytes += record.traffic.bytes_up + record.traffic.bytes_down
        known = ((name, record.metric(name)) for name in ("accuracy", "rmse"))
        self._score = next(
            (f"{name} {value:.3f}" for name, value in known if value is not None), ""
        )
        self._progress.update(self._task, completed=record.round)
        self._show()
        for trouble in (*record.failures, *record.name_disputes):
            self._progress.console.print(
                f"round {record.round}: {trouble}", style="yellow", markup=False, highlight=False
            )

    def _show(self) -> None:
        parts = [f"{self._answered}/{self._asked} nodes", f"{self._bytes / 1e6:.2f} MB"]
        if self._score:
            parts.append(self._score)
        self._progress.update(self._task, status=" · ".join(parts))
