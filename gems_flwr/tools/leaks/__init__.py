"""What a space gives away of the samples behind it.

`inspect_cone` looks at a class-moment cone as its owner does before it is sent. The attacks are in
`membership` and `rebuilding`.
"""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "command": "read_features save_features",
    "exposure": "exposures",
    "inspection": "inspect_cone",
    "membership": "attack_membership",
    "rebuilding": "nearest_distances rebuild_table rebuilt_samples sent_directions",
    "recipes": "LayerSamples Recipe class_moments releases tried_recipe",
}

if TYPE_CHECKING:
    from gems_flwr.tools.leaks.command import *
    from gems_flwr.tools.leaks.exposure import *
    from gems_flwr.tools.leaks.inspection import *
    from gems_flwr.tools.leaks.membership import *
    from gems_flwr.tools.leaks.rebuilding import *
    from gems_flwr.tools.leaks.recipes import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
