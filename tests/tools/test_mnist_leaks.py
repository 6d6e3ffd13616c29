"""33 images of a digit: full moments give them away, the default does not."""

import os

import numpy as np
import pytest

from gems_flwr.tools.leaks import LayerSamples, Recipe, inspect_cone
from simulations.data.images import mnist

DIGIT, COUNT, HELD_OUT = 3, 33, 300


@pytest.fixture(scope="module")
def parts():
    """Return 33 images of the digit and 100 of another, and others of the digit."""
    if "GEMS_FLWR_DATA" not in os.environ:
        pytest.skip("GEMS_FLWR_DATA names no folder with MNIST")
    train = mnist(seed=0).train
    labels = train.labels
    digit = np.flatnonzero(labels == DIGIT)
    mine = np.concatenate([digit[:COUNT], np.flatnonzero(labels == 4)[:100]])
    return [
        LayerSamples(train.features[rows].reshape(len(rows), -1) / 255, labels[rows])
        for rows in (mine, digit[COUNT : COUNT + HELD_OUT])
    ]


@pytest.mark.deep
def test_full_moments_of_33_images_are_caught_and_the_default_rebuilds_none(parts):
    data, held_out = parts
    found = {}
    for recipe in (Recipe(rank="full"), Recipe()):
        cone = recipe.build(data, 10)
        found[recipe.rank] = inspect_cone(cone, data, held_out, most_classes=2).classes[0]
    assert found["full"].label == DIGIT
    assert found["full"].rebuilt.rebuilt >= 31
    assert found["full"].level == "given away"
    assert found["full"].membership.auc.value > 0.99
    assert found["auto"].level != "given away"
    assert found["auto"].rebuilt.rebuilt == 0
    assert found["auto"].membership.auc.value < 0.85
