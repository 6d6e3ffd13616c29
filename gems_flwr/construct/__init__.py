"""Node side: quality functions, radii, Fisher axes, class moments."""

from gems_flwr.construct.build import (
    build_ball,
    build_ellipsoid,
    find_radius,
    good_enough,
    radius_curve,
)
from gems_flwr.construct.certified import certified_curve, certified_loss_radius, safe_radii
from gems_flwr.construct.cone import MIN_COUNT, build_cone, cone_from_sums
from gems_flwr.construct.errors import NotGoodEnoughError
from gems_flwr.construct.fisher import fisher_diagonal, linear_fisher, relative_axes
from gems_flwr.construct.layer import LayerData, random_directions
from gems_flwr.construct.low_rank import compress
from gems_flwr.construct.moments import ClassSums, in_chunks, sum_classes
from gems_flwr.construct.privacy import PrivateRelease, gaussian_noise, private_sums
from gems_flwr.construct.quality import Quality, required_correct
from gems_flwr.construct.rays import RadiusCurve, accuracy_curve, loss_radius
from gems_flwr.construct.request import LayerInputs, SpaceRequest, build_space
from gems_flwr.construct.search import bisect_radius, grow_radius
from gems_flwr.construct.worst import worst_curve, worst_loss_radius

__all__ = [
    "MIN_COUNT",
    "ClassSums",
    "LayerData",
    "LayerInputs",
    "NotGoodEnoughError",
    "PrivateRelease",
    "Quality",
    "RadiusCurve",
    "SpaceRequest",
    "accuracy_curve",
    "bisect_radius",
    "build_ball",
    "build_cone",
    "build_ellipsoid",
    "build_space",
    "certified_curve",
    "certified_loss_radius",
    "compress",
    "cone_from_sums",
    "find_radius",
    "fisher_diagonal",
    "gaussian_noise",
    "good_enough",
    "grow_radius",
    "in_chunks",
    "linear_fisher",
    "loss_radius",
    "private_sums",
    "radius_curve",
    "random_directions",
    "relative_axes",
    "required_correct",
    "safe_radii",
    "sum_classes",
    "worst_curve",
    "worst_loss_radius",
]
