"""Merging trained models in one round: the peers that GEMS is compared with.

- `regmean`: every linear layer by least squares on the nodes' inputs (Jin et al. 2023).
- `fisher`: every weight by how much each node's prediction depends on it (Matena & Raffel 2022).
- `kfac`: the same for whole layers, with Kronecker factors (Tam et al. 2024).
- `matching`: hidden neurons are matched one to one, then averaged (after Singh & Jaggi 2020).

A model is a mapping from names to numpy arrays, a chain of layers as
`gems_flwr.networks.weight_layers` sees it; a bias is the weight of one more input that is always
one. `measure` gathers on a node what a method needs besides the model, `statistics` says what that
is and checks it, `merge` chooses the method.
"""

from gems_flwr.merging.fisher import merge_by_fisher
from gems_flwr.merging.kfac import KfacSolution, merge_by_kfac, solve_kfac
from gems_flwr.merging.matching import align_to, match_and_average
from gems_flwr.merging.measure import measure_statistics
from gems_flwr.merging.merge import MergedModel, merge_models
from gems_flwr.merging.regmean import merge_by_regmean, solve_regmean
from gems_flwr.merging.statistics import (
    SYMMETRIC,
    Kind,
    Method,
    Statistics,
    StatisticsRequest,
    check_linear,
    check_statistics,
    statistics_shapes,
)

__all__ = [
    "SYMMETRIC",
    "KfacSolution",
    "Kind",
    "MergedModel",
    "Method",
    "Statistics",
    "StatisticsRequest",
    "align_to",
    "check_linear",
    "check_statistics",
    "match_and_average",
    "measure_statistics",
    "merge_by_fisher",
    "merge_by_kfac",
    "merge_by_regmean",
    "merge_models",
    "solve_kfac",
    "solve_regmean",
    "statistics_shapes",
]
