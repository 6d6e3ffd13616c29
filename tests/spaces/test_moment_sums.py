"""Sums from which class moments are made: bounds hold, and totals are those of the pooled data."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gems_flwr.errors import BadReplyError
from gems_flwr.samples import Samples
from gems_flwr.secure.fixed_point import Layout
from gems_flwr.spaces.cone import (
    Standard,
    cone_from_totals,
    covariance_sections,
    covariance_sums,
    directions_shown,
    find_basis,
    gradient_of,
    gradient_sections,
    gradient_summand,
    large_enough,
    largest_of,
    loss_sums,
    losses_along,
    losses_sections,
    mean_columns,
    mean_sections,
    mean_sums,
    mean_values,
    pooled_means,
    random_columns,
    rescaled,
    samples_for,
    scale_sections,
    scale_sums,
    sketch_columns,
    sketch_sections,
    sketch_sums,
    symmetric,
)
from gems_flwr.spaces.cone.summed import MomentSum

CLASSES = 3


def data(seed, count=240, features=5, spread=1.0, offset=0.0, tails=False):
    """Samples of three classes with different means and covariances."""
    rng = np.random.default_rng(seed)
    labels, shape = rng.integers(0, CLASSES, size=count), (count, features)
    noise = rng.standard_t(1.5, size=shape) if tails else rng.normal(size=shape)
    mix = rng.normal(size=(CLASSES, features, features))
    inputs = np.einsum("nij,nj->ni", mix[labels], noise)
    inputs += 2 * rng.normal(size=(CLASSES, features))[labels]
    inputs = np.clip(inputs * spread + offset, -9e5, 9e5).astype(np.float32)
    return Samples(torch.from_numpy(inputs), torch.from_numpy(labels))


def split(samples, nodes, seed=0):
    """Samples spread over nodes; some may have none of a class, or nothing at all."""
    drawn = np.random.default_rng(seed).integers(0, nodes, size=len(samples))
    owner = drawn * (samples.labels.numpy() + 1) % nodes
    return [Samples(samples.inputs[owner == k], samples.labels[owner == k]) for k in range(nodes)]


def add(parts, sections, summand, *, nodes=None):
    """The total of several nodes, and that every bound held on the way."""
    layout = Layout(sections, nodes=nodes or len(parts))
    summands = [summand(part) for part in parts]
    values = [{s.name: each[s.name] for s in sections} for each in summands]
    for section in sections:
        absolute = sum(np.abs(value[section.name]) for value in values)
        assert np.max(absolute, initial=0) <= section.bound * (
            1 if section.of_total else len(parts)
        )
    total = layout.decode(layout.add([layout.encode(value) for value in values]))
    errors = {s.name: len(parts) * s.step(layout.nodes) / 2 for s in sections}
    for section in sections:
        exact = sum(value[section.name] for value in values)
        assert np.abs(total[section.name] - exact).max() <= errors[section.name] * (1 + 1e-9) + 1e-9
    return total, errors


@dataclasses.dataclass
class Played:
    pooled: object
    columns: object
    basis: object
    cone: object


def play(parts, random=2, seed=0, min_count=2):
    """The four sums, as a server plays them."""
    features = parts[0].inputs.shape[1]
    total, _ = add(parts, scale_sections(CLASSES, len(parts)), lambda s: scale_sums(s, CLASSES))
    counts, largest = np.rint(total["counts"]), largest_of(total["powers"])
    sections = mean_sections(counts, features, largest)
    pooled = pooled_means(*add(parts, sections, lambda s: mean_sums(s, CLASSES)))
    standard = (pooled.standard.center, pooled.standard.scale)
    columns = sketch_columns(mean_columns(pooled).dense().astype(float), random, seed)
    sections = sketch_sections(pooled.standard, columns.shape[1])
    total, _ = add(parts, sections, lambda s: sketch_sums(s, *standard, columns))
    basis = find_basis(pooled, columns, total["sketch"]).dense().astype(np.float64)
    sections = covariance_sections(counts, pooled.standard, np.linalg.norm(basis, axis=1))
    total, _ = add(parts, sections, lambda s: covariance_sums(s, CLASSES, *standard, basis))
    return Played(
        pooled, columns, basis, cone_from_totals(total, pooled, basis, min_count=min_count)
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 9),
    count=st.integers(1, 200),
    spread=st.sampled_from([1e-6, 1.0, 300.0]),
    offset=st.sampled_from([0.0, -50.0, 1000.0]),
    tails=st.booleans(),
)
def test_every_bound_holds_whatever_the_data(seed, nodes, count, spread, offset, tails):
    """Asserted in `add`, for sums over nodes of absolute values, in all four exchanges."""
    play(split(data(seed, count, 5, spread, offset, tails), nodes, seed))


def test_constant_features_and_a_missing_class_are_no_trouble():
    samples = data(3)
    samples.inputs[:, 2] = 7.0
    keep = samples.labels != 1
    played = play(split(Samples(samples.inputs[keep], samples.labels[keep]), 4))
    assert played.cone.labels.tolist() == [0, 2]
    assert np.isfinite(mean_values(played.cone)).all()


def test_totals_give_the_cone_of_the_pooled_data():
    """Means, and covariances within the basis, against numpy on all samples in one place."""
    samples = data(1, count=3000, features=6)
    played = play(split(samples, 5), random=1)
    inputs, labels = samples.inputs.numpy().astype(np.float64), samples.labels.numpy()
    scale = played.pooled.standard.scale
    within = np.zeros((6, 6))
    for place, label in enumerate(range(CLASSES)):
        own = inputs[labels == label]
        np.testing.assert_allclose(mean_values(played.cone)[place], own.mean(axis=0), atol=5e-3)
        expected = np.cov(own.T, bias=True)
        within += len(own) / len(inputs) * expected
        # Along directions of the basis, in standardised coordinates.
        along = played.basis / scale
        found = played.cone.covariance.factor(place).astype(np.float64)
        inside = np.linalg.pinv(played.basis.T) @ (found / scale[:, None])
        np.testing.assert_allclose(
            played.basis @ played.basis.T @ inside @ inside.T @ played.basis @ played.basis.T,
            along @ expected @ along.T,
            atol=2e-2,
        )
    np.testing.assert_allclose(played.pooled.within, np.diag(within), rtol=1e-3)


def test_the_basis_has_the_means_and_what_the_covariance_makes_of_them():
    """A block Krylov space, computed here by numpy from the pooled data."""
    samples = data(4, count=4000, features=12)
    played = play(split(samples, 4), random=0)
    standard = played.pooled.standard
    inputs = (samples.inputs.numpy().astype(np.float64) - standard.center) / standard.scale
    labels = samples.labels.numpy()
    means = np.stack([inputs[labels == c].mean(axis=0) for c in range(CLASSES)])
    within = np.cov((inputs - means[labels]).T, bias=True)
    apart = (means[1:] - means[:1]).T
    wanted = np.concatenate([apart, within @ apart], axis=1)
    assert len(played.basis) == 4
    span, _ = np.linalg.qr(played.basis.T)
    missed = np.linalg.norm(wanted - span @ (span.T @ wanted), axis=0)
    assert (missed < 0.03 * np.linalg.norm(wanted, axis=0)).all()


def test_small_classes_of_the_total_have_a_mean_and_no_covariance():
    samples = data(6, count=300)
    keep = (samples.labels != 1) | (torch.arange(300) < 20)
    cone = play(split(Samples(samples.inputs[keep], samples.labels[keep]), 3), min_count=32).cone
    assert cone.lacking.tolist() == [False, True, False]


@pytest.mark.parametrize("largest", [0.0, 1e-20, 1.0, 1.5, 1e6])
def test_the_largest_input_is_told_as_a_power_of_two_that_is_no_smaller(largest):
    samples = Samples(torch.tensor([[0.0, -largest]], dtype=torch.float64), torch.tensor([0]))
    told = largest_of(scale_sums(samples, CLASSES)["powers"])
    assert largest <= told
    assert told <= max(2 * largest, 2.0**-43)


def test_classes_that_are_too_small_in_all_are_left_out():
    samples = Samples(torch.zeros(7, 2), torch.tensor([0, 0, 0, 0, 1, 1, 1]))
    assert large_enough(samples, 3, totals=(40, 0, 0)).labels.tolist() == [0, 0, 0, 0]


def test_covariances_are_told_in_as_many_directions_as_all_but_rare_classes_allow():
    """One direction for every 25 samples: 100 allow 4 of 300 features; 9 of 309 are rare."""
    counts = np.array([100.0, 200.0, 9.0])
    assert directions_shown(counts, 300) == 4
    assert samples_for(4, 300) == 100
    standard = Standard(np.zeros(300), np.ones(300), 309.0, np.ones(300))
    names = [s.name for s in covariance_sections(counts, standard, np.ones(4), samples_for(4, 300))]
    assert names == ["counts", "first-0", "second-0", "first-1", "second-1"]


def test_random_columns_are_signs_of_length_one_that_follow_from_the_seed():
    columns = random_columns(300, 7, seed=5)
    assert np.allclose(np.abs(columns), 300**-0.5)
    np.testing.assert_allclose(np.linalg.norm(columns, axis=0), 1)
    assert np.array_equal(columns, random_columns(300, 7, seed=5))
    assert abs(columns.mean()) < 4 / 300  # four deviations of a mean of 2,100 signs
    assert np.linalg.matrix_rank(columns) == 7


# --- refinement -------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 6),
    size=st.sampled_from([0.0, 1.0, 1e4]),
    offset=st.sampled_from([0.0, 300.0]),
    tails=st.booleans(),
    weighted=st.booleans(),
)
def test_losses_and_gradients_of_any_layer_keep_their_bounds(
    seed, nodes, size, offset, tails, weighted
):
    """Also those of absurd layers, for losses are bounded by lengths of inputs and of weights."""
    rng = np.random.default_rng(seed)
    parts = split(data(seed, 150, 5, 1.0, offset, tails), nodes, seed)
    standard = rescaled(play(parts).pooled.standard, rng.uniform(0.3, 3, size=5))
    layer, direction = size * rng.normal(size=(2, CLASSES, 6))
    weights = rng.uniform(0, 5, size=CLASSES) if weighted else np.ones(CLASSES)
    center = standard.center / standard.scale

    def summand(part):
        sums = loss_sums(part, layer, standard.scale, weights)
        by_class = weights * np.bincount(part.labels.numpy(), minlength=CLASSES)
        return gradient_summand(sums, by_class, center)

    total, _ = add(parts, gradient_sections(layer, standard, weights, by_class=True), summand)
    points = np.array([[0.0, 0.0], [0.5, 2.0]])
    layers = [(1 + u) * layer + t * direction for u, t in points]
    sections = losses_sections(layers, standard, weights)

    def losses(part):
        by_class = weights * np.bincount(part.labels.numpy(), minlength=CLASSES)
        directions = np.stack([layer, direction])
        values = losses_along(part, layer, directions, points, standard.scale, weights).sum(0)
        return {"losses": values, "weights": by_class}

    at_points, _ = add(parts, sections, losses)
    assert at_points["losses"][0] == pytest.approx(total["loss"][0], rel=1e-6, abs=1e-6)


def test_the_total_gradient_is_that_of_the_pooled_samples():
    samples = data(8, count=900, offset=20.0)
    parts = split(samples, 4)
    standard = play(parts).pooled.standard
    layer = np.random.default_rng(0).normal(size=(CLASSES, 6)) * 0.1
    center, ones = standard.center / standard.scale, np.ones(CLASSES)

    def summand(part):
        sums = loss_sums(part, layer, standard.scale, ones)
        return gradient_summand(sums, np.bincount(part.labels.numpy(), minlength=3) * 1.0, center)

    total, errors = add(parts, gradient_sections(layer, standard, ones, by_class=True), summand)
    exact = loss_sums(samples, layer, standard.scale, ones)
    off = errors["gradient"] + errors["bias"] * np.abs(center).max()
    found = gradient_of(total["gradient"], total["bias"], center)
    assert np.abs(found - exact.gradient).max() <= off * (1 + 1e-6)
    curvature = symmetric(total["curvature"], CLASSES)
    assert np.abs(curvature - exact.curvature).max() <= errors["curvature"] * (1 + 1e-6)


def test_a_summand_that_no_samples_add_up_to_is_refused():
    """Inputs of 3 and 4: their sum is 7, that of squares 25, and 7² is at most 2 · 25."""
    question, errors = MomentSum("means", None), {"sum": 0.0, "squares": 0.0}
    honest = {"counts": np.ones(2), "sum": np.array([7.0]), "squares": np.array([25.0])}
    question.check_summand(honest, errors)
    for lie in (
        {"squares": np.array([24.0])},
        {"squares": np.array([-1.0]), "sum": np.zeros(1)},
        {"counts": np.array([3.0, -1.0])},
    ):
        with pytest.raises(BadReplyError, match="no samples have"):
            question.check_summand(honest | lie, errors)
