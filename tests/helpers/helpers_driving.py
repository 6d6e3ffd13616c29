"""Small recordings: a bright stripe whose place tells the angle."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SIDE = 32


def write_tracks(folder: Path, tracks: int = 3, frames: int = 40, side: int = SIDE) -> Path:
    """Write tracks into ``folder/driving`` and return the folder."""
    (folder / "driving").mkdir(parents=True, exist_ok=True)
    for track in range(tracks):
        rng = np.random.default_rng(track)
        angles = np.clip(rng.normal(0.2 * (track - 1), 0.4, frames), -1, 1).astype(np.float32)
        images = rng.integers(0, 60, (frames, side, side)).astype(np.uint8)
        columns = ((angles + 1) / 2 * (side - 4)).astype(int)
        for image, column in zip(images, columns, strict=True):
            image[:, column : column + 4] = 250
        path = folder / "driving" / f"track-{track:03}.npz"
        np.savez(path, images=images, angles=angles, meta=np.array("{}"))
    return folder
