"""How a space was made can be told from its form, and tried."""

import numpy as np
import pytest
from helpers_leaks import node

from gems_flwr.leaks.recipes import Recipe, class_moments, recipe_of, releases, tried_recipe
from gems_flwr.moments.private_release import PrivateRelease
from gems_flwr.moments.small_means import MeanRule

RECIPES = [
    Recipe(),
    Recipe(int8=False),
    Recipe(rank="full"),
    Recipe(rank="full", min_count=33),
    Recipe(rank=7),
    Recipe(rank=7, int8=False),
    Recipe("means", int8=False),
    Recipe("means", int8=True),
    Recipe("means", int8=False, mean_rule=MeanRule(exact=True)),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_space_is_made_again_to_the_last_bit(recipe):
    data = node()
    cone = recipe.build(data.inputs, data.labels, 3)
    found, is_same = tried_recipe(cone, data.inputs, data.labels)
    assert is_same
    assert (found.kind, found.rank) == (recipe.kind, recipe.rank)


@pytest.mark.parametrize("small", [9, 14])
def test_so_are_small_classes_that_go_as_means(small):
    data = node(small=small)
    for recipe in (Recipe(), Recipe(rank="full", mean_rule=MeanRule(exact=True))):
        cone = recipe.build(data.inputs, data.labels, 3)
        assert tried_recipe(cone, data.inputs, data.labels)[1]


def test_other_data_do_not_make_the_space():
    data, other = node(), node(seed=1)
    cone = Recipe().build(data.inputs, data.labels, 3)
    assert not tried_recipe(cone, other.inputs, other.labels)[1]


def test_noise_is_known_by_its_promise():
    data = node()
    private = PrivateRelease(3.0, 1e-5, 6.0)
    cone = Recipe(rank="full", private=private).build(data.inputs, data.labels, 3)
    found = recipe_of(cone, clip=6.0)
    assert found.private == private
    assert not tried_recipe(cone, data.inputs, data.labels)[1]


def test_moments_of_clusters_add_up_to_those_of_the_class():
    data = node()
    whole = Recipe(rank="full").build(data.inputs, data.labels, 3)
    parts = Recipe(rank="full", pieces=3, min_count=2).build(data.inputs, data.labels, 3)
    assert len(parts.labels) > 3
    for one, other in zip(class_moments(whole, 0), class_moments(parts, 0), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert class_moments(whole, 7) is None


def test_a_release_of_the_same_samples_is_what_was_sent():
    data = node()
    for recipe in (Recipe(), Recipe(rank="full"), Recipe(rank=7)):
        cone = recipe.build(data.inputs, data.labels, 3)
        release = releases(recipe, 1, data.inputs, data.labels, 3, is_mean=False)
        for made, sent in zip(release(data.of(1)), class_moments(cone, 1), strict=True):
            assert np.array_equal(made, sent)


def test_how_a_server_asks_for_it():
    private = PrivateRelease(3.0, 1e-5, 1.0)
    assert str(Recipe()) == "Cone(rank='auto')"
    assert str(Recipe(rank=5, int8=False, pieces=2)) == "Cone(rank=5, clusters=2, int8=False)"
    assert str(Recipe(rank="full", private=private)) == "Cone(dp_epsilon=3)"
    assert str(Recipe("means", pieces=4)) == "Means(groups=4)"
