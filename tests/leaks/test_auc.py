"""The area under the ROC curve, and its standard error."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from gems_flwr.errors import OptionError
from gems_flwr.leaks.auc import Trial, auc_of, placements

scores = st.lists(st.integers(-3, 3), min_size=1, max_size=30)


def trial(members, others):
    members, others = np.array(members, float), np.array(others, float)
    return Trial(members, others, np.arange(len(members)), np.arange(len(others)))


@settings(max_examples=200, deadline=None)
@given(scores, scores)
def test_the_area_is_scikit_learns_ties_included(members, others):
    truth = np.repeat([1, 0], [len(members), len(others)])
    expected = roc_auc_score(truth, np.concatenate([members, others]))
    assert auc_of([trial(members, others)]).value == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=20), scores.filter(lambda x: len(x) > 1))
def test_the_error_is_delongs(members, others):
    """By his double sums: the variances of V10 over members and of V01 over others."""
    kernel = np.array([[0.5 * ((a > b) + (a >= b)) for b in others] for a in members])
    expected = kernel.mean(axis=1).var(ddof=1) / len(members)
    expected += kernel.mean(axis=0).var(ddof=1) / len(others)
    assert auc_of([trial(members, others)]).error == pytest.approx(np.sqrt(expected))


def test_the_error_is_how_much_the_area_varies():
    """Over 2,000 draws of 20 and 30 normal scores the areas spread as the mean error says."""
    rng = np.random.default_rng(0)
    found = [auc_of([trial(rng.normal(0.5, 1, 20), rng.normal(0, 1, 30))]) for _ in range(2000)]
    spread = np.std([each.value for each in found])
    assert np.sqrt(np.mean([each.error**2 for each in found])) == pytest.approx(spread, rel=0.08)


def test_the_same_people_tried_again_make_the_area_no_surer():
    once = trial([3.0, 1.0, 0.0, 2.0], [1.5, 0.5, -1.0])
    assert auc_of([once] * 5) == auc_of([once])


def test_a_placement_is_the_share_below_with_ties_half():
    assert placements(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0, 0.0])).tolist() == [
        1 / 8,
        2 / 4,
        3.5 / 4,
    ]


def test_scores_of_one_side_alone_are_refused():
    with pytest.raises(OptionError, match="members and of others"):
        auc_of([trial([], [1.0])])
