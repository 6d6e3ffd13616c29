"""Recordings: what the camera saw and how the controller steered, one file per track.

Every file is made from the seed and the number of its track alone, in a simulator of its own, so a
recording that was stopped goes on where it was and has the same bytes as an unbroken one.

Half of a file is driven in each direction, because the tracks turn left on the whole. Disturbances
of the steering, held for a while, lead the car off the line, up to the edge of the road and now and
then beyond; the label is what the controller wants at that moment, not what the wheels do. Without
them a network sees only perfect driving, and cannot come back from its first mistake.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from gems_flwr.core import derive_seed, generator
from gems_flwr.core.disk import replacing
from simulations.config import ConfigError
from simulations.driving.controller import SPEED_M_PER_S, hold_speed, pursue
from simulations.driving.simulator import (
    HEIGHT,
    STEPS_PER_SECOND,
    WIDTH,
    Simulator,
    require_simulator,
)

FOLDER = "driving"
STEPS_PER_FRAME = 2
# Until the car has its speed; nothing of that is recorded.
_LAUNCH_STEPS = STEPS_PER_SECOND
_SHORTEST_HOLD, _LONGEST_HOLD = 10, 40


@dataclass(frozen=True)
class RecordingOptions:
    """What a recording is made of.

    Parameters
    ----------
    tracks : int
        Number of tracks and files, at least 1.
    frames_per_track : int
        At least 2, one for each direction.
    seed : int
        Decides tracks and disturbances; at least 0.
    noise : float
        Largest disturbance, a share of full lock; in [0, 1].
    """

    tracks: int = 10
    frames_per_track: int = 4800
    seed: int = 0
    noise: float = 1.0

    def __post_init__(self) -> None:
        if self.frames_per_track < 2 or self.seed < 0 or not 0 <= self.noise <= 1:
            raise ConfigError(
                "a recording has a --frames-per-track of at least 2, a --seed of at least 0 and a "
                f"--noise in [0, 1], got {self.frames_per_track}, {self.seed} and {self.noise}"
            )

    def meta(self, track: int) -> dict[str, Any]:
        """Return what a file has about itself; the number of tracks does not matter to it."""
        options = asdict(self)
        del options["tracks"]
        seed = recorded_track_seed(self.seed, track)
        return options | {"track": track, "track_seed": seed, "speed_m_per_s": SPEED_M_PER_S}


@dataclass(frozen=True, eq=False)
class Recording:
    """One file: images, angles, and the share of frames with the car's middle on the road."""

    images: NDArray[np.uint8]
    angles: NDArray[np.float32]
    on_road: float


def recorded_track_seed(seed: int, track: int) -> int:
    """Return the simulator's seed of a track to record: always even; see `unseen_track_seed`."""
    return derive_seed(seed, "driving", "record", track) >> 32 << 1


def unseen_track_seed(seed: int, track: int) -> int:
    """Return the simulator's seed of a track to drive on.

    It is always odd, and those of recordings are even: whatever the seeds are, no model was trained
    on a track that it is judged on.
    """
    return (derive_seed(seed, "driving", "unseen", track) >> 32 << 1) + 1


def held_noise(rng: np.random.Generator, steps: int, largest: float) -> NDArray[np.float64]:
    """Return disturbances of the steering, one per step, uniform in [-largest, largest].

    Each is held for 10 to 40 steps (0.2 to 0.8 seconds); every second one is zero, so that the
    controller gets the car back in between.
    """
    parts: list[NDArray[np.float64]] = []
    total, is_calm = 0, True
    while total < steps:
        length = int(rng.integers(_SHORTEST_HOLD, _LONGEST_HOLD, endpoint=True))
        value = 0.0 if is_calm else float(rng.uniform(-largest, largest))
        parts.append(np.full(length, value))
        total, is_calm = total + length, not is_calm
    return np.concatenate(parts)[:steps]


def record_track(
    options: RecordingOptions, track: int, on_frame: Callable[[], None] = lambda: None
) -> Recording:
    """Drive one track in both directions."""
    total = options.frames_per_track
    images = np.empty((total, HEIGHT, WIDTH), dtype=np.uint8)
    angles = np.empty(total, dtype=np.float32)
    frame = on_road = 0
    for is_backwards in (False, True):
        frames = total // 2 if is_backwards else math.ceil(total / 2)
        rng = generator(options.seed, "driving", "noise", track, int(is_backwards))
        noise = held_noise(rng, frames * STEPS_PER_FRAME, options.noise)
        seed = recorded_track_seed(options.seed, track)
        with Simulator(seed, is_backwards=is_backwards) as simulator:
            along_m = 0.0
            for step in range(-_LAUNCH_STEPS, len(noise)):
                state = simulator.state
                place = simulator.road.locate(state.position, near_m=along_m)
                along_m, clean = place.along_m, pursue(state, simulator.road, place)
                if step >= 0 and step % STEPS_PER_FRAME == 0:
                    images[frame], angles[frame] = simulator.image, clean
                    on_road += abs(place.offset_m) <= simulator.road.half_width_m
                    frame += 1
                    on_frame()
                disturbed = clean + (noise[step] if step >= 0 else 0.0)
                simulator.step(disturbed, *hold_speed(state.speed_m_per_s))
    return Recording(images, angles, on_road / total)


def save_recording(path: Path, recording: Recording, meta: dict[str, Any]) -> None:
    """Write a file, whole or not at all."""
    text = json.dumps(meta | {"on_road": recording.on_road}, sort_keys=True)
    with replacing(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(
            stream, images=recording.images, angles=recording.angles, meta=np.array(text)
        )


def load_recording(path: Path, meta: dict[str, Any]) -> Recording:
    """Read a file that was made with these options; a ConfigError names what differs."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = json.loads(str(archive["meta"]))
            images, angles = archive["images"], archive["angles"]
    except (ValueError, LookupError, EOFError, BadZipFile) as error:
        raise ConfigError(
            f"{path} is no recording ({error}); remove it or choose another --data-dir"
        ) from error
    on_road = found.pop("on_road", math.nan)
    other = [key for key in sorted(meta | found) if meta.get(key) != found.get(key)]
    if other:
        has = ", ".join(f"{key}={found.get(key)}" for key in other)
        wanted = ", ".join(f"{key}={meta.get(key)}" for key in other)
        raise ConfigError(
            f"{path} was recorded with {has}, now it would be {wanted}; "
            "record with the same options, remove it, or choose another --data-dir"
        )
    return Recording(images, angles, on_road)


def record(options: RecordingOptions, data_dir: Path, console: Console) -> list[Recording]:
    """Record what is not there yet, print what all tracks hold, and return them in order.

    Raises
    ------
    ConfigError
        If the simulator is not installed, or a file is there that was made with other options.
    """
    require_simulator()
    tracks = range(options.tracks)
    paths = [data_dir / FOLDER / f"track-{track:03d}.npz" for track in tracks]
    # Before the first hour is spent.
    found = {t: load_recording(paths[t], options.meta(t)) for t in tracks if paths[t].exists()}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        total, done = (n * options.frames_per_track for n in (options.tracks, len(found)))
        bar = progress.add_task("recording", total=total, completed=done)
        for track in tracks:
            if track not in found:
                progress.update(bar, description=f"track {track + 1} of {options.tracks}")
                made = record_track(options, track, lambda: progress.advance(bar))
                save_recording(paths[track], made, options.meta(track))
                found[track] = made
    recordings = [found[track] for track in tracks]
    angles = np.concatenate([each.angles for each in recordings])
    on_road = np.mean([each.on_road for each in recordings])
    console.print(
        f"{data_dir / FOLDER}: {len(angles):,} frames of {options.tracks} tracks, {on_road:.1%} on "
        f"the road; angles {angles.mean():+.3f} ± {angles.std():.3f}",
        soft_wrap=True,
    )
    return recordings
