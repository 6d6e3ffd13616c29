"""Four classes that are easy to tell apart."""

import numpy as np
import torch

CLASSES, FEATURES = 4, 6
CENTERS = np.random.default_rng(7).normal(size=(CLASSES, FEATURES)) * 3


def blobs(labels, per_class=60, seed=0):
    """Gaussian clouds around the class centres."""
    rng = np.random.default_rng(seed)
    y = np.repeat(labels, per_class)
    x = CENTERS[y] + rng.normal(size=(len(y), FEATURES))
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def both_parts(source):
    """Return a node's data as an app's loader does: here training is done on what is validated."""
    return lambda context: (source(context), source(context))


TEST = blobs(range(CLASSES), 200, seed=99)
