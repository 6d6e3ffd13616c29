"""``drive``: puts models behind the wheel, compares them, and shows how they drove."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from gems_flwr.disk.files import replacing, write_atomically
from gems_flwr.runtime.seeding import generator
from simulations.command_line import CommandParser, count
from simulations.config import ConfigError
from simulations.driving.closed_loop import Driver, Journey, drive_track
from simulations.driving.driving_loss import DrivingLoss, driving_losses
from simulations.driving.expert import SPEED_M_PER_S
from simulations.driving.film import Film
from simulations.driving.path_picture import save_path_picture
from simulations.driving.recording import held_noise, unseen_track_seed
from simulations.driving.simulator import STEPS_PER_SECOND, require_simulator
from simulations.driving.wheel_models import REFERENCES, named_drivers
from simulations.report.tables import Row, TextTable, print_table, write_csv


@dataclass(frozen=True)
class DriveOptions:
    """On what to drive.

    Parameters
    ----------
    tracks : int
        Number of tracks, at least 1.
    laps : int
        Of each, at least 1.
    seed : int
        Which tracks, at least 0; none of them is ever recorded.
    speed_m_per_s : float
        Above 0 and at most 60. Faster than recordings are is harder: the same mistake of the
        steering leads farther before it is seen.
    noise : float
        Largest disturbance of the steering, a share of full lock, in [0, 1]; held as in recordings
        and the same for all models. The paper has none. Models that are all perfect without can be
        told apart by how they come back.
    """

    tracks: int = 3
    laps: int = 2
    seed: int = 0
    speed_m_per_s: float = SPEED_M_PER_S
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.tracks < 1 or self.laps < 1:
            raise ConfigError(f"--tracks and --laps must be at least 1, got {self}")
        if self.seed < 0:
            raise ConfigError(f"--seed must be at least 0, got {self.seed}")
        if not 0 < self.speed_m_per_s <= 60:
            raise ConfigError(f"--speed must be above 0 and at most 60, got {self.speed_m_per_s}")
        if not 0 <= self.noise <= 1:
            raise ConfigError(f"--noise must be in [0, 1], got {self.noise}")

    def gusts(self, track: int) -> NDArray[np.float64]:
        """Return the disturbances on a track, for 400 seconds; then they begin anew."""
        rng = generator(self.seed, "driving", "gusts", track)
        return held_noise(rng, 400 * STEPS_PER_SECOND, self.noise)


def add_drive(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the command to a parser."""
    defaults = DriveOptions()
    drive = commands.add_parser("drive", help="let models drive on tracks nobody trained on")
    drive.add_argument(
        "--model",
        action="append",
        required=True,
        dest="models",
        metavar="[NAME=]PATH",
        help="folder of a run or its model.safetensors; or expert (the recorded controller), or "
        "straight (never steers); may be given several times, to be compared",
    )
    drive.add_argument(
        "--tracks", type=count, default=defaults.tracks, help=f"how many; {defaults.tracks}"
    )
    drive.add_argument("--laps", type=count, default=defaults.laps, help=f"each; {defaults.laps}")
    drive.add_argument("--seed", type=int, default=defaults.seed, help="of the tracks; 0")
    drive.add_argument(
        "--speed",
        type=float,
        default=defaults.speed_m_per_s,
        metavar="M_PER_S",
        help=f"constant, in metres per second; {defaults.speed_m_per_s:g}, as recorded",
    )
    drive.add_argument(
        "--noise",
        type=float,
        default=defaults.noise,
        metavar="SHARE",
        help="largest disturbance of the steering, a share of full lock; 0, as in the paper",
    )
    drive.add_argument(
        "--output",
        type=Path,
        default=Path("runs", "driving"),
        metavar="DIR",
        help="where results, films and pictures go; runs/driving",
    )
    drive.add_argument("--no-film", action="store_true", help="write no films")
    drive.set_defaults(run=_drive)


def _drive(asked: argparse.Namespace) -> int:
    options = DriveOptions(asked.tracks, asked.laps, asked.seed, asked.speed, asked.noise)
    require_simulator()
    drive_models(
        named_drivers(asked.models), options, asked.output, Console(), films=not asked.no_film
    )
    return 0


def drive_models(
    drivers: Mapping[str, Driver],
    options: DriveOptions,
    output: Path,
    console: Console,
    *,
    films: bool = True,
) -> dict[str, DrivingLoss]:
    """Let every driver drive every track; write results, films and pictures.

    Parameters
    ----------
    drivers : mapping from str to callable
        By name; the names become parts of file names.
    options : DriveOptions
        See there.
    output : Path
        The folder to write to.
    console : Console
        For the progress bar and the table.
    films : bool
        Whether to film each driver on its first track.

    Returns
    -------
    dict from str to DrivingLoss
        By name; only to be compared with each other.
    """
    seeds = [unseen_track_seed(options.seed, track) for track in range(options.tracks)]
    journeys: dict[str, list[Journey]] = {}
    # One image at a time is too little for several threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("driving", total=len(drivers) * len(seeds))
            for name, driver in drivers.items():
                journeys[name] = []
                for track, seed in enumerate(seeds):
                    bar.update(task, description=f"{name}, track {track}")
                    film = Film(name, options.laps) if films and track == 0 else None
                    journey = drive_track(
                        driver,
                        seed,
                        laps=options.laps,
                        speed_m_per_s=options.speed_m_per_s,
                        noise=options.gusts(track),
                        with_film=film is not None,
                        watch=film.watch if film else None,
                    )
                    if film is not None:
                        film.end(journey.ending)
                        film.save(output / f"film-{name}.gif")
                    journeys[name].append(journey)
                    bar.advance(task)
                save_path_picture(output / f"path-{name}.png", name, journeys[name])
    finally:
        torch.set_num_threads(threads)
    drives = {name: [journey.drive() for journey in each] for name, each in journeys.items()}
    losses = driving_losses(drives)
    rows = _rows(journeys, seeds)
    totals = {name: _loss_json(loss) for name, loss in losses.items()}
    found = {"options": vars(options), "models": totals, "drives": rows}
    write_atomically(output / "drives.json", json.dumps(found, indent=2).encode())
    with replacing(output / "drives.csv") as temporary:
        write_csv(temporary, [row | totals[str(row["model"])] for row in rows])
    print_table(_table(journeys, losses), console, caption=f"Films and pictures: {output}")
    return losses


def _rows(journeys: Mapping[str, list[Journey]], seeds: list[int]) -> list[dict[str, Any]]:
    rows = []
    for name, each in journeys.items():
        for track, (journey, seed) in enumerate(zip(each, seeds, strict=True)):
            drive = journey.drive()
            rows.append(
                {
                    "model": name,
                    "track": track,
                    "track_seed": seed,
                    "ending": journey.ending,
                    "laps": journey.laps,
                    "on_road_seconds": drive.on_road_seconds,
                    "crossings": drive.crossings,
                    "on_line_seconds": drive.on_line_seconds,
                    "mean_offset_m": journey.mean_offset_m,
                }
            )
    return rows


def _loss_json(loss: DrivingLoss) -> dict[str, float]:
    return {
        "time_lost": loss.time_lost,
        "crossings_share": loss.crossings,
        "on_line_share": loss.on_line,
        "driving_loss": loss.total,
    }


def _table(journeys: Mapping[str, list[Journey]], losses: Mapping[str, DrivingLoss]) -> TextTable:
    rows = []
    for name, each in journeys.items():
        drives = [journey.drive() for journey in each]
        seconds = sum(drive.on_road_seconds for drive in drives)
        crossings = sum(drive.crossings for drive in drives)
        cells = (
            name,
            f"{sum(drive.is_finished for drive in drives)} of {len(drives)}",
            f"{sum(journey.laps for journey in each):.2f}",
            f"{seconds:.1f}",
            f"{crossings}",
            f"{60 * crossings / seconds if seconds else 0:.1f}",
            f"{losses[name].on_line:.1%}",
            f"{losses[name].time_lost:.1%}",
            f"{np.mean([journey.mean_offset_m for journey in each]):.2f}",
            f"{losses[name].total:.4f}",
        )
        rows.append(Row(cells, is_reference=name in REFERENCES))
    headings = (
        *("model", "tracks to the end", "laps", "s on road", "crossings", "a minute"),
        *("time on line", "time lost", "m off centre", "L_dd"),
    )
    return TextTable(headings, tuple(rows))
