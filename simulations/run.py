"""Run federated learning: ``python -m simulations.run strategy=fedavg dataset=mnist nodes=5``.

With ``-m`` a comma means "each of": ``-m strategy=fedavg,local seed=0,1,2``. A run lands in a
folder named after its config; one that is finished is skipped, one that was interrupted goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from gems_flwr.disk.lock import hold_folder
from gems_flwr.errors import GemsError
from gems_flwr.runtime.checkpoint import CheckpointFolder
from simulations.backends.launch import run_on_backend
from simulations.config import (
    CONFIG_DIR,
    ConfigError,
    RunConfig,
    explain,
    to_run_config,
    variant_of,
)
from simulations.experiment.card_facts import told_overrides
from simulations.experiment.execution import finished_result, first_score, run_server
from simulations.experiment.experiment import Experiment, experiment_of
from simulations.experiment.progress import ProgressBar


def run(
    config: RunConfig,
    folder: Path,
    console: Console | None = None,
    *,
    wait: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Run one config, or return the result that it had.

    Parameters
    ----------
    config : RunConfig
        What to run.
    folder : Path
        Where to write; the same config must come with the same folder to be resumed.
    console : Console, optional
        Where to show progress.
    wait : bool, default False
        Whether to wait for a run that works in the folder, instead of raising an error.
    command : str, optional
        What was typed to start it, for the model card.

    Returns
    -------
    dict
        What `result.json` holds.

    Raises
    ------
    FolderInUseError
        If another run works in the folder.
    CheckpointError, DiskError
        If the folder holds something strange, or cannot be written to.
    """
    console = console or Console(stderr=True)
    done = None if config.fresh else finished_result(config, folder)
    if done is None:
        # Whatever is wrong with data or partition shows before any node starts.
        experiment = experiment_of(config.to_json())
        _ = experiment.shares
        with hold_folder(folder, wait=wait):
            # Whoever had the folder until now may have done it all.
            done = None if config.fresh else finished_result(config, folder)
            if done is None:
                return _run(config, experiment, folder, console, command)
    console.print(f"[dim]{os.path.relpath(folder)}: finished already[/dim]", soft_wrap=True)
    return done


def _run(
    config: RunConfig,
    experiment: Experiment,
    folder: Path,
    console: Console,
    command: str | None = None,
) -> dict[str, Any]:
    saved = CheckpointFolder(folder)
    if experiment.keeps_models_on_nodes and saved.load() is not None:
        # Simulated nodes end with their process; without their models it would be another run.
        console.print(f"[dim]{os.path.relpath(folder)}: was interrupted, starts again[/dim]")
        saved.clear()
    bar = ProgressBar(_name(config), console)
    # Flower's engine lets the server work in a thread of its own, which owns the folder, too.
    here = contextvars.copy_context()
    with quiet_flower(), bar if config.progress else contextlib.nullcontext():
        callbacks = [bar] if config.progress else []
        result = run_on_backend(
            config,
            lambda grid: here.run(run_server, experiment, grid, folder, callbacks, command=command),
        )
    console.print(_line(config, result, folder), highlight=False, soft_wrap=True)
    return result


@contextlib.contextmanager
def quiet_flower() -> Iterator[None]:
    """Keep Flower's log off the screen: failures are shown by the bar, whose lines it breaks."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _line(config: RunConfig, result: dict[str, Any], folder: Path) -> str:
    name, value = first_score(result)
    score = "–" if value is None else f"{value:.4f}"
    return (
        f"[bold]{_name(config):<18}[/bold] {name} {score}  "
        f"{result['rounds']} rounds  {result['bytes_up'] / 1e6:.3f} MB up  "
        f"{result['bytes_down'] / 1e6:.3f} MB down  {result['seconds']:.1f} s  "
        f"[dim]{os.path.relpath(folder)}[/dim]"
    )


def _name(config: RunConfig) -> str:
    name = config.label or f"{config.names['strategy']} {variant_of(config)}".strip()
    # A list such as hidden=[50] is no markup.
    return escape(name)


@hydra.main(version_base=None, config_path=str(CONFIG_DIR), config_name="config")
def _hydra_main(config: DictConfig) -> float | None:
    hydra_config = HydraConfig.get()
    run_config = to_run_config(config, hydra_config.runtime.choices)
    try:
        overrides = told_overrides(list(hydra_config.overrides.task))
        command = shlex.join(["gems-flwr", "run", *overrides])
        result = run(run_config, Path(hydra_config.runtime.output_dir), command=command)
    except ConfigError:
        raise
    except (GemsError, OSError) as error:
        # Said here: Hydra adds lines of its own, and of a multirun shows the first error alone.
        _complain(error)
        _failed.append(run_config.run_name())
        return None
    # For sweeps that look for the best.
    _, value = first_score(result)
    return None if value is None else float(value)


# Runs of this command that ended with an error.
_failed: list[str] = []


def _complain(error: Exception) -> None:
    text = explain(error, sys.argv[1:])
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def main() -> int:
    """Run from the command line; return the exit status."""
    # Without it Hydra prints its own shortened trace and exits; we want the error itself.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    console = Console(stderr=True)
    _failed.clear()
    try:
        _hydra_main()
    except (HydraException, OmegaConfBaseException, GemsError, OSError) as error:
        _complain(error)
        return 2
    except KeyboardInterrupt:
        leave(console, "Interrupted; the same command goes on from the last finished round.")
    return 2 if _failed else 0


def leave(console: Console, message: str) -> NoReturn:
    """Say a last word and end at once, with the status of an interrupted command.

    A node's thread may be in the middle of a training step; taking the interpreter away from
    under it, as an ordinary exit does, makes torch abort. What was received is on disk.
    """
    console.print(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
