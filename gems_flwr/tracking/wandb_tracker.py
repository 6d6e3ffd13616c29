"""A run in Weights & Biases: its config, metrics by round, the outcome in the summary.

W&B is a cloud service that by itself also takes along the console, the machine's name and load,
installed packages, the command and the state of a git repository. None of that is sent from here: a
federation's server says only what `round_numbers` makes of a run. A resumed run goes on under the
id that lies in its folder. Offline (``mode="offline"``) each process leaves a folder of its own
with that id, and ``wandb sync`` puts them together.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gems_flwr.errors import OptionError
from gems_flwr.tracking.round_numbers import Plain
from gems_flwr.tracking.run_ids import keep_id, known_id
from gems_flwr.tracking.tracker import Opening, Status, Tracker, needed

# What W&B would find out by itself, and what it would print.
_QUIET = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "host": "",
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
_WITHOUT_ACCOUNT = ("offline", "disabled", "dryrun")


class WandB(Tracker):
    """Track a run with Weights & Biases; needs the extra ``wandb``.

    Parameters
    ----------
    project : str, default "gems-flwr"
        The project that the run belongs to.
    name : str, optional
        What the run is called; by default the name of its checkpoint folder, else the strategy's.
    entity : str, optional
        The team or user; by default the one that W&B knows.
    mode : {"online", "offline", "disabled"}, optional
        By default what ``WANDB_MODE`` says, else online.
    folder : path, optional
        Where W&B makes its folder ``wandb``; by default what ``WANDB_DIR`` says, else here.
    config : mapping, optional
        Further parameters, such as ``context.run_config``.
    nodes : bool, default False
        Whether there is a series for each node, by name. Otherwise there are totals alone.
    artifacts : bool, default False
        Whether `log_files` adds files: those that name no node, and with `nodes` all.
    init : mapping, optional
        Further arguments of ``wandb.init``, such as ``{"group": "wards", "tags": ["cone"]}``.
    wait_seconds : float, default 60
        How long the end of a run waits until W&B has everything.

    Examples
    --------
    >>> from gems_flwr import Gems, WandB
    >>> strategy = Gems(callbacks=[WandB(project="wards", mode="offline")])
    """

    def __init__(
        self,
        project: str = "gems-flwr",
        *,
        name: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        folder: str | Path | None = None,
        config: Mapping[str, object] | None = None,
        nodes: bool = False,
        artifacts: bool = False,
        init: Mapping[str, Any] | None = None,
        wait_seconds: float = 60.0,
    ) -> None:
        super().__init__(
            name=name, config=config, nodes=nodes, artifacts=artifacts, wait_seconds=wait_seconds
        )
        self._library = needed("wandb", "wandb")
        self.project, self.entity, self.folder = project, entity, folder
        self.mode = mode or os.environ.get("WANDB_MODE") or "online"
        self.init = dict(init or {})
        # At a terminal W&B would ask for an account, in the middle of the run.
        signed_in = self.mode in _WITHOUT_ACCOUNT or self._library.login(prompt=False, verify=False)
        if not signed_in:
            raise OptionError(
                "Weights & Biases does not know you: run `wandb login`, set WANDB_API_KEY, or keep "
                "the run on this machine with mode=offline"
            )
        self._run: Any = None

    def open_run(self, opening: Opening) -> int:
        """Begin a run, or go on with the one whose id is known."""
        earlier = known_id(opening.folder, "wandb") if opening.goes_on else None
        run_id = earlier or secrets.token_hex(4)
        settings = {**_QUIET, "finish_timeout": self.wait_seconds}
        self._run = self._library.init(
            **{
                "project": self.project,
                "entity": self.entity,
                "name": opening.name,
                "id": run_id,
                "resume": "allow",
                "mode": self.mode,
                "dir": None if self.folder is None else str(self.folder),
                "config": dict(opening.parameters),
                "allow_val_change": True,
                # A run that the app itself may have begun is none of ours.
                "reinit": "create_new",
                "settings": self._library.Settings(**settings),
                **self.init,
            }
        )
        keep_id(opening.folder, "wandb", run_id)
        if earlier is None:
            return -1
        # Offline it is not known what the earlier process has written: all that it was told.
        return int(self._run.starting_step) - 1 if self._run.resumed else opening.finished_rounds

    def log_round(self, number: int, numbers: Mapping[str, float]) -> None:
        """Add one row whose step is the round."""
        self._run.log(dict(numbers), step=number, commit=True)

    def log_end(self, values: Mapping[str, Plain]) -> None:
        """Add the outcome to the summary, below ``result/``."""
        self._run.summary.update({f"result/{name}": value for name, value in values.items()})

    def log_file(self, path: Path) -> None:
        """Add a file to the run's own."""
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close_run(self, status: Status) -> None:
        """End the run; one that failed has another exit status."""
        self._run.finish(exit_code=0 if status == "finished" else 1)
