"""Secure summation: a server learns the sum of many nodes' numbers, and no single one of them.

Bonawitz et al. 2017, with the sparse graph of Bell et al. 2020. Pure: values in, values out; the
messages are in `gems_flwr.carriers.masked`.
"""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "fixed_point": "Layout Section Words whole_section",
    "keys": "KEY_BYTES SHARE_BYTES Signer draw_neighbours load_trusted shares_needed",
    "secure_sum": "SecureSum",
    "session": "AdvertisedKeys NodeSecrets Roster SumSession judged mask",
    "shared_noise": (
        "DELTA_PART EPSILON_PART LARGEST SMALLEST_SHARE SharedNoise discrete_gaussian "
        "epsilon_cost squared_mu_of tail"
    ),
}

if TYPE_CHECKING:
    from gems_flwr.secure.fixed_point import *
    from gems_flwr.secure.keys import *
    from gems_flwr.secure.secure_sum import *
    from gems_flwr.secure.session import *
    from gems_flwr.secure.shared_noise import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
