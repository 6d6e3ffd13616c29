"""Node side: quality functions, radii of layers and neurons, Fisher axes, class moments."""

from gems_flwr.construct.activations import ACTIVATIONS, Activation, activation_of
from gems_flwr.construct.automatic import allowed_rank, may_send_full, smallest_count
from gems_flwr.construct.build import (
    build_ball,
    build_ellipsoid,
    find_radius,
    good_enough,
    radius_curve,
)
from gems_flwr.construct.certified import certified_curve, certified_loss_radius, safe_radii
from gems_flwr.construct.cone import MIN_COUNT, Rank, build_cone, cone_from_sums, least_count
from gems_flwr.construct.errors import NotGoodEnoughError
from gems_flwr.construct.fisher import fisher_diagonal, linear_fisher, relative_axes
from gems_flwr.construct.layer import LayerData, random_directions, unit_directions
from gems_flwr.construct.low_rank import compress
from gems_flwr.construct.moments import ClassSums, in_chunks, sum_classes
from gems_flwr.construct.neuron_data import (
    NeuronData,
    NeuronMeasure,
    draw_rows,
    neuron_deviation,
)
from gems_flwr.construct.neuron_request import NeuronRequest
from gems_flwr.construct.neurons import build_neuron_balls
from gems_flwr.construct.privacy import (
    PrivateRelease,
    PrivateScore,
    gaussian_noise,
    private_sums,
    spent_epsilon,
)
from gems_flwr.construct.quality import Quality, required_correct
from gems_flwr.construct.rays import RadiusCurve, accuracy_curve, loss_radius
from gems_flwr.construct.request import (
    LayerInputs,
    ScoreRequest,
    SpaceRequest,
    build_space,
    is_rank,
)
from gems_flwr.construct.search import bisect_radius, grow_radius
from gems_flwr.construct.worst import worst_curve, worst_loss_radius

__all__ = [
    "ACTIVATIONS",
    "MIN_COUNT",
    "Activation",
    "ClassSums",
    "LayerData",
    "LayerInputs",
    "NeuronData",
    "NeuronMeasure",
    "NeuronRequest",
    "NotGoodEnoughError",
    "PrivateRelease",
    "PrivateScore",
    "Quality",
    "RadiusCurve",
    "Rank",
    "ScoreRequest",
    "SpaceRequest",
    "accuracy_curve",
    "activation_of",
    "allowed_rank",
    "bisect_radius",
    "build_ball",
    "build_cone",
    "build_ellipsoid",
    "build_neuron_balls",
    "build_space",
    "certified_curve",
    "certified_loss_radius",
    "compress",
    "cone_from_sums",
    "draw_rows",
    "find_radius",
    "fisher_diagonal",
    "gaussian_noise",
    "good_enough",
    "grow_radius",
    "in_chunks",
    "is_rank",
    "least_count",
    "linear_fisher",
    "loss_radius",
    "may_send_full",
    "neuron_deviation",
    "private_sums",
    "radius_curve",
    "random_directions",
    "relative_axes",
    "required_correct",
    "safe_radii",
    "smallest_count",
    "spent_epsilon",
    "sum_classes",
    "unit_directions",
    "worst_curve",
    "worst_loss_radius",
]
