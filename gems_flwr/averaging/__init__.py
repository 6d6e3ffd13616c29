"""Means of models, how far models are apart, and when averaging them pays.

A model is a mapping from names to numpy arrays; nothing here knows about Flower.

- `means`: weighted means of models and of metrics.
- `robust`, `krum`: medians, trimmed means and choices that a few bad models cannot move far.
- `rules`: which of these means replaces some models, and how many liars it bears.
- `divergence`: squared distances between models.
- `synchronisation`: an averaging of models that live on the nodes.
- `dynamic`: the coordinator of dynamic averaging as a pure state machine.
- `threshold`: thresholds of dynamic averaging that move.
- `steps`: a step of the global model from some clients' updates, and old ones of the others.
"""

from gems_flwr.averaging.divergence import divergence, squared_distance
from gems_flwr.averaging.dynamic import (
    Augmentation,
    Balancing,
    BalancingRule,
    Condition,
    LocalReport,
    Order,
)
from gems_flwr.averaging.means import Arrays, mean_metrics, weighted_mean, with_floats_of
from gems_flwr.averaging.robust import coordinate_median, geometric_median, trimmed_mean
from gems_flwr.averaging.rules import Combined, RobustKind, RobustRule, combine
from gems_flwr.averaging.steps import (
    best_beta,
    flat,
    moved_control,
    remembered,
    residual_norm,
    stepped,
    unflat,
    update_of,
)
from gems_flwr.averaging.synchronisation import Coordinator, Synchronisation
from gems_flwr.averaging.threshold import following_loss, steered

__all__ = [
    "Arrays",
    "Augmentation",
    "Balancing",
    "BalancingRule",
    "Combined",
    "Condition",
    "Coordinator",
    "LocalReport",
    "Order",
    "RobustKind",
    "RobustRule",
    "Synchronisation",
    "best_beta",
    "combine",
    "coordinate_median",
    "divergence",
    "flat",
    "following_loss",
    "geometric_median",
    "mean_metrics",
    "moved_control",
    "remembered",
    "residual_norm",
    "squared_distance",
    "steered",
    "stepped",
    "trimmed_mean",
    "unflat",
    "update_of",
    "weighted_mean",
    "with_floats_of",
]
