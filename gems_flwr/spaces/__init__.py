"""Good-enough spaces: the sets, how nodes build them, and how the server makes one layer of them.

Everything here is mathematics on arrays and tensors, without Flower. `gems_flwr.spaces.cone` and
`gems_flwr.spaces.ball` are the two kinds of spaces; this face has what is common to them: a layer
as a flat vector, spaces as files, aggregation, plausibility.
"""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "aggregate": (
        "Aggregate OnEmpty aggregate_spaces intersect intersection_details largest_epsilon"
    ),
    "convex": (
        "ConvexSet Intersection OutputLayer Space check_array check_dimensions "
        "check_integer check_keys check_number find_output_layer flatten_linear in_all "
        "node_margins register_space space_from_arrays take unflatten_linear verdict_of"
    ),
    "files": "SUFFIX SpaceFolder file_stem load_space save_space",
    "screen": "FAR SMALL input_length screen_gradients screen_losses screen_spaces",
}

if TYPE_CHECKING:
    from gems_flwr.spaces.aggregate import *
    from gems_flwr.spaces.convex import *
    from gems_flwr.spaces.files import *
    from gems_flwr.spaces.screen import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
