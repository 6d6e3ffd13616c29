"""What answers on a node: the mod, its limits and ledger, tasks."""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "limits": "UNLIMITED NodeLimits",
    "mod": "Node NodeOptions freeze_layers good_enough_mod inner_mods node_name respond",
    "scaffold": "CORRECTION GRADIENT corrected_gradients vector_in vector_record",
    "task": "Report Task TaskSet task_client_app",
}

if TYPE_CHECKING:
    from gems_flwr.node.limits import *
    from gems_flwr.node.mod import *
    from gems_flwr.node.scaffold import *
    from gems_flwr.node.task import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
