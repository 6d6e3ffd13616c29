"""A node with a class of 33 samples: pictures of on and off pixels, of three classes."""

import numpy as np

from gems_flwr.tools.leaks import LayerSamples

CLASSES, FEATURES, SMALL, LARGE = 3, 120, 33, 90


def pictures(count, label, rng):
    """Return pictures of a class: each pixel is on with a chance of its own."""
    chances = np.random.default_rng(100 + label).uniform(0.05, 0.5, size=FEATURES)
    return (rng.random((count, FEATURES)) < chances).astype(np.float64)


def node(seed=0, small=SMALL, large=LARGE):
    """Return samples of which class 1 has few."""
    rng = np.random.default_rng(seed)
    counts = [large, small, large]
    inputs = np.concatenate([pictures(n, label, rng) for label, n in enumerate(counts)])
    return LayerSamples(inputs, np.repeat(np.arange(CLASSES), counts))
