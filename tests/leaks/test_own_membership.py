"""Telling members from others with the owner's own samples."""

import numpy as np
import pytest
from helpers_leaks import node, pictures

from gems_flwr.leaks.own_membership import own_membership
from gems_flwr.leaks.recipes import Recipe, class_moments, releases

NOBODY = np.zeros((0, 120))


def attack(recipe, held_out, seed=0, data=None):
    data = data or node()
    cone = recipe.build(data.inputs, data.labels, 3)
    release = releases(recipe, 1, data.inputs, data.labels, 3, is_mean=False)
    return own_membership(data.of(1), held_out, class_moments(cone, 1), release, seed=seed)


def strangers(count, seed=9):
    return pictures(count, 1, np.random.default_rng(seed))


@pytest.mark.parametrize("held_out", [NOBODY, strangers(60)], ids=["none held out", "60 held out"])
def test_full_moments_tell_who_is_among_33_samples_and_the_default_does_less(held_out):
    full, default = attack(Recipe(rank="full"), held_out), attack(Recipe(), held_out)
    assert full.auc.value > 0.99
    assert default.auc.value < 0.9
    assert default.auc.value < full.auc.value - 2 * default.auc.error


@pytest.mark.parametrize("held_out", [0, 60])
def test_moments_of_other_samples_tell_nothing(held_out):
    """What does not depend on the members cannot tell them, whatever the attacker learns.

    24 nodes with samples of their own: the mean AUC is 0.5 within three of its standard errors.
    """
    fresh = iter(range(1000, 9999))

    def release(samples):
        made = strangers(len(samples), next(fresh))
        return made.mean(axis=0), np.cov(made.T, bias=True)

    found = []
    for seed in range(24):
        members, others = np.split(strangers(33 + held_out, 100 + seed), [33])
        found.append(own_membership(members, others, release(members), release, seed=seed).auc)
    mean = np.mean([auc.value for auc in found])
    error = np.sqrt(np.mean([auc.error**2 for auc in found]) / len(found))
    assert mean == pytest.approx(0.5, abs=3 * error)


def test_it_says_what_was_attacked():
    given, drawn = attack(Recipe(), strangers(60)), attack(Recipe(), NOBODY)
    assert (given.of_what_is_sent, given.samples, given.others) == (True, 33, 60)
    # Three quarters of 33, and the rest.
    assert (drawn.of_what_is_sent, drawn.samples, drawn.others) == (False, 25, 8)


def test_few_held_out_samples_join_those_that_are_dealt_out():
    """33 and 5: too few to try by themselves, so 29 of 38 make spaces."""
    found = attack(Recipe(), strangers(5))
    assert (found.of_what_is_sent, found.samples, found.others) == (False, 29, 9)


def test_too_few_samples_are_not_tried():
    """Of 12 samples 9 would make a space, and 3 are no crowd to be told from."""
    few = node(small=12)
    assert attack(Recipe(rank="full", min_count=2), NOBODY, data=few) is None
    assert attack(Recipe(rank="full", min_count=2), strangers(20), data=few) is not None


def test_a_space_that_would_have_another_form_is_not_tried():
    """The default needs 3 sqrt(120 / 12) = 10 samples for a covariance, and has one for 33."""
    data = node()
    as_covariance, as_mean = (
        releases(Recipe(), 1, data.inputs, data.labels, 3, is_mean=each) for each in (False, True)
    )
    assert as_covariance(strangers(10)) is not None
    assert as_covariance(strangers(9)) is None
    assert as_mean(strangers(9)) is not None
    assert as_mean(strangers(33)) is None
    nothing = (np.zeros(120), np.eye(120))
    assert own_membership(data.of(1), NOBODY, nothing, as_mean) is None


def test_the_same_seed_gives_the_same_digits():
    assert attack(Recipe(), NOBODY, seed=3) == attack(Recipe(), NOBODY, seed=3)
