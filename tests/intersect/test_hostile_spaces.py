"""Hostile spaces: who is left out, who counts for less, and what honest nodes notice of it."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.intersect.aggregate import aggregate_spaces
from gems_flwr.intersect.audit import audit_nodes
from gems_flwr.intersect.intersect import intersect
from gems_flwr.intersect.screen_spaces import FAR, HEAVY, screen_spaces
from gems_flwr.intersect.subsets import largest_subset
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.radius import Radius


def ball(center, radius=1.0):
    return BallSpace(np.asarray(center, dtype=np.float32), Radius(radius, "worst", 0.5))


def blob_cone(seed, classes=(0, 1, 2), count=200, shift=0.0, rank=None, **options):
    """Classes around 4·e_c in five dimensions, deviation 1."""
    rng = np.random.default_rng(seed)
    y = np.repeat(classes, count)
    x = rng.normal(size=(len(y), 5)) + 4 * np.eye(5)[y] + shift
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y)
    return build_cone(x, y, 3, rank=rank, **options)


# --- the largest subset ---------------------------------------------------------------------


def test_the_one_far_ball_is_left_out_and_that_is_proved():
    balls = [ball([0, 0]), ball([1, 0]), ball([100, 0]), ball([0, 1])]
    subset = largest_subset(balls)
    assert subset.members == (0, 1, 3)
    assert subset.proved
    assert all(balls[index].contains(subset.intersection.point) for index in subset.members)


def test_greed_is_corrected_by_the_search():
    """Three lie, far out on different sides: the worst violated is not always a liar."""
    balls = [
        ball([0, 0], 1),
        ball([1, 0], 1),
        ball([30, 0], 1),
        ball([0, 40], 1),
        ball([-50, 0], 1),
    ]
    subset = largest_subset(balls)
    assert subset.members == (0, 1)
    assert subset.proved


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_larger_subset_meets_than_the_one_that_is_proved(seed):
    """Against all subsets, one by one."""
    rng = np.random.default_rng(seed)
    balls = [ball(rng.normal(size=3) * 2, rng.uniform(0.3, 2)) for _ in range(4)]
    subset = largest_subset(balls)
    sizes = [
        size
        for size in range(1, 5)
        for members in itertools.combinations(balls, size)
        if intersect(members).feasible
    ]
    if subset.proved:
        assert len(subset.members) == max(sizes)


def test_without_budget_the_answer_is_found_but_not_proved():
    balls = [ball([0, 0]), ball([1, 0]), ball([100, 0])]
    subset = largest_subset(balls, budget=0)
    assert subset.members == (0, 1)
    assert not subset.proved


def test_the_aggregate_names_who_is_left_out_and_still_says_that_not_all_meet():
    balls = [ball([0, 0]), ball([1, 0]), ball([100, 0])]
    found = aggregate_spaces(balls, on_empty="subset")
    assert found.left_out == (2,)
    assert found.proved
    assert found.intersection.empty
    assert found.intersection.margins[2] < 0 <= min(found.intersection.margins[:2])
    # The least violating point is half-way to the liar.
    assert aggregate_spaces(balls).point[0] > 40


# --- balls against each other ---------------------------------------------------------------


def test_a_far_centre_is_left_out_and_the_others_are_as_they_were():
    rng = np.random.default_rng(0)
    balls = [ball(rng.normal(size=4), 9.0) for _ in range(4)]
    screened = screen_spaces([*balls, ball([50, 0, 0, 0], 1000.0)])
    assert screened.spaces[:4] == tuple(balls)
    assert screened.spaces[4] is None
    assert "from the others' middle" in screened.reasons[4]
    assert screened.reasons[:4] == ("",) * 4


@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
def test_a_radius_of_nothing_does_not_fix_the_result(kind):
    """Three balls around 0; the liar's centre is in all of them, and its radius 1e-6."""
    centres = [[0.3, 0], [-0.3, 0], [0, 0.3], [0, -0.8]]
    radii = [1.5, 1.5, 1.5, 1e-6]

    def space(center, radius):
        plain = ball(center, radius)
        if kind == "ball":
            return plain
        return EllipsoidSpace(plain.center, np.full(2, radius), plain.radius)

    spaces = [space(c, r) for c, r in zip(centres, radii, strict=True)]
    owned = aggregate_spaces(spaces).point
    assert owned == pytest.approx([0, -0.8], abs=1e-3)
    screened = screen_spaces(spaces)
    free = aggregate_spaces(screened.spaces).point
    # A third of the median radius is what the liar is left with.
    assert free[1] > -0.8 + 0.5 - 1e-6
    assert "counts as 0.5" in screened.reasons[3]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(3, 9), size=st.integers(2, 40))
def test_alike_balls_pass_unchanged(seed, nodes, size):
    """Centres on a sphere around the middle, radii within a factor of two."""
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(nodes, size))
    centres = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    balls = [ball(c, rng.uniform(1, 2)) for c in centres]
    screened = screen_spaces(balls)
    middle = np.median(centres, axis=0)
    lengths = np.linalg.norm(centres - middle, axis=1)
    if lengths.max() < FAR / 2 * np.median(lengths):
        assert screened.spaces == tuple(balls)


# --- cones against each other ---------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 2])
def test_honest_cones_pass_unchanged(rank):
    cones = [blob_cone(seed, rank=rank) for seed in range(5)]
    screened = screen_spaces(cones)
    assert screened.spaces == tuple(cones)
    assert screened.reasons == ("",) * 5


@pytest.mark.parametrize("rank", [None, 2])
def test_classes_unlike_those_of_most_nodes_are_left_out_one_by_one(rank):
    """The liar is right about class 2, and exchanges 0 and 1."""
    honest = [blob_cone(seed, rank=rank) for seed in range(4)]
    liar = blob_cone(9, rank=rank)
    liar = dataclasses.replace(liar, labels=np.array([1, 0, 2]))
    screened = screen_spaces([*honest, liar])
    assert screened.spaces[:4] == tuple(honest)
    assert screened.spaces[4].labels.tolist() == [2]
    assert "classes [0, 1] are unlike" in screened.reasons[4]


def test_a_node_that_is_wrong_about_all_classes_is_left_out():
    honest = [blob_cone(seed) for seed in range(4)]
    liar = dataclasses.replace(blob_cone(9), labels=np.array([1, 2, 0]))
    assert screen_spaces([*honest, liar]).spaces[4] is None


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


def test_a_million_samples_count_as_twice_the_median():
    honest = [blob_cone(seed) for seed in range(4)]
    liar = blob_cone(9)
    liar = dataclasses.replace(liar, counts=liar.counts * 10**6, total_count=0)
    screened = screen_spaces([*honest, liar])
    assert screened.spaces[4].total_count == pytest.approx(HEAVY * 600, abs=3)
    assert "count as 1,200" in screened.reasons[4]


def test_a_class_that_few_nodes_hold_is_left_alone():
    """Node 0 alone has class 0; three liars claim it: they must not be able to outvote it."""
    honest = [blob_cone(seed, classes=[seed % 3]) for seed in range(6)]
    liars = [blob_cone(9 + k, classes=[0], shift=1.0) for k in range(3)]
    screened = screen_spaces([*honest, *liars])
    assert screened.spaces == (*honest, *liars)


def test_with_two_nodes_there_is_no_majority():
    cones = [blob_cone(0), blob_cone(1, shift=1000.0)]
    assert screen_spaces(cones).spaces == tuple(cones)


def test_clusters_of_a_class_are_taken_together():
    cones = [blob_cone(seed, clusters=3, min_count=10) for seed in range(4)]
    assert screen_spaces(cones).spaces == tuple(cones)


# --- the audit ------------------------------------------------------------------------------


def audit(harm, nodes=5, rivalry=0.0, votes=None, **options):
    """A model is the set of its nodes; a node's score is 0.9 less the harm of each in it."""

    def score(model):
        return {
            voter: votes(voter, model)
            if votes and votes(voter, model) is not None
            else 0.9 - sum(harm.get(n, rivalry) for n in model if n != voter)
            for voter in map(str, range(nodes))
        }

    return audit_nodes([str(n) for n in range(nodes)], frozenset, score, **options)


def test_who_harms_most_others_is_convicted_and_then_the_next():
    result = audit({"1": 0.2, "3": 0.3})
    assert list(result.convicted) == ["3", "1"]
    assert result.convicted["3"] == pytest.approx(0.3)
    assert result.model == frozenset("024")
    assert result.nodes == ("0", "2", "4")


def test_the_rivalry_of_honest_classes_convicts_nobody():
    assert audit({}, rivalry=0.03).convicted == {}


def test_fewer_than_half_cannot_have_an_honest_node_convicted():
    """Nodes 3 and 4 claim to be perfectly served as soon as node 0 is out."""

    def lie(voter, model):
        return None if voter not in "34" else float("0" not in model)

    assert audit({}, votes=lie).convicted == {}


def test_never_are_half_of_the_nodes_convicted():
    harm = {str(n): 0.1 for n in range(6)}
    assert len(audit(harm, nodes=6).convicted) == 2
    assert len(audit(harm, nodes=6, at_least=5).convicted) == 1


def test_nodes_that_do_not_answer_have_no_vote():
    result = audit_nodes(["0", "1", "2"], frozenset, lambda model: {})
    assert result.convicted == {}
