"""Ways in which messages travel; strategies and questions do not know about them."""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "in_process": "InProcessGrid",
    "known_layers": "KnownLayers complete_model lacking_layers layers_digest",
    "masked": "MASKS MaskedSums answer_masked",
    "metered": "MeteredGrid",
    "packed": (
        "PACKED PackedModels answer_packed open_packed pack_bytes packed_models unpack_bytes"
    ),
}

if TYPE_CHECKING:
    from gems_flwr.carriers.in_process import *
    from gems_flwr.carriers.known_layers import *
    from gems_flwr.carriers.masked import *
    from gems_flwr.carriers.metered import *
    from gems_flwr.carriers.packed import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
