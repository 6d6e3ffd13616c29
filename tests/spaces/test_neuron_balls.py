"""The stacked balls of a layer check themselves and survive the trip."""

import numpy as np
import pytest

from gems_flwr.errors import SpaceError
from gems_flwr.spaces.neuron_balls import NeuronBalls


def some_balls(**changes):
    values = {
        "centers": np.arange(12.0).reshape(3, 4),
        "radii": np.array([0.1, 0.0, 2.5]),
        "importance": np.array([1.0, 0.0, 3.0]),
        "method": "worst",
        "epsilon": 0.01,
        "directions": 7,
        "outgoing": 1,
    }
    return NeuronBalls(**(values | changes))


def test_one_array_and_a_few_numbers_hold_everything():
    balls = some_balls()
    array, meta = balls.to_array(), balls.to_meta()
    assert array.shape == (3, 6)
    assert array.dtype == np.float32
    back = NeuronBalls.from_array(array, meta)
    for name in ("centers", "radii", "importance"):
        np.testing.assert_array_equal(getattr(back, name), getattr(balls, name))
    assert back.to_meta() == meta
    assert (len(back), back.dimension) == (3, 4)


def test_radii_are_rounded_down():
    """0.1 is not a float32; the nearest one is above it, and a proof must not grow."""
    radii = np.concatenate([[0.1, 0.3, 0.5], np.random.default_rng(0).uniform(0, 10, 500)])
    balls = NeuronBalls(np.zeros((len(radii), 2)), radii, "certified")
    assert np.float64(np.float32(0.1)) > 0.1
    assert np.all(balls.radii.astype(np.float64) <= radii)
    assert np.all(np.nextafter(balls.radii, np.float32(np.inf)).astype(np.float64) > radii)
    assert balls.radii[2] == 0.5


def test_importance_is_one_if_left_out():
    assert some_balls(importance=None).importance.tolist() == [1.0, 1.0, 1.0]


def test_a_point_is_in_a_neurons_own_ball_only():
    balls = some_balls()
    assert balls.contains(0, [0.1, 1, 2, 3])
    assert not balls.contains(0, [0.11, 1, 2, 3])
    assert not balls.contains(1, [0.1, 1, 2, 3])
    assert balls.contains(2, [8, 9, 10, 13.5])


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        ({"radii": np.array([0.1, np.nan, 1])}, "radii"),
        ({"radii": np.array([0.1, -1e-3, 1])}, "radii"),
        ({"radii": np.ones(2)}, "radii"),
        ({"centers": np.full((3, 4), np.inf)}, "centers"),
        ({"centers": np.zeros(3)}, "centers"),
        ({"importance": np.array([1.0, -1, 1])}, "importance"),
        ({"importance": np.ones(4)}, "importance"),
        ({"method": "guess"}, "method"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"directions": -1}, "directions"),
        ({"outgoing": 4}, "outgoing"),
    ],
)
def test_what_is_malformed_is_named(changes, blamed):
    with pytest.raises(SpaceError) as error:
        some_balls(**changes)
    assert error.value.key == blamed


def test_an_array_without_room_for_radius_and_importance_is_refused():
    meta = some_balls().to_meta()
    for array in (np.zeros(5), np.zeros((2, 2))):
        with pytest.raises(SpaceError, match="neurons"):
            NeuronBalls.from_array(array, meta)
    with pytest.raises(SpaceError, match="epsilon"):
        NeuronBalls.from_array(np.zeros((2, 5)), {"method": "worst"})
