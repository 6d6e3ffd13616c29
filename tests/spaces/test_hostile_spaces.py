"""Hostile spaces: who is left out, who counts for less, and what honest nodes notice of it."""

import dataclasses

import numpy as np
import pytest
import torch

from gems_flwr.spaces import aggregate_spaces, screen_spaces
from gems_flwr.spaces.ball import BallSpace, EllipsoidSpace, Radius
from gems_flwr.spaces.cone import build_cone


def ball(center, radius=1.0):
    return BallSpace(np.asarray(center, dtype=np.float32), Radius(radius, "certified", 0.5))


def blob_cone(seed, classes=(0, 1, 2), count=200, shift=0.0, rank="full", **options):
    """Classes around 4·e_c in five dimensions, deviation 1."""
    rng = np.random.default_rng(seed)
    y = np.repeat(classes, count)
    x = rng.normal(size=(len(y), 5)) + 4 * np.eye(5)[y] + shift
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y)
    return build_cone(x, y, 3, rank=rank, **options)


# --- balls against each other ---------------------------------------------------------------


def test_a_far_centre_is_left_out_and_the_others_are_as_they_were():
    rng = np.random.default_rng(0)
    balls = [ball(rng.normal(size=4), 9.0) for _ in range(4)]
    screened = screen_spaces([*balls, ball([50, 0, 0, 0], 1000.0)])
    assert screened.spaces == (*balls, None)
    assert "from the others' middle" in screened.reasons[4]
    assert screened.reasons[:4] == ("",) * 4


@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
def test_a_radius_of_nothing_does_not_fix_the_result(kind):
    """Three balls around 0; the liar's centre is in all of them, and its radius 1e-6."""
    centres = [[0.3, 0], [-0.3, 0], [0, 0.3], [0, -0.8]]
    spaces = [ball(c, r) for c, r in zip(centres, [1.5, 1.5, 1.5, 1e-6], strict=True)]
    if kind == "ellipsoid":
        spaces = [EllipsoidSpace(s.center, np.full(2, s.radius.value), s.radius) for s in spaces]
    assert aggregate_spaces(spaces).point == pytest.approx([0, -0.8], abs=1e-3)
    screened = screen_spaces(spaces)
    # A third of the median radius is what the liar is left with.
    assert aggregate_spaces(screened.spaces).point[1] > -0.8 + 0.5 - 1e-6
    assert "counts as 0.5" in screened.reasons[3]


@pytest.mark.parametrize(
    "options", [{}, {"rank": 2}, {"clusters": 3, "min_count": 10}], ids=["full", "low", "clusters"]
)
def test_honest_cones_pass_unchanged(options):
    cones = [blob_cone(seed, **options) for seed in range(5)]
    screened = screen_spaces(cones)
    assert screened.spaces == tuple(cones)
    assert screened.reasons == ("",) * 5


def test_no_node_counts_for_more_than_twice_the_median():
    """Four have 600 samples each, the fifth 6,000 of the same kind: it counts as 1,200."""
    cones = [*(blob_cone(seed) for seed in range(4)), blob_cone(9, count=2000)]
    screened = screen_spaces(cones)
    assert [space.total_count for space in screened.spaces] == [600] * 4 + [1200]
    assert screened.reasons[4] == "its 6,000 samples count as 1,200"


@pytest.mark.parametrize("rank", ["full", 2])
def test_classes_unlike_those_of_most_nodes_are_left_out_one_by_one(rank):
    """The first liar is right about class 2, and exchanges 0 and 1; the second has none right."""
    honest = [blob_cone(seed, rank=rank) for seed in range(5)]
    liars = [
        dataclasses.replace(blob_cone(9, rank=rank), labels=np.array(labels))
        for labels in ([1, 0, 2], [1, 2, 0])
    ]
    screened = screen_spaces([*honest, *liars])
    assert screened.spaces[:5] == tuple(honest)
    assert screened.spaces[5].labels.tolist() == [2]
    assert "classes [0, 1] are unlike" in screened.reasons[5]
    assert screened.spaces[6] is None


def test_another_spread_is_noticed_even_with_the_right_mean():
    honest = [blob_cone(seed) for seed in range(4)]
    liar = blob_cone(9)
    shrunk = type(liar.covariance)(liar.covariance.matrices * 1e-4)
    screened = screen_spaces([*honest, dataclasses.replace(liar, covariance=shrunk)])
    assert screened.spaces[4] is None


def test_inputs_of_another_scale_are_left_out_whatever_the_classes():
    honest = [blob_cone(seed, classes=[seed % 3]) for seed in range(4)]
    screened = screen_spaces([*honest, blob_cone(9, classes=[1], shift=1000.0)])
    assert screened.spaces[4] is None
    assert "scale" in screened.reasons[4]


def test_where_there_is_no_majority_nothing_is_held_against_anyone():
    """Node 0 alone has class 0; three liars claim it: they must not be able to outvote it."""
    honest = [blob_cone(seed, classes=[seed % 3]) for seed in range(6)]
    liars = [blob_cone(9 + k, classes=[0], shift=1.0) for k in range(3)]
    assert screen_spaces([*honest, *liars]).spaces == (*honest, *liars)
    two = blob_cone(0), blob_cone(1, shift=1000.0)
    assert screen_spaces(two).spaces == two
