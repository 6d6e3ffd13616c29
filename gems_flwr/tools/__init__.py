"""Around a run: the command line, files of spaces and models, model cards, trackers, leaks.

Nothing here is needed to run a strategy. `gems_flwr.tools.leaks` has a face of its own.
"""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "export": "export_model",
    "live": "LiveView",
    "model_card": "versions write_model_card",
    "offline": "OfflineResult aggregate_files",
    "ready": "COMMANDS simulations_folder start_simulations",
    "submit": "COMPLETED FlowerCli",
    "trackers": "MLflow TensorBoard Tracker",
}

if TYPE_CHECKING:
    from gems_flwr.tools.export import *
    from gems_flwr.tools.live import *
    from gems_flwr.tools.model_card import *
    from gems_flwr.tools.offline import *
    from gems_flwr.tools.ready import *
    from gems_flwr.tools.submit import *
    from gems_flwr.tools.trackers import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
