"""A film of a drive: a small GIF, four times as fast as the drive, with time and lap drawn in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image as PillowImage
from PIL import ImageDraw, ImageFont

from gems_flwr.disk.files import replacing
from simulations.driving.simulator import STEPS_PER_SECOND, Simulator

STEPS_PER_PICTURE = 20
SPEED_UP = 4
_SIZE = (300, 175)
_STRIP = 26
_COLOURS = 32
_PANEL = 0.875
"""Share of the simulator's picture above its instrument panel."""
_MS_PER_PICTURE = round(1000 * STEPS_PER_PICTURE / STEPS_PER_SECOND / SPEED_UP)
_LAST_MS = 1500
_RED, _GREY, _WHITE = (204, 0, 0), (120, 120, 120), (255, 255, 255)


class Film:
    """Takes pictures while a car drives; `watch` goes to `drive_track`.

    Parameters
    ----------
    title : str
        Who drives.
    laps : int
        How many there are to drive.
    """

    def __init__(self, title: str, laps: int) -> None:
        self._title, self._laps = title, laps
        self._pictures: list[PillowImage.Image] = []
        self._font = ImageFont.load_default(size=12)

    def watch(self, simulator: Simulator, step: int, laps: float, angle: float) -> None:
        """Take a picture, at every so many steps."""
        if step % STEPS_PER_PICTURE == 0:
            self._add(simulator, step, laps, angle)

    def end(self, ending: str) -> None:
        """Write over the last picture how it ended."""
        draw = ImageDraw.Draw(self._pictures[-1])
        middle = (_SIZE[0] / 2, _SIZE[1] / 4)
        left, top, right, bottom = draw.textbbox(middle, ending, font=self._font, anchor="mm")
        draw.rectangle((left - 6, top - 4, right + 6, bottom + 4), fill=(0, 0, 0))
        draw.text(middle, ending, font=self._font, anchor="mm", fill=_WHITE)

    def save(self, path: Path) -> None:
        """Write the GIF, whole or not at all."""
        # One palette for all pictures: half the size, and no flicker.
        few = np.concatenate(
            [np.asarray(p) for p in self._pictures[:: len(self._pictures) // 8 + 1]]
        )
        palette = PillowImage.fromarray(few).quantize(_COLOURS)
        reduced = [
            picture.quantize(palette=palette, dither=PillowImage.Dither.NONE)
            for picture in self._pictures
        ]
        durations = [_MS_PER_PICTURE] * (len(reduced) - 1) + [_LAST_MS]
        with replacing(path) as temporary:
            reduced[0].save(
                temporary,
                format="GIF",
                save_all=True,
                append_images=reduced[1:],
                duration=durations,
                loop=0,
                optimize=False,
            )

    def _add(self, simulator: Simulator, step: int, laps: float, angle: float) -> None:
        view = simulator.film_frame()
        road = PillowImage.fromarray(view[: round(len(view) * _PANEL)]).resize(
            _SIZE, PillowImage.Resampling.BILINEAR
        )
        picture = PillowImage.new("RGB", (_SIZE[0], _SIZE[1] + _STRIP))
        picture.paste(road, (0, 0))
        draw = ImageDraw.Draw(picture)
        middle = _SIZE[1] + _STRIP / 2
        lap = min(int(max(laps, 0.0)) + 1, self._laps)
        words = f"{step / STEPS_PER_SECOND:5.1f} s   lap {lap} of {self._laps}"
        draw.text((6, middle), self._title[:18], font=self._font, anchor="lm", fill=_WHITE)
        draw.text((118, middle), words, font=self._font, anchor="lm", fill=_WHITE)
        # How it steers: a bar to the left or to the right.
        zero, reach = 262, 32
        draw.line((zero - reach, middle, zero + reach, middle), fill=_GREY)
        bar = sorted((zero, zero + angle * reach))
        draw.rectangle((bar[0], middle - 4, bar[1], middle + 4), fill=_RED)
        draw.line((zero, middle - 7, zero, middle + 7), fill=_WHITE)
        self._pictures.append(picture)
