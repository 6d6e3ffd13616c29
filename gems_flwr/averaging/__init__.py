"""Means of models, how far models are apart, and when averaging them pays.

A model is a mapping from names to numpy arrays; nothing here knows about Flower.

- `means`: weighted means of models and of metrics, squared distances.
- `robust`: means that a few bad models cannot move far.
- `balancing`: the coordinator of dynamic averaging as a pure state machine.
- `steps`: a step of the global model from some clients' updates, and old ones of the others.
- `sampling`: who trains which model, by importance under a budget.
"""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "balancing": (
        "Augmentation Balancing BalancingRule Condition Coordinator LocalReport Synchronisation"
    ),
    "means": "mean_metrics metric_form squared_distance weighted_mean with_floats_of",
    "robust": "HEAVY LEAST_MODELS Combined RobustKind RobustRule combine geometric_median",
    "sampling": (
        "LOSS_FLOOR Matrix aggregation_coefficients data_shares draw_assignment "
        "loss_importance optimal_probabilities reachable_budget"
    ),
    "steps": "best_beta flat moved_control remembered residual_norm stepped unflat update_of",
}

if TYPE_CHECKING:
    from gems_flwr.averaging.balancing import *
    from gems_flwr.averaging.means import *
    from gems_flwr.averaging.robust import *
    from gems_flwr.averaging.sampling import *
    from gems_flwr.averaging.steps import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
