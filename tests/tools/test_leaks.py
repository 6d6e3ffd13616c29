"""A class of 33 samples with full moments is caught, and other data are refused."""

import math

import numpy as np
import pytest
import torch
from helpers_leaks import node, pictures
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from gems_flwr.errors import OptionError, SpaceError
from gems_flwr.spaces.cone import (
    SENSITIVITY,
    MeanRule,
    PrivateRelease,
    build_cone,
    build_means,
    gaussian_noise,
    mean_values,
)
from gems_flwr.tools.leaks import (
    LayerSamples,
    Recipe,
    attack_membership,
    class_moments,
    exposures,
    inspect_cone,
    nearest_distances,
    rebuild_table,
    rebuilt_samples,
    releases,
    sent_directions,
    tried_recipe,
)
from gems_flwr.tools.leaks.exposure import (
    common_step,
    information,
    known_auc,
    mean_information,
    mean_steps,
    private_auc,
)
from gems_flwr.tools.leaks.inspection import EXPOSED_BY_FORMULA, ClassFinding
from gems_flwr.tools.leaks.membership import Trial, auc_of, placements
from gems_flwr.tools.leaks.rebuilding import MOST_SAMPLES

DATA, HELD_OUT = node(), node(seed=1, small=60, large=60)
NONE = np.zeros((0, 120))
FULL = Recipe(rank="full")


def made(recipe=None, data=DATA):
    return (recipe or Recipe()).build(data, 3)


def cone_of(counts, features, build=build_cone, **options):
    labels = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    inputs = torch.from_numpy(np.random.default_rng(0).normal(size=(sum(counts), features)))
    return build(inputs.float(), labels, max(2, len(counts)), **options)


# --- the area under the curve -----------------------------------------------------------------

scores = st.lists(st.integers(-3, 3), min_size=2, max_size=30)


def trial(members, others):
    members, others = np.array(members, float), np.array(others, float)
    return Trial(members, others, np.arange(len(members)), np.arange(len(others)))


@settings(max_examples=100)
@given(scores, scores)
def test_the_area_is_scikit_learns_and_its_error_delongs(members, others):
    """By his double sums: the variances of V10 over members and of V01 over others."""
    found = auc_of([trial(members, others)])
    truth = np.repeat([1, 0], [len(members), len(others)])
    assert found.value == pytest.approx(roc_auc_score(truth, np.concatenate([members, others])))
    kernel = np.array([[0.5 * ((a > b) + (a >= b)) for b in others] for a in members])
    expected = kernel.mean(axis=1).var(ddof=1) / len(members)
    expected += kernel.mean(axis=0).var(ddof=1) / len(others)
    assert found.error == pytest.approx(np.sqrt(expected))


def test_the_same_samples_tried_again_make_the_area_no_surer():
    once = trial([3.0, 1.0, 0.0, 2.0], [1.5, 0.5, -1.0])
    assert auc_of([once] * 5) == auc_of([once])
    assert placements(np.array([1.0]), np.array([1.0, 1.0, 2.0, 0.0])).tolist() == [2 / 4]
    with pytest.raises(OptionError, match="members and of others"):
        auc_of([trial([], [1.0])])


# --- by the file alone ------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.0, 1.0])
def test_the_formula_is_what_one_who_knows_the_distribution_reaches(step):
    """The likelihood ratio of a normal class, 4,000 times: 12 samples of 9 features.

    A member moves the mean by (x - mu) / n; given the rounded mean the ratio is a linear function
    of the inner product of both, divided by the variance of the mean with its rounding.
    """
    rng, n, features = np.random.default_rng(0), 12, 9
    deviations = np.linspace(0.5, 2, features)
    noise = deviations**2 / n + step**2 / 12
    scores, truth = [], []
    for _ in range(4000):
        samples = rng.normal(size=(n + 1, features)) * deviations
        mean = samples[:n].mean(axis=0)
        if step:
            # Dithered, so that rounding is as even as the formula takes it to be.
            shift = rng.uniform(0, step, features)
            mean = np.rint((mean - shift) / step) * step + shift
        for row, member in ((0, 1), (n, 0)):
            moved = samples[row] / n
            scores.append((mean * moved / noise).sum() - (moved**2 / noise).sum() / 2)
            truth.append(member)
    expected = known_auc(information(deviations**2, np.full(features, step), n))
    assert roc_auc_score(truth, scores) == pytest.approx(expected, abs=0.03)


def test_of_exact_means_the_formula_is_that_of_the_automatic_rule():
    """Phi(sqrt(k / 2n)): k = 20 features that vary, n = 40."""
    found = exposures(cone_of([40, 40], 20, rank="full"))[0]
    assert found.mean_auc == pytest.approx(norm.cdf(math.sqrt(20 / 80)))


@settings(max_examples=40)
@given(st.integers(3, 400), st.integers(1, 120), st.booleans())
def test_the_default_is_never_alarming_by_the_file_alone(count, features, int8):
    """From three samples on: two are themselves, whatever their rounding."""
    try:
        cone = cone_of([count, count], features, int8=int8)
    except SpaceError:
        return
    for exposure in exposures(cone):
        assert exposure.exact is None
        assert exposure.mean_auc < EXPOSED_BY_FORMULA
        assert ClassFinding(exposure).level == "fine"


def test_as_many_directions_as_samples_less_one_are_the_samples():
    """33 samples have 32 directions; rank 32 of 33 samples says it as well, rank 31 does not."""
    ranks = ("full", 32, 31)
    full, whole, less = (exposures(cone_of([33, 200], 50, rank=rank))[0] for rank in ranks)
    assert "32 directions of 33 samples" in full.exact
    assert (full.exact, less.exact) == (whole.exact, None)
    assert exposures(cone_of([33, 33], 5, rank="full"))[0].exact is None
    for count in (1, 2):
        cone = cone_of([count, 50], 4, rank="full", min_count=1)
        assert [each.exact is not None for each in exposures(cone)] == [True, False]


def test_clusters_are_judged_by_the_worst():
    cone = cone_of([60, 300], 40, rank="full", clusters=3, min_count=2)
    small = [int(n) for label, n in zip(cone.labels, cone.counts, strict=True) if label == 0]
    found = exposures(cone)[0]
    assert len(small) > 1
    assert (found.count, found.total) == (min(small), 60)
    assert found.exact is not None


def test_means_tell_less_where_they_are_rounded_or_shown_in_part():
    """Exact: 100 / 40. The rule's step is .64 * 3 * 10 / 40 = .48 deviations, and 40 * .48^2 / 12
    = .768. In part, 10 samples of 120 features: 25 directions, in steps of .82 * 4 * 5 / 10 = 1.64.
    """
    exact = cone_of([40, 40], 100, build_means, rule=MeanRule(exact=True))
    rounded, part = cone_of([40, 40], 100, build_means), cone_of([10, 200], 120)
    assert (mean_steps(exact, 0).max(), mean_steps(rounded, 0).min() > 0) == (0, True)
    found = [mean_information(cone, 0) for cone in (exact, rounded, part)]
    assert found == pytest.approx([100 / 40, 2.5 / 1.768, 2.5 / (1 + 10 * 1.64**2 / 12)])
    values = np.random.default_rng(0).normal(size=200)
    assert common_step((np.rint(values / 0.3) * 0.3).astype(np.float32)) == pytest.approx(0.3)
    assert common_step(values.astype(np.float32)) == common_step(np.zeros(5)) == 0


def test_noise_bounds_every_attacker():
    """The best attacker sees N(0, 1) or N(mu, 1)."""
    mu = SENSITIVITY / gaussian_noise(3.0, 1e-5, SENSITIVITY)
    rng = np.random.default_rng(0)
    seen = np.concatenate([rng.normal(mu, 1, 20000), rng.normal(0, 1, 20000)])
    auc = roc_auc_score(np.repeat([1, 0], 20000), seen)
    assert auc == pytest.approx(private_auc(3.0, 1e-5), abs=0.01)
    assert private_auc(0, 1e-5) == 1.0 > private_auc(10, 1e-5) > private_auc(1, 1e-5)


# --- how a space was made ---------------------------------------------------------------------

RECIPES = [
    Recipe(),
    Recipe(int8=False),
    FULL,
    Recipe(rank="full", min_count=33),
    Recipe(rank=7),
    Recipe("means", int8=False),
    Recipe("means", int8=False, mean_rule=MeanRule(exact=True)),
]


@pytest.mark.parametrize("small", [9, 33])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_space_is_made_again_to_the_last_bit(recipe, small):
    data = node(small=small)
    found, is_same = tried_recipe(recipe.build(data, 3), data)
    assert is_same
    assert (found.kind, found.rank) == (recipe.kind, recipe.rank)


def without(data, label, rows):
    keep = np.ones(len(data.labels), bool)
    keep[np.flatnonzero(data.labels == label)[:rows]] = False
    return LayerSamples(data.inputs[keep], data.labels[keep])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (without(DATA, 1, 3), "class 1 of the data: expected 33 samples, as the file, got 30"),
        (without(DATA, 2, 90), "class 2 of the data: expected 90 samples, as the file, got 0"),
        (LayerSamples(DATA.inputs[:, :9], DATA.labels), "expected 120 features"),
        (LayerSamples(DATA.inputs, DATA.labels + 1), "classes 0 to 2, got 1 to 3"),
        (LayerSamples(1 - DATA.inputs, DATA.labels), "class 0 of the data: expected samples with"),
        (LayerSamples.none(120), "expected samples, got none"),
    ],
    ids=["too few", "none", "features", "labels", "means", "empty"],
)
def test_data_that_a_space_was_not_made_of_are_refused_by_the_class(data, message):
    for recipe in (FULL, Recipe()):
        with pytest.raises(SpaceError, match=message):
            inspect_cone(made(recipe), data)


def test_data_of_another_node_are_refused_and_private_or_clustered_spaces_are_not_reproduced():
    with pytest.raises(SpaceError, match="class 0 of the data: expected samples with the mean"):
        tried_recipe(made(FULL), node(seed=1))
    private = Recipe(rank="full", private=PrivateRelease(3.0, 1e-5, 6.0))
    found, is_same = tried_recipe(made(private), DATA)
    assert (found.private.epsilon, is_same) == (3, False)
    found, _ = tried_recipe(made(Recipe(rank="full", pieces=3, min_count=2)), DATA)
    assert (found.rank, found.pieces) == ("full", 3)


def test_moments_of_clusters_add_up_and_a_release_of_the_same_samples_is_what_was_sent():
    whole, parts = made(FULL), made(Recipe(rank="full", pieces=3, min_count=2))
    for one, other in zip(class_moments(whole, 0), class_moments(parts, 0), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    for recipe in (Recipe(), FULL, Recipe(rank=7)):
        release = releases(recipe, 1, DATA, 3, is_mean=False)
        sent = class_moments(made(recipe), 1)
        assert all(map(np.array_equal, release(DATA.of(1)), sent))


# --- telling members from others --------------------------------------------------------------


def strangers(count, seed=9):
    return pictures(count, 1, np.random.default_rng(seed))


def attack(recipe, held_out, seed=0, data=DATA):
    release = releases(recipe, 1, data, 3, is_mean=False)
    sent = class_moments(recipe.build(data, 3), 1)
    return attack_membership(data.of(1), held_out, sent, release, seed=seed)


@pytest.mark.parametrize("held_out", [NONE, strangers(60)], ids=["none held out", "60 held out"])
def test_full_moments_tell_who_is_among_33_samples_and_the_default_does_less(held_out):
    full, default = attack(FULL, held_out), attack(Recipe(), held_out)
    assert full.auc.value > 0.99
    assert default.auc.value < min(0.9, full.auc.value - 2 * default.auc.error)
    # Without others three quarters of 33 make a space, and the rest is held out.
    expected = (True, 33, 60) if len(held_out) else (False, 25, 8)
    assert (default.of_what_is_sent, default.samples, default.others) == expected
    assert default == attack(Recipe(), held_out)


@pytest.mark.parametrize("held_out", [0, 60])
def test_moments_of_other_samples_tell_nothing(held_out):
    """What does not depend on the members cannot tell them, whatever the attacker learns.

    24 nodes with samples of their own: the mean AUC is 0.5 within three of its standard errors.
    """
    fresh = iter(range(1000, 9999))

    def release(samples):
        other = strangers(len(samples), next(fresh))
        return other.mean(axis=0), np.cov(other.T, bias=True)

    found = []
    for seed in range(24):
        members, others = np.split(strangers(33 + held_out, 100 + seed), [33])
        found.append(attack_membership(members, others, release(members), release, seed=seed).auc)
    error = np.sqrt(np.mean([auc.error**2 for auc in found]) / len(found))
    assert np.mean([auc.value for auc in found]) == pytest.approx(0.5, abs=3 * error)


def test_a_trial_needs_a_crowd_and_spaces_of_the_same_form():
    """Of 12 samples 9 make a space; the default needs 8 for a mean, and sends none without more."""
    few = node(small=12)
    assert attack(Recipe(rank="full", min_count=2), NONE, data=few) is None
    assert attack(Recipe(rank="full", min_count=2), strangers(20), data=few) is not None
    cone, mean = (releases(Recipe(), 1, DATA, 3, is_mean=each) for each in (False, True))
    assert cone(strangers(8)) is not None is mean(strangers(33))
    assert cone(strangers(7)) is None is mean(strangers(7))


# --- rebuilding samples -----------------------------------------------------------------------


def directions_of(samples):
    centered = samples - samples.mean(axis=0)
    _, values, right = np.linalg.svd(centered / np.sqrt(len(samples)), full_matrices=False)
    return values[: len(samples) - 1, None] * right[: len(samples) - 1]


def test_without_a_search_two_samples_are_found_and_six_are_any_table_with_their_moments():
    rng = np.random.default_rng(0)
    two, six = rng.random((2, 7)), rng.normal(size=(6, 9))
    guesses = rebuild_table(two.mean(0), directions_of(two), 2, 0, 1, iterations=0)
    assert nearest_distances(guesses, two) == pytest.approx(0, abs=1e-7)
    table = rebuild_table(six.mean(0), directions_of(six), 6, -99, 99, iterations=0)
    assert table.mean(axis=0) == pytest.approx(six.mean(axis=0))
    assert np.cov(table.T, bias=True) == pytest.approx(np.cov(six.T, bias=True))
    expected = cdist(six, table).min(axis=1) / 3
    assert nearest_distances(table, six) == pytest.approx(expected)


@pytest.mark.parametrize(("recipe", "expected"), [(FULL, 33), (Recipe(), 0)])
def test_pictures_are_rebuilt_from_full_moments_and_not_from_the_default(recipe, expected):
    """33 pictures of 120 pixels that are 0 or 1, or in thousandths: every one of them, or none."""
    cone = made(recipe)
    for units in (1.0, np.where(np.arange(120) % 2, 1e-3, 1.0)):
        sent = (mean_values(cone)[1] * units, sent_directions(cone, 1) * units)
        found = rebuilt_samples(*sent, DATA.of(1) * units, DATA.inputs * units)
        assert (found.rebuilt, found.by_chance, found.is_attack) == (expected, 0, expected > 0)


def test_what_is_near_by_chance_or_known_anyway_is_no_alarm():
    """200 samples in two dimensions; 20 within .01 of each other; too many to search for."""
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(200, 2))
    found = rebuilt_samples(flat.mean(0), directions_of(flat)[:2], flat, flat)
    assert min(found.rebuilt, found.by_chance) > 0
    assert not found.is_attack
    narrow = 0.5 + 0.01 * rng.normal(size=(20, 30))
    wide = np.concatenate([narrow, np.zeros((1, 30)), np.ones((1, 30))])
    found = rebuilt_samples(narrow.mean(0), np.zeros((0, 30)), narrow, wide)
    assert (found.rebuilt, found.nearest < 0.1) == (0, True)
    many = np.zeros((MOST_SAMPLES + 1, 2))
    assert rebuilt_samples(many[0], np.zeros((0, 2)), many, many) is None


# --- the whole look ---------------------------------------------------------------------------


def test_full_moments_of_33_samples_are_caught_and_the_default_shows_less():
    full, default = (inspect_cone(made(r), DATA, HELD_OUT) for r in (FULL, Recipe()))
    assert full.classes[1].reason.startswith("33 of 33 were rebuilt")
    assert (full.is_reproduced, default.given_away) == (True, ())
    finding = default.classes[1]
    assert finding.rebuilt.rebuilt == 0
    assert finding.membership.auc.value < full.classes[1].membership.auc.value - 0.1
    without_data = inspect_cone(made(FULL))
    assert "32 directions of 33 samples" in without_data.classes[1].reason
    assert (without_data.recipe, without_data.classes[1].membership) == (None, None)


def test_a_fixed_rank_is_caught_by_telling_members():
    """20 directions of 33 samples rebuild none of these pictures, and tell who is there."""
    found = inspect_cone(made(Recipe(rank=20)), DATA, HELD_OUT, most_classes=1)
    assert [each.membership is not None for each in found.classes] == [False, True, False]
    assert not found.classes[1].rebuilt.is_attack
    assert "members are told" in found.classes[1].reason


def test_noise_is_no_alarm_and_bounds_the_attack():
    private = Recipe(rank="full", private=PrivateRelease(1.0, 1e-5, 6.0), min_count=2)
    found = inspect_cone(made(private), DATA, HELD_OUT)
    assert found.given_away == ()
    for finding in found.classes:
        auc = finding.membership.auc
        assert auc.value < finding.exposure.mean_auc + 3 * auc.error
