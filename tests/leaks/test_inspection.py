"""A class of 33 samples with full moments is caught, and other data are refused."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers_leaks import node

from gems_flwr.errors import SpaceError
from gems_flwr.leaks.gradient_rows import row_samples
from gems_flwr.leaks.inspection import inspect_cone
from gems_flwr.leaks.made_of import LayerSamples, check_made_of
from gems_flwr.leaks.quick_look import quick_look
from gems_flwr.leaks.recipes import Recipe
from gems_flwr.leaks.what_if import own_layer, secure_sum, what_if
from gems_flwr.moments.class_sums import in_chunks, sum_classes
from gems_flwr.moments.loss_sums import loss_sums
from gems_flwr.moments.private_release import PrivateRelease
from gems_flwr.samples import Samples
from gems_flwr.scoring import accuracy

DATA, HELD_OUT = node(), node(seed=1, small=60, large=60)


def made(recipe=None, data=DATA):
    return (recipe or Recipe()).build(data.inputs, data.labels, 3)


def test_full_moments_of_33_samples_are_caught():
    found = inspect_cone(made(Recipe(rank="full")), DATA, HELD_OUT)
    finding = found.classes[1]
    assert finding.level == "given away"
    assert finding.reason.startswith("33 of 33 were rebuilt")
    assert finding.membership.auc.value > 0.99
    assert found.is_reproduced


def test_the_default_on_the_same_data_is_not_given_away_and_tells_less():
    full = inspect_cone(made(Recipe(rank="full")), DATA, HELD_OUT).classes[1]
    found = inspect_cone(made(), DATA, HELD_OUT)
    assert found.given_away == ()
    assert found.classes[1].rebuilt.rebuilt == 0
    assert found.classes[1].membership.auc.value < full.membership.auc.value - 0.1


def test_without_data_full_moments_of_33_samples_are_caught_as_well():
    found = inspect_cone(made(Recipe(rank="full")))
    assert "32 directions of 33 samples" in found.classes[1].reason
    assert (found.classes[1].membership, found.classes[1].rebuilt, found.recipe) == (None,) * 3


def test_a_fixed_rank_is_caught_by_telling_members():
    """20 directions of 33 samples rebuild none of these pictures, and tell who is there."""
    finding = inspect_cone(made(Recipe(rank=20)), DATA, HELD_OUT).classes[1]
    assert finding.exposure.exact is None
    assert not finding.rebuilt.is_attack
    assert "members are told" in finding.reason


def test_noise_is_no_alarm_and_bounds_the_attack():
    private = PrivateRelease(1.0, 1e-5, 6.0)
    cone = made(Recipe(rank="full", private=private, min_count=2))
    found = inspect_cone(cone, DATA, HELD_OUT)
    assert found.given_away == ()
    for finding in found.classes:
        error = 3 * finding.membership.auc.error
        assert finding.membership.auc.value < finding.exposure.mean_auc + error


def test_attacks_go_to_the_classes_that_show_most():
    found = inspect_cone(made(Recipe(rank="full")), DATA, most_classes=1)
    assert [each.membership is not None for each in found.classes] == [False, True, False]


def test_the_same_seed_finds_the_same():
    assert inspect_cone(made(), DATA, seed=4) == inspect_cone(made(), DATA, seed=4)


# --- other data ---------------------------------------------------------------------------------


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
@pytest.mark.parametrize("recipe", [Recipe(rank="full"), Recipe()], ids=str)
def test_data_that_a_space_was_not_made_of_are_refused_by_the_class(data, message, recipe):
    with pytest.raises(SpaceError, match=message):
        inspect_cone(made(recipe), data)


@pytest.mark.parametrize("small", [2, 5, 9, 14, 33])
def test_data_that_a_space_was_made_of_are_not_refused(small):
    """Classes that are withheld, shown in part, rounded or exact; pixels and other units."""
    data = node(small=small)
    units = 10.0 ** np.random.default_rng(0).integers(-3, 4, size=data.inputs.shape[1])
    for inputs in (data.inputs, data.inputs * units):
        own = dataclasses.replace(data, inputs=inputs)
        for recipe in (Recipe(), Recipe(rank="full"), Recipe(rank=5), Recipe("means", int8=False)):
            check_made_of(made(recipe, own), own)


# --- what other options would change --------------------------------------------------------------


@pytest.mark.slow
def test_other_options_are_tried_on_the_class_that_shows_most():
    cone = made(Recipe(rank="full"))
    found = inspect_cone(cone, DATA, HELD_OUT)
    outcomes = {each.option: each for each in what_if(cone, found, DATA, HELD_OUT)}
    assert next(iter(outcomes)) == "as it is"
    assert outcomes["as it is"].finding.level == "given away"
    assert found.worst.label == 1
    default = outcomes["Cone(rank='auto')"]
    assert default.finding.label == 1
    assert default.finding.level != "given away"
    assert default.size_bytes == made().size_bytes
    assert (
        outcomes["Cone(dp_epsilon=1)"].finding is None
        or outcomes["Cone(dp_epsilon=1)"].finding.level == "fine"
    )
    assert {"Cone(rank=20)", "Cone(rank=5)", "Means()", "min_count=34"} < outcomes.keys()
    weight, bias = own_layer(cone)
    predicted = np.argmax(HELD_OUT.inputs @ weight.T + bias, axis=1)
    assert outcomes["as it is"].accuracy == accuracy(predicted, HELD_OUT.labels)
    assert all(each.accuracy is None for each in what_if(cone, found, DATA))


def test_a_secure_sum_hides_samples_only_in_a_crowd():
    """330 samples of 120 features are not determined by their sums; 50 of 120 are."""
    assert "one of 330 samples" in secure_sum(made(), 33).note
    assert "still gives them away" in secure_sum(made(), 5).note


# --- in a moment ---------------------------------------------------------------------------------


def test_a_quick_look_catches_33_samples_and_lets_the_default_pass():
    assert quick_look(made(Recipe(rank="full")), DATA).classes[1].reason.startswith("33 of 33")
    assert quick_look(made(), DATA).given_away == ()


def test_a_quick_look_takes_sums_for_the_full_moments_that_they_are():
    table, labels = torch.from_numpy(DATA.inputs).float(), torch.from_numpy(DATA.labels)
    sums = sum_classes(in_chunks(table, labels), 3).over_all_classes(2)
    assert quick_look(sums, DATA).given_away[1].label == 1


def test_rows_of_a_gradient_have_the_samples_that_the_limits_count():
    """The smallest is `LossSums.fewest`, which the node's limits go by."""
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(3, 120)), rng.normal(size=3)
    samples = Samples(torch.from_numpy(DATA.inputs), torch.from_numpy(DATA.labels))
    layer = np.concatenate([weight, bias[:, None]], axis=1)
    sums = loss_sums(samples, layer, np.ones(120), np.ones(3))
    rows = row_samples(DATA.inputs, DATA.labels, weight, bias)
    assert rows.min() == pytest.approx(sums.fewest)
    assert rows.max() <= len(DATA.labels)
