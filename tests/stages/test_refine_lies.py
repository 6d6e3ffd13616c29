"""`Gems(refine=R, robust=True)`: what liars may say, the loss of the honest never rises."""

import functools

import numpy as np
import pytest
import torch
from helpers_digits import app_of, digits, linear

from gems_flwr import Cone, Gems, InProcessGrid, Refine
from gems_flwr.core.records import to_numpy
from gems_flwr.node.limits import UNLIMITED


def in_gradient(change, content):
    if "gradient" in content:
        for key, kind in (("scales", "<f4"), ("along", "<f2")):
            sent = np.frombuffer(content["gradient"][key], kind).astype(np.float64)
            # A scale has no sign: codes are turned by turning what lies along directions.
            turned = sent * (abs(change) if key == "scales" else change)
            content["gradient"][key] = np.clip(turned, -6e4, 6e4).astype(kind).tobytes()


def in_losses(change, content):
    metrics = content.get("metrics", {})
    if "loss-sums" in metrics:
        losses = np.array(metrics["loss-sums"])
        metrics["loss-sums"] = [float(each) for each in np.maximum(change(losses), 0)]


def heavy(content, factor=1000, keys=("weight-sum", "loss-sum")):
    metrics = content.get("metrics", {})
    for key in keys:
        if key in metrics:
            metrics[key] = metrics[key] * factor


def worst_is_best(losses):
    return np.where(losses == losses.max(), 0.0, losses)


def garbage(content):
    rng = np.random.default_rng(0)
    if "gradient" in content:
        along = np.frombuffer(content["gradient"]["along"], "<f2")
        content["gradient"]["along"] = rng.normal(size=along.shape).astype("<f2").tobytes()
    in_losses(rng.permutation, content)


def both(content):
    in_gradient(-30, content)
    in_losses(lambda losses: 2 * losses[0] - losses, content)


PARTS = digits(5, sort=False)
# Each lie with whether it can be seen which node tells it.
LIES = {
    "the worst point has loss 0": (lambda c: in_losses(worst_is_best, c), True),
    "gradient x -30": (lambda c: in_gradient(-30, c), False),
    "weights x 1000": (heavy, True),
    "an enormous loss": (lambda c: heavy(c, 1e30, ["loss-sum"]), True),
    "no weight": (lambda c: heavy(c, 0.0, ["weight-sum"]), True),
    "garbage": (garbage, True),
    "all turned round": (both, True),
    "losses fall a little faster": (
        lambda c: in_losses(lambda x: 0.98 * x + 0.02 * x[0], c),
        False,
    ),
}


def honest_loss(result, parts):
    """The loss that refinement is to lower, of those who report it truly."""
    layer = to_numpy(result.arrays)
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    scores = x @ torch.from_numpy(layer["weight"]).T + torch.from_numpy(layer["bias"])
    return float(torch.nn.functional.cross_entropy(scores, y))


@functools.cache
def played(rounds, *mods):
    grid = InProcessGrid(app_of(PARTS, UNLIMITED, *mods), 5)
    options = {"space": Cone(rank=5), "refine": Refine(rounds, ridge=1e-4), "robust": True}
    return Gems(**options).start(grid, linear())


@pytest.mark.parametrize("liars", [(1,), (1, 3)], ids=["one of five", "two of five"])
@pytest.mark.parametrize("lie", LIES)
def test_the_loss_of_the_honest_never_rises(lie, liars):
    tell, is_seen = LIES[lie]

    def outer(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] in liars and reply.has_content():
            tell(reply.content)
        return reply

    honest = [part for node, part in enumerate(PARTS) if node not in liars]
    result = played(2, outer)
    # The first round asks for no gradient yet, and no one lies in it.
    assert honest_loss(result, honest) <= honest_loss(played(0), honest) * (1 + 1e-6)
    named = {failure.node for _, failure in result.failures}
    assert named == ({str(node) for node in liars} if is_seen else set())


def test_without_liars_a_robust_refinement_lowers_the_loss_and_names_none():
    result = played(2)
    assert not result.failures
    assert all(each["taken"] for each in result.details["refinement"][:2])
