"""Balls and ellipsoids around a trained layer: the sets, their radii, and where they meet.

A node calls `build_ball(LayerData(...), epsilon)`; the server calls `intersect_balls(balls)`
or, for any mixture of spaces, `gems_flwr.spaces.intersect`.
"""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "ball": ("BallSpace CenteredSpace EllipsoidSpace METHODS Method Radius thin_curve"),
    "intersect": "intersect_balls intersect_convex maximise_on_simplex project_to_simplex",
    "layer_data": (
        "CHUNK_BYTES LayerData accuracy class_margins random_directions required_correct "
        "two_sided unit_directions"
    ),
    "radii": (
        "SHRINK RadiusCurve accuracy_curve build_ball build_ellipsoid find_extent "
        "linear_fisher relative_axes"
    ),
}

if TYPE_CHECKING:
    from gems_flwr.spaces.ball.ball import *
    from gems_flwr.spaces.ball.intersect import *
    from gems_flwr.spaces.ball.layer_data import *
    from gems_flwr.spaces.ball.radii import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
