"""A space of every kind, for tests of files and messages."""

import numpy as np

from gems_flwr.neurons import NeuronBalls
from gems_flwr.spaces import OutputLayer
from gems_flwr.spaces.ball import BallSpace, EllipsoidSpace, Radius
from gems_flwr.spaces.cone import (
    ClassMomentCone,
    CommonCovariance,
    FullCovariance,
    LowRankCovariance,
    PartialCovariance,
    quantize,
)

CLASSES, FEATURES = 3, 4
RNG = np.random.default_rng(0)
ROOTS = RNG.normal(size=(2, FEATURES, FEATURES))
SIZE = CLASSES * (FEATURES + 1)
LAYER = OutputLayer("weight", "bias", CLASSES, FEATURES)
BALL = BallSpace(RNG.normal(size=SIZE), Radius(9.0, "certified", 0.4, 7))
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
    covariance=CommonCovariance(
        center=np.ones(FEATURES),
        octaves=np.arange(FEATURES),
        shares=np.array([0.5, 0]),
        ranks=np.array([2, 1, 0]),
        rows=quantize(RNG.normal(size=(3, FEATURES)), axis=1),
        deviations=quantize(RNG.uniform(0.5, 1, size=(2, FEATURES)), axis=1),
    ),
    **(COMMON | {"means": LOW.means}),
)
# Drawn apart, so that what the others are does not depend on it.
SMALL = np.random.default_rng(1).normal(size=(3, FEATURES))
_ALL = COMMON | {"labels": [0, 1, 2], "counts": [40, 9, 50], "withheld": (), "withheld_count": 0}
MEANS = ClassMomentCone(covariance=PartialCovariance.none(3, FEATURES), **(_ALL | {"means": SMALL}))

CURVED = EllipsoidSpace(BALL.center, ELLIPSOID.radii, ELLIPSOID.radius, np.linspace(5, 0, 11))
NEURONS = NeuronBalls(RNG.normal(size=(5, 6)), np.ones(5))
