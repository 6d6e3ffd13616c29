"""Driving: what a camera sees, and how a controller steers at that moment; a number, no class.

Written by ``python -m simulations.driving record``: a file for each track, half of which is driven
in each direction. The label is the steering angle, from -1 (hard left) to 1. It is the deep-driving
data of Kamp et al. 2018 (Section 5 and A.4) with a simulator that can be had; the groups are the
tracks, so that each of ten drivers can have a road of their own (``partition=groups``).

What is held out is the last part of each direction of each track, in one piece, with a gap of a
second before it. Neighbouring images are nearly equal, so images held out at random would be known
by heart: they would measure memory. The road of the held-out part may have been driven in an
earlier lap, so its loss still says little about unseen roads; for these a model has to drive.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulations.data.archives import DATA_VARIABLE, MissingDataError, data_folder, read_arrays
from simulations.data.examples import Dataset, Examples, assemble
from simulations.data.images import check_fraction

FOLDER = "driving"
DIRECTIONS = 2
_FRAMES_PER_SECOND = 25


def driving(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 0,
    test_fraction: float = 0.1,
    tracks: int | None = None,
) -> Dataset:
    """Read the recorded tracks.

    Parameters
    ----------
    data_dir, seed, public
        See `simulations.data`; the folder holds ``driving/track-000.npz`` and so on. The size of
        the images is theirs.
    test_fraction : float
        Share of each direction of each track that is held out, 0 < fraction < 1.
    tracks : int, optional
        Use the first of them alone, at least 1; None: all that there are.
    """
    check_fraction("test_fraction", test_fraction)
    if tracks is not None and tracks < 1:
        raise ValueError(f"dataset.tracks must be at least 1, or null, got {tracks}")
    folder = data_folder(data_dir, "driving")
    files = sorted((folder / FOLDER).glob("track-*.npz"))[:tracks]
    if not files or len(files) < (tracks or 0):
        number = f" --tracks {tracks}" if tracks else ""
        raise MissingDataError(
            f"driving is not there: {folder / FOLDER} has {len(files)} tracks; record them with "
            f"python -m simulations.driving record --data-dir {folder}{number}, or set data_dir=… "
            f"(or {DATA_VARIABLE}) to the folder that has them."
        )
    # A file that was recorded anew is another one.
    stamps = tuple((str(file), file.stat().st_mtime_ns) for file in files)
    return _driving(stamps, seed, public, test_fraction)


@functools.lru_cache(maxsize=1)
def _driving(
    stamps: tuple[tuple[str, int], ...], seed: int, public: int, test_fraction: float
) -> Dataset:
    kept, held_out, groups = [], [], []
    for track, (name, _) in enumerate(stamps):
        images, angles = read_track(Path(name))
        train, test = split_track(len(angles), test_fraction)
        kept.append(Examples(images[train], angles[train]))
        held_out.append(Examples(images[test], angles[test]))
        groups.append(np.full(len(train), track))
    return assemble(
        "driving",
        classes=0,
        scale=1 / 255,
        pool=Examples.concatenate(kept),
        test=Examples.concatenate(held_out),
        public=public,
        seed=seed,
        groups=np.concatenate(groups),
    )


def read_track(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return a track's images, shaped ``(frames, 1, height, width)``, and its angles."""
    images, angles = read_arrays(path, "images", "angles")
    if images.dtype != np.uint8 or images.ndim != 3 or angles.shape != (len(images),):
        raise ValueError(
            f"{path}: expected grey images (frames, height, width) of bytes and an angle for each, "
            f"got images {images.shape} of {images.dtype} and angles {angles.shape}"
        )
    if not len(angles) or not (np.abs(angles) <= 1).all():
        raise ValueError(f"{path}: expected angles from -1 to 1, one at least")
    return images[:, None], angles.astype(np.float32)


def split_track(frames: int, test_fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of a track for training, and the end of each direction, held out."""
    train, test = [], []
    for part in np.array_split(np.arange(frames), DIRECTIONS):
        count = max(1, round(test_fraction * len(part)))
        # A short track, as of a test, has no second to lose.
        gap = min(_FRAMES_PER_SECOND, (len(part) - count) // 4)
        train.append(part[: len(part) - count - gap])
        test.append(part[len(part) - count :])
    if any(not len(part) for part in (*train, *test)):
        raise ValueError(
            f"a track of {frames} frames cannot be divided: lower dataset.test_fraction (now "
            f"{test_fraction}), or record more frames"
        )
    return np.concatenate(train), np.concatenate(test)
