"""A space of every kind, for tests of files and messages."""

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from gems_flwr.disk.files import CHECKSUM
from gems_flwr.moments.class_sums import ClassSums
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import FullCovariance, LowRankCovariance, quantize
from gems_flwr.spaces.curved_space import CurvedSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.neuron_balls import NeuronBalls
from gems_flwr.spaces.output_layer import OutputLayer
from gems_flwr.spaces.partial_covariance import PartialCovariance
from gems_flwr.spaces.radius import Radius

CLASSES, FEATURES = 3, 4
RNG = np.random.default_rng(0)
ROOTS = RNG.normal(size=(2, FEATURES, FEATURES))
SIZE = CLASSES * (FEATURES + 1)
LAYER = OutputLayer("weight", "bias", CLASSES, FEATURES)
BALL = BallSpace(RNG.normal(size=SIZE), Radius(9.0, "worst", 0.4, 7))
ELLIPSOID = EllipsoidSpace(BALL.center, np.full(SIZE, 9.0), Radius(9.0, "certified", 0.4))
COMMON = {"num_classes": CLASSES, "labels": [0, 2], "counts": [40, 50], "withheld": (1,)}
COMMON |= {"withheld_count": 3, "means": RNG.normal(size=(2, FEATURES))}
FULL = ClassMomentCone(covariance=FullCovariance(ROOTS @ ROOTS.transpose(0, 2, 1)), **COMMON)
LOW = ClassMomentCone(
    covariance=LowRankCovariance(
        quantize(RNG.normal(size=(2, FEATURES, 2)), axis=1),
        quantize(RNG.uniform(size=(2, FEATURES)), axis=1, round_up=True),
    ),
    **(COMMON | {"means": quantize(COMMON["means"], axis=1)}),
)
MIXED = ClassMomentCone(
    covariance=LowRankCovariance(
        quantize(np.ones((3, FEATURES)), axis=1), LOW.covariance.deviations, np.array([3, 0])
    ),
    **(COMMON | {"means": LOW.means}),
)
# Drawn apart, so that what the others are does not depend on it.
SMALL = np.random.default_rng(1).normal(size=(3, FEATURES))
_ALL = COMMON | {"labels": [0, 1, 2], "counts": [40, 9, 50], "withheld": (), "withheld_count": 0}
PARTIAL = ClassMomentCone(
    covariance=PartialCovariance(LOW.covariance, np.array([False, True, False]), FEATURES),
    **(_ALL | {"means": quantize(SMALL, axis=1)}),
)
FULL_PARTIAL = ClassMomentCone(
    covariance=PartialCovariance(FULL.covariance, np.array([False, True, False]), FEATURES),
    **(_ALL | {"means": SMALL}),
)
MEANS = ClassMomentCone(covariance=PartialCovariance.none(3, FEATURES), **(_ALL | {"means": SMALL}))
SAMPLES = RNG.normal(size=(CLASSES, 40, FEATURES))
SUMS = ClassSums(
    CLASSES,
    np.arange(CLASSES),
    np.full(CLASSES, 40.0),
    SAMPLES.sum(axis=1),
    SAMPLES.transpose(0, 2, 1) @ SAMPLES,
)
CURVED = CurvedSpace(ELLIPSOID, np.linspace(5, 0, 11))
NEURONS = NeuronBalls(RNG.normal(size=(5, 6)), np.ones(5), "worst", 0.1, outgoing=2)
EXAMPLES = (np.zeros((6, 2, 2), np.uint8), np.arange(6))


def without_checksum(path):
    """Make a file what it would have been before there were checksums."""
    with safe_open(path, framework="numpy") as file:
        header = {k: v for k, v in file.metadata().items() if k != CHECKSUM}
    save_file(load_file(path), path, metadata=header)
