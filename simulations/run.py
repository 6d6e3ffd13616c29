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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from gems_flwr import Callback, GemsError
from gems_flwr.core.disk import hold_folder
from gems_flwr.core.folder import CheckpointFolder
from gems_flwr.tools import LiveView
from simulations.backends.launch import run_on_backend
from simulations.config import (
    CONFIG_DIR,
    ConfigError,
    RunConfig,
    explain,
    is_multirun,
    is_search,
    missing_plugin,
    to_run_config,
    variant_of,
    without_plus,
)
from simulations.experiment.execution import (
    finished_result,
    first_score,
    lasting_overrides,
    run_server,
)
from simulations.experiment.experiment import Experiment, experiment_of
from simulations.experiment.watching import trackers_of
from simulations.multirun import (
    RunFailedError,
    check_objective,
    is_parallel,
    objective,
    shares_screen,
)


def run(
    config: RunConfig,
    folder: Path,
    console: Console | None = None,
    *,
    wait: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Run one config, or return the result that it had: what `result.json` holds.

    Parameters
    ----------
    config : RunConfig
        What to run.
    folder : Path
        Where to write; the same config must come with the same folder to be resumed.
    console : Console, optional
        Where to show progress.
    wait : bool, default False
        Whether to wait for a run that works in the folder, instead of a `FolderInUseError`.
    command : str, optional
        What was typed to start it, for the model card.
    """
    console = console or Console(stderr=True)
    done = None if config.fresh else finished_result(config, folder)
    if done is None:
        # Whatever is wrong with data or partition shows before any node starts.
        experiment = experiment_of(config.to_json())
        _ = experiment.shares, experiment.held_out
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
    if experiment.keeps_models_on_nodes and CheckpointFolder(folder).load() is not None:
        # Simulated nodes end with their process; without their models it would be another run.
        console.print(f"[dim]{os.path.relpath(folder)}: was interrupted, starts again[/dim]")
        CheckpointFolder(folder).clear()

    def say(text: str) -> None:
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    # A tracker that is not installed is reported before any node starts.
    trackers = trackers_of(config, say)
    # Flower's engine lets the server work in a thread of its own, which owns the folder, too.
    here = contextvars.copy_context()
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_flower())
        callbacks: list[Callback] = [*trackers]
        if config.live or (config.progress and console.is_terminal):
            callbacks.append(LiveView(_title(config), console=console))
        result = run_on_backend(
            config,
            lambda grid: here.run(run_server, experiment, grid, folder, callbacks, command=command),
        )
    console.print(_line(config, result, folder), highlight=False, soft_wrap=True)
    return result


@contextlib.contextmanager
def quiet_flower() -> Iterator[None]:
    """Keep Flower's log off the screen, where it breaks the lines of the bar."""
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
    if config.evaluate_on == "validation":
        name = f"validation {name}"
    return (
        # A list such as hidden=[50] is no markup.
        f"[bold]{escape(_title(config)):<18}[/bold] {name} {score}  "
        f"{result['rounds']} rounds  {result['bytes_up'] / 1e6:.3f} MB up  "
        f"{result['bytes_down'] / 1e6:.3f} MB down  {result['seconds']:.1f} s  "
        f"[dim]{os.path.relpath(folder)}[/dim]"
    )


def _title(config: RunConfig) -> str:
    return config.label or f"{config.names['strategy']} {variant_of(config)}".strip()


@hydra.main(version_base=None, config_path=str(CONFIG_DIR), config_name="config")
def _hydra_main(config: DictConfig) -> float | None:
    hydra_config = HydraConfig.get()
    choices = hydra_config.runtime.choices
    parallel, search = is_parallel(hydra_config), is_search(hydra_config)
    try:
        run_config = to_run_config(config, choices)
        if search:
            check_objective(run_config, hydra_config.sweeper.get("direction"))
        # Bars of several processes would overwrite each other.
        console = Console(stderr=True, force_terminal=False if parallel else None)
        folder = Path(hydra_config.runtime.output_dir)
        lasting = lasting_overrides(list(hydra_config.overrides.task))
        command = shlex.join(["gems-flwr", "run", *lasting])
        # What another process makes at this moment need not be made twice.
        result = run(run_config, folder, console, wait=parallel, command=command)
    except (GemsError, OSError) as error:
        if isinstance(error, ConfigError) and not is_multirun(hydra_config):
            raise
        # Said here: Hydra adds lines of its own, and of a multirun shows the first error alone.
        overrides = list(hydra_config.overrides.task)
        which = " ".join(overrides) if is_multirun(hydra_config) else ""
        text = _complain(error, overrides, which)
        if parallel or search:
            # This process is not the command's own, or a search must not take it for a score.
            raise RunFailedError("" if shares_screen(hydra_config) else text) from None
        _failed.append(str(hydra_config.runtime.output_dir))
        return None
    return objective(run_config, result)


# Runs of this command that ended with an error.
_failed: list[str] = []


def _complain(error: Exception, overrides: Sequence[str], which: str = "") -> str:
    text = explain(error, overrides)
    if which:
        text = f"{which}: {text}"
    if not text:
        return text
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    return text


def main() -> int:
    """Run from the command line; return the exit status."""
    # Without it Hydra prints its own shortened trace and exits; we want the error itself.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    console = Console(stderr=True)
    _failed.clear()
    sys.argv[1:] = without_plus(sys.argv[1:])
    try:
        _hydra_main()
    except (HydraException, OmegaConfBaseException, GemsError, OSError) as error:
        _complain(error, sys.argv[1:])
        return 2
    except RuntimeError as error:
        # What Hydra raises for a launcher whose file is here and whose plugin is not.
        plugin = missing_plugin(str(error))
        if plugin is None:
            raise
        _complain(ConfigError(plugin), sys.argv[1:])
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
