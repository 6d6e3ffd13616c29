"""A run in TensorBoard: scalars by round, options and outcome as text and as hyperparameters.

The event files lie in a folder for each run. A resumed run adds a file that takes back what an
interrupted round may have left (``purge_step``) and goes on with the next round. TensorBoard keeps
single precision, so numbers have seven digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gems_flwr.tracking.round_numbers import Plain
from gems_flwr.tracking.tracker import Opening, Status, Tracker, needed


class TensorBoard(Tracker):
    """Write a run for TensorBoard; needs the extra ``tensorboard``.

    Parameters
    ----------
    log_dir : path, default "runs"
        Where TensorBoard looks, as in ``tensorboard --logdir runs``; the run gets a folder of its
        own in it.
    name : str, optional
        The run's folder, which may have slashes; by default the name of its checkpoint folder, else
        the strategy's.
    config : mapping, optional
        Further parameters, such as ``context.run_config``.
    nodes : bool, default False
        Whether there is a series for each node, by name. Otherwise there are totals alone.
    wait_seconds : float, default 60
        How long the end of a run waits until everything is written.

    Examples
    --------
    >>> from gems_flwr import FedAvg, TensorBoard
    >>> strategy = FedAvg(callbacks=[TensorBoard("runs", name="first try")])
    """

    def __init__(
        self,
        log_dir: str | Path = "runs",
        *,
        name: str | None = None,
        config: Mapping[str, object] | None = None,
        nodes: bool = False,
        wait_seconds: float = 60.0,
    ) -> None:
        super().__init__(
            name=name, config=config, nodes=nodes, artifacts=False, wait_seconds=wait_seconds
        )
        self.log_dir = Path(log_dir)
        self._module = needed("torch.utils.tensorboard", "tensorboard")
        self._summaries = needed("torch.utils.tensorboard.summary", "tensorboard")
        self._writer: Any = None

    def open_run(self, opening: Opening) -> int:
        """Open an event file; earlier ones of the run say how far it was."""
        folder = self.log_dir / opening.name
        earlier = folder.is_dir() and any(folder.glob("events.out.tfevents.*"))
        goes_on = opening.goes_on and earlier
        # The last round that was played may not have been written: it is written again.
        again = opening.finished_rounds if goes_on else 0
        self._writer = self._module.SummaryWriter(
            str(folder), purge_step=again if earlier else None
        )
        self._parameters = dict(opening.parameters)
        self._last: dict[str, float] = {}
        self._writer.add_text("parameters", _table(self._parameters), again)
        self._writer.flush()
        return again - 1

    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write one number for each name."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, number)
        self._last, self._round = dict(numbers), number
        self._writer.flush()

    def log_end(self, values: Mapping[str, Plain]) -> None:
        """Write the outcome, and what the tab HPARAMS compares runs by."""
        self._writer.add_text("result", _table(values), int(values["rounds"]))
        # SummaryWriter.add_hparams would put them into a run of their own.
        for summary in self._summaries.hparams(self._parameters, dict.fromkeys(self._last, 0.0)):
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def close_run(self, status: Status) -> None:
        """Close the file."""
        self._writer.add_text("status", status)
        self._writer.close()


def _table(values: Mapping[str, Plain]) -> str:
    rows = (f"| {name} | {str(value).replace('|', '¦')} |" for name, value in values.items())
    return "\n".join(["| name | value |", "|---|---|", *rows])
