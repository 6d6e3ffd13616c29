"""What ``make deploy-demo`` shows: GEMS on a real Flower deployment, all on this machine.

A SuperLink with TLS and three SuperNodes that must prove who they are, each with a folder of digits
of its own, of which it knows only a few classes. One round, then the table; everything that was
started is stopped, also on Ctrl-C.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from gems_flwr.tools import COMPLETED
from simulations.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    CommandParser,
    UsageError,
    complain,
    run_command,
)
from simulations.config import compose_config
from simulations.deployment.federation import DeploymentError, Federation
from simulations.experiment.experiment import Experiment

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("runs/deploy-demo")
NODES = ("north", "south", "west")
_RUN_SECONDS = 300.0
_REPLY = re.compile(r"event=reply .*node=(\S+) what=cone bytes=(\d+)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    parser = CommandParser(prog="python -m simulations.deployment", description=__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=FOLDER,
        metavar="DIR",
        help=f"where to write, instead of an earlier demo; {FOLDER}",
    )
    output: Path = parser.parse_args(arguments).output
    # Ended from outside it stops as cleanly as with Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    try:
        return run_command(lambda: _demo(output, console))
    except KeyboardInterrupt:
        console.print("Interrupted; everything that was started is stopped.")
        return EXIT_INTERRUPTED
    except DeploymentError as error:
        complain(str(error))
        console.print(f"The processes' logs are in {output / 'logs'}.", soft_wrap=True)
        return EXIT_FAILED


def _demo(output: Path, console: Console) -> int:
    _make_room(output)
    folder = output.resolve()
    experiment = _write_folders(folder)
    result, replies = _deploy(experiment, folder, console)
    console.print(_table(experiment, result, replies))
    console.print(
        f"One model for all ten digits after one round: accuracy "
        f"[bold]{result['accuracy']:.3f}[/bold] on digits that no node trained on; "
        f"{result['bytes_up'] / 1e3:.1f} KB up, {result['bytes_down'] / 1e3:.1f} KB down."
    )
    console.print(f"[dim]{output}: the result, the model, and the processes' logs[/dim]")
    return 0


def _make_room(output: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    if output.exists() and any(output.iterdir()):
        if output != FOLDER and not (output / "data" / "test.npz").is_file():
            raise UsageError(f"{output} holds something else than an earlier demo: name another")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _write_folders(folder: Path) -> Experiment:
    """Give every node a folder with some digits, and the server a test file."""
    experiment = Experiment(compose_config([f"nodes={len(NODES)}"]))
    for name, share in zip(NODES, experiment.shares, strict=True):
        parts = {"data": share.train, "validation": share.validation}
        for part, examples in parts.items():
            _save(folder / "data" / name / f"{part}.npz", examples.features, examples.labels)
    test = experiment.dataset.test
    _save(folder / "data" / "test.npz", test.features, test.labels)
    return experiment


def _save(path: Path, features: Any, labels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, features=features, labels=labels)


def _deploy(
    experiment: Experiment, folder: Path, console: Console
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the run's result, and the size of each node's space."""
    dataset = experiment.dataset
    shape = json.dumps(list(dataset.input_shape), separators=(",", ":"))
    overrides = (
        f"strategy=gems strategy.verify=true nodes={len(NODES)} dataset=own "
        f"dataset.input_shape={shape} dataset.classes={dataset.classes} "
        f"dataset.scale={dataset.scale} dataset.test={folder / 'data' / 'test.npz'}"
    )
    with (
        console.status("Starting a SuperLink with TLS …") as status,
        Federation(folder) as federation,
    ):
        console.print(f"SuperLink at {federation.address}, TLS, node authentication on")
        for name in NODES:
            status.update(f"Registering and starting node {name} …")
            federation.start_node(name, f"name='{name}' data='{folder / 'data' / name}'")
            console.print(f"node {name}: registered, started, data in data/{name}")
        status.update("One round of GEMS …")
        run = federation.submit(ROOT, overrides=overrides, output=str(folder / "run"))
        console.print(f"flwr run: {run}")
        ended = federation.flwr.wait(run, _RUN_SECONDS)
        log = federation.flwr.log(run)
        status.update("Stopping …")
    (folder / "logs" / "serverapp.log").write_text(log)
    if ended != COMPLETED:
        raise DeploymentError(f"the run is {ended}:\n{log[-2000:]}")
    sizes: dict[str, int] = {}
    for name, size in _REPLY.findall(log):
        sizes.setdefault(name, int(size))
    return json.loads((folder / "run" / "result.json").read_text()), sizes


def _table(experiment: Experiment, result: dict[str, Any], sizes: dict[str, int]) -> Table:
    scores = result["details"]["node_scores"]
    table = Table(title="GEMS on three SuperNodes, one round")
    for heading in ("node", "digits it knows", "examples", "sent", "accuracy on its own"):
        table.add_column(heading, justify="left" if heading == "node" else "right")
    for name, share in zip(NODES, experiment.shares, strict=True):
        known = " ".join(str(digit) for digit in np.unique(share.train.labels))
        score = f"{scores[name]:.3f}" if name in scores else "–"
        sent = f"{sizes[name] / 1e3:.1f} KB" if name in sizes else "–"
        table.add_row(name, known, str(len(share.train)), sent, score)
    return table


if __name__ == "__main__":
    sys.exit(main())
