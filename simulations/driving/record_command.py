"""``record``: writes the tracks that are not there yet, and says what all of them hold."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from simulations.command_line import CommandParser, count
from simulations.data.archives import data_folder
from simulations.driving.recording import (
    FOLDER,
    Recording,
    RecordingOptions,
    load_recording,
    record_track,
    save_recording,
    track_file,
)
from simulations.driving.simulator import require_simulator
from simulations.report.tables import TextTable, print_table


def add_record(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the command to a parser."""
    defaults = RecordingOptions()
    record = commands.add_parser(
        "record", help="let the controller drive; write images and steering angles"
    )
    record.add_argument(
        "--tracks", type=count, default=defaults.tracks, help=f"how many; {defaults.tracks}"
    )
    record.add_argument(
        "--frames-per-track",
        type=count,
        default=defaults.frames_per_track,
        metavar="N",
        help=f"25 a second, half of them in each direction; {defaults.frames_per_track}",
    )
    record.add_argument("--seed", type=int, default=defaults.seed, help="of tracks and noise; 0")
    record.add_argument(
        "--noise",
        type=float,
        default=defaults.noise,
        metavar="SHARE",
        help=f"largest disturbance of the steering, a share of full lock; {defaults.noise:g}",
    )
    record.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help=f"files go to DIR/{FOLDER}; default: the environment variable GEMS_FLWR_DATA",
    )
    record.set_defaults(run=_record)


def _record(asked: argparse.Namespace) -> int:
    options = RecordingOptions(asked.tracks, asked.frames_per_track, asked.seed, asked.noise)
    record(options, data_folder(asked.data_dir, "driving"), Console())
    return 0


def record(options: RecordingOptions, data_dir: Path, console: Console) -> list[Recording]:
    """Record what is not there yet.

    Parameters
    ----------
    options : RecordingOptions
        See there.
    data_dir : Path
        The data folder.
    console : Console
        For the progress bar and the closing table.

    Returns
    -------
    list of Recording
        All tracks, in their order.

    Raises
    ------
    ConfigError
        If the simulator is not installed, or a file is there that was made with other options.
    """
    require_simulator()
    paths = [track_file(data_dir, track) for track in range(options.tracks)]
    # Before the first hour is spent.
    found = {
        track: load_recording(path, options.meta(track))
        for track, path in enumerate(paths)
        if path.exists()
    }
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        total = options.tracks * options.frames_per_track
        done = len(found) * options.frames_per_track
        bar = progress.add_task("recording", total=total, completed=done)
        for track, path in enumerate(paths):
            if track in found:
                continue
            progress.update(bar, description=f"track {track + 1} of {options.tracks}")
            made = record_track(options, track, lambda: progress.advance(bar))
            save_recording(path, made, options.meta(track))
            found[track] = made
    recordings = [found[track] for track in range(options.tracks)]
    print_table(_table(recordings), console, title=f"{data_dir / FOLDER}")
    return recordings


def _table(recordings: list[Recording]) -> TextTable:
    named = [(str(number), [recording]) for number, recording in enumerate(recordings)]
    rows = []
    for name, members in [*named, ("all", recordings)]:
        angles = np.concatenate([member.angles for member in members]).astype(np.float64)
        frames = [len(member.angles) for member in members]
        on_road = sum(m.on_road * n for m, n in zip(members, frames, strict=True)) / sum(frames)
        low, high = np.quantile(angles, [0.05, 0.95])
        rows.append(
            (
                name,
                f"{sum(frames):,}",
                "–" if math.isnan(on_road) else f"{on_road:.1%}",
                f"{angles.mean():+.3f}",
                f"{angles.std():.3f}",
                f"{low:+.2f} … {high:+.2f}",
            )
        )
    headings = ("track", "frames", "on road", "mean angle", "deviation", "5 % … 95 %")
    return TextTable.of(headings, rows)
