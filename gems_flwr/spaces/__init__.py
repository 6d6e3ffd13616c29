"""What a good-enough space is: ball, ellipsoid, set of balls, class-moment cone."""

from gems_flwr.spaces.ball import Ball
from gems_flwr.spaces.ball_set import BallSet
from gems_flwr.spaces.cone import ClassMomentCone, kappa
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance
from gems_flwr.spaces.curve import CurvedSpace, thin_curve
from gems_flwr.spaces.ellipsoid import Ellipsoid
from gems_flwr.spaces.errors import SpaceError
from gems_flwr.spaces.files import (
    Space,
    load_space,
    save_space,
    space_from_arrays,
    space_to_arrays,
)
from gems_flwr.spaces.layout import (
    OutputLayer,
    find_output_layer,
    flatten_linear,
    unflatten_linear,
)
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.spaces.quantized import QuantizedArray, quantize
from gems_flwr.spaces.radius import METHODS, Method, Radius

__all__ = [
    "METHODS",
    "Ball",
    "BallSet",
    "ClassMomentCone",
    "CurvedSpace",
    "Ellipsoid",
    "FullCovariance",
    "LowRankCovariance",
    "Method",
    "NeuronBalls",
    "OutputLayer",
    "QuantizedArray",
    "Radius",
    "Space",
    "SpaceError",
    "find_output_layer",
    "flatten_linear",
    "kappa",
    "load_space",
    "quantize",
    "save_space",
    "space_from_arrays",
    "space_to_arrays",
    "thin_curve",
    "unflatten_linear",
]
