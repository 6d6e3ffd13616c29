"""The class-moment cone: the set, how a node builds it, and how the server solves it.

A node calls `build_cone(inputs, labels, num_classes)`, which returns a `ClassMomentCone`; its
`to_arrays` and `from_arrays` are what crosses the wire; the server calls `solve_cones(cones)`,
which returns an `Intersection`.
"""

# ruff: noqa: F403
from __future__ import annotations

from typing import TYPE_CHECKING

from gems_flwr.faces import lazy_face

_NAMES = {
    "build": ("Components build_cone build_means cluster_classes factor factor_samples k_means"),
    "cone": "ClassMomentCone mean_values",
    "covariance": (
        "CommonCovariance FullCovariance LowRankCovariance PartialCovariance "
        "QuantizedArray dense quantize rounded symmetric upper_half"
    ),
    "heads": ("Head HeadOptions candidate_heads linear_head"),
    "private": (
        "PrivateChoice PrivateRelease SENSITIVITY gaussian_noise private_sums "
        "secret_normal spent_epsilon"
    ),
    "private_steps": (
        "GRADIENT LONGEST NoisyMeans PrivateState Spread constant gradient_sums "
        "gradient_unit mean_units spread_sums spread_unit whole_mean_sums whole_vectors"
    ),
    "refine": (
        "Evaluation LossCurvature LossSums Proposal REFINE_DAMPING REFINE_RIDGE candidates choose "
        "conjugate_gradients damping_after gradient_of gradient_parts gradient_sections "
        "gradient_summand "
        "loss_bound loss_sums losses_along losses_sections mean_directions points_at propose "
        "rescaled squared_length"
    ),
    "rules": (
        "check_batch is_rank "
        "MEAN_COUNT MIN_COUNT MeanRule NUMBERS_PER_SAMPLE PUSHES SAMPLES_PER_DIRECTION "
        "allowed_rank coarseness directions_of_mean least_count may_send_full samples_for "
        "WHITE_PUSHES smallest_count sum_steps whole_count"
    ),
    "solve": (
        "ConeObjective ConeOptions HeadMoments LowRankComponents POINTS "
        "RIDGE_LOW_RANK balanced_shares covariance_from_means lend_covariances missing_classes "
        "pool_moments solve_cones"
    ),
    "totals": (
        "Standard "
        "cone_from_totals countable covariance_sections covariance_sums "
        "directions_shown find_basis large_enough largest_of mean_columns mean_sections "
        "mean_sums pooled_means random_columns scale_sections "
        "scale_sums sketch_columns sketch_sections sketch_sums"
    ),
}

if TYPE_CHECKING:
    from gems_flwr.spaces.cone.build import *
    from gems_flwr.spaces.cone.cone import *
    from gems_flwr.spaces.cone.covariance import *
    from gems_flwr.spaces.cone.heads import *
    from gems_flwr.spaces.cone.private import *
    from gems_flwr.spaces.cone.private_steps import *
    from gems_flwr.spaces.cone.refine import *
    from gems_flwr.spaces.cone.rules import *
    from gems_flwr.spaces.cone.solve import *
    from gems_flwr.spaces.cone.totals import *
else:
    __all__, __getattr__, __dir__ = lazy_face(__name__, _NAMES)
