"""What GEMS does after the spaces have come in: stages, each with both sides of what it asks.

`Gems` puts them together by its options, in the order in which they play: `screen` (``robust``),
`tune`, `judge` (``head="auto"``, ``verify``), `refine` with its `gradients`.
"""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "gradients": "Gradient GradientReply GradientSum Losses LossesSum",
    "judge": "Choose Counts Judge JudgeSum decided verify",
    "refine": "Refine RefineMemory",
    "screen": "Screen plausible unchecked_details",
    "stage": "Head Play Stage as_head check_needs",
    "tune": "Tune fine_tune_linear fine_tune_network public_weight tune_cones",
}

if TYPE_CHECKING:
    from gems_flwr.stages.gradients import *
    from gems_flwr.stages.judge import *
    from gems_flwr.stages.refine import *
    from gems_flwr.stages.screen import *
    from gems_flwr.stages.stage import *
    from gems_flwr.stages.tune import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
