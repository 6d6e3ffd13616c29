"""Where a car is on a road, how it is led back, and when it is on a sideline."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gems_flwr.errors import OptionError
from simulations.driving.expert import FULL_LOCK_RADIANS, CarState, hold_speed, pursue
from simulations.driving.path_picture import sidelines
from simulations.driving.road import Place, Road, progress_m
from simulations.driving.sidelines import (
    first_lasting,
    is_off_road,
    road_times,
    touch_begins,
    touches_sideline,
)

# A square of 10 metres, driven counterclockwise: along x, then y.
SQUARE = Road(np.array([(0.0, 0.0), (10.0, 0.0), (10.0, 10.0), (0.0, 10.0)]), 2.0)


def test_a_lap_is_as_long_as_the_closed_line():
    assert SQUARE.length_m == 40


def test_what_is_right_of_the_direction_of_travel_has_a_positive_offset():
    """Travelling along x, right is towards negative y; the other way round it is left."""
    assert SQUARE.locate((4.0, -1.5)) == Place(4.0, 1.5)
    assert SQUARE.locate((4.0, 1.5)) == Place(4.0, -1.5)
    # From the same first point backwards: down the last side first, so 4 metres are 36.
    back = SQUARE.reversed().locate((4.0, -1.5))
    assert (back.along_m, back.offset_m) == (36.0, -1.5)


def test_the_line_is_closed_between_its_last_point_and_its_first():
    assert SQUARE.locate((-1.0, 4.0)) == Place(36.0, 1.0)
    np.testing.assert_allclose(SQUARE.point_at(36.0), (0.0, 4.0))
    np.testing.assert_allclose(SQUARE.point_at(36.0 + 3 * 40.0), (0.0, 4.0))


@given(st.floats(0, 40, exclude_max=True))
def test_a_point_of_the_line_is_located_where_it_was_taken_from(along):
    place = SQUARE.locate(SQUARE.point_at(along))
    assert abs(progress_m(place.along_m, along, SQUARE.length_m)) < 1e-9
    assert abs(place.offset_m) < 1e-9


def test_another_stretch_close_by_is_no_progress():
    """(5, 6) is nearer to the far side (25 metres along) than to the near one, where we were."""
    assert SQUARE.locate((5.0, 6.0)).along_m == 25
    assert SQUARE.locate((5.0, 6.0), near_m=4.0, reach_m=3.0) == Place(5.0, -6.0)
    assert SQUARE.distances([(5.0, 6.0), (5.0, -3.0)]).tolist() == [4.0, 3.0]


@pytest.mark.parametrize(("before", "now", "came"), [(39, 1, 2), (1, 39, -2), (3, 5, 2)])
def test_progress_goes_over_the_start(before, now, came):
    assert progress_m(before, now, 40) == came


@pytest.mark.parametrize(("points", "half"), [([(0, 0), (1, 1)], 1.0), (np.zeros((4, 3)), 1.0)])
def test_what_is_no_road_is_refused(points, half):
    with pytest.raises(OptionError, match="points"):
        Road(np.array(points), half)
    with pytest.raises(OptionError, match="half_width_m"):
        Road(SQUARE.points, 0.0)


def test_both_sidelines_are_half_a_width_away():
    circle = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    road = Road(50 * np.stack([np.cos(circle), np.sin(circle)], axis=1), 4.0)
    left, right = sidelines(road)
    # Counterclockwise: the inner one is to the left.
    np.testing.assert_allclose(np.hypot(*left.T), 46, atol=1e-9)
    np.testing.assert_allclose(np.hypot(*right.T), 54, atol=1e-9)


def car(x, y, heading=0.0):
    return CarState(np.array([x, y]), heading, 20.0, np.zeros((4, 2)))


LONG = Road(np.array([(0.0, 0.0), (0.0, 500.0), (200.0, 500.0), (200.0, 0.0)]), 6.0)


def test_on_the_line_of_a_straight_road_the_controller_does_not_steer():
    """A heading of 0 is along y, as in the simulator."""
    assert pursue(car(0, 100), LONG, Place(100, 0)) == 0


def test_the_controller_steers_back_to_the_line_from_either_side():
    right, left = (pursue(car(x, 100), LONG, Place(100, x)) for x in (2.0, -2.0))
    assert right < 0 < left
    assert right == -left


def test_the_steering_is_that_of_the_circle_through_the_point_ahead():
    """From the rear axle 1.64 m behind, a point 9 m ahead of the middle and 2 m aside.

    The circle that touches the car's axis and goes through (a, s) has the curvature
    2 s / (a² + s²) with a = 10.64, s = 2; a car with axles 3.24 m apart drives it at
    atan(3.24 · curvature).
    """
    curvature = 2 * 2 / (10.64**2 + 2**2)
    expected = math.atan(3.24 * curvature) / FULL_LOCK_RADIANS
    assert pursue(car(-2, 100), LONG, Place(100, -2), look_ahead_m=9) == pytest.approx(expected)


def test_a_car_that_looks_back_turns_at_full_lock():
    assert pursue(car(1, 100, heading=math.pi), LONG, Place(100, 1)) == 1
    assert pursue(car(-1, 100, heading=math.pi), LONG, Place(100, -1)) == -1


def test_gas_is_given_below_the_speed_and_the_brake_used_well_above():
    assert hold_speed(0, 20) == (0.3, 0)
    assert hold_speed(20, 20) == (0, 0)
    gas, brake = hold_speed(25, 20)
    assert (gas, brake > 0) == (0, True)


def wheels(*outermost):
    """Four wheels: two at a distance, two that lie 2.2 metres (the car's track) further in."""
    return np.array([(d, d, d - 2.2, d - 2.2) for d in outermost])


def test_a_wheel_whose_tread_reaches_the_line_touches_it():
    """A tread is 0.28 metres to either side of a wheel's middle."""
    assert touches_sideline(wheels(5.0, 5.71, 5.73), 6.0).tolist() == [False, False, True]


def test_a_car_with_one_wheel_on_the_road_is_not_off_it():
    assert is_off_road(wheels(6.1, 8.1, 8.3), 6.0).tolist() == [False, False, True]


def test_every_beginning_of_a_touch_is_a_crossing():
    assert touch_begins([1, 1, 0, 0, 1, 0, 1, 1]).tolist() == [0, 4, 6]


def test_only_what_lasts_without_a_break_counts():
    assert first_lasting([0, 1, 1, 0, 1, 1, 1], 3) == 4
    assert first_lasting([1, 1, 0, 1, 1], 3) is None


def test_times_of_a_drive_that_leaves_the_road():
    """At 10 steps a second half a second is 5 steps.

    10 steps inside, 2 on the line, 8 inside, 3 on the line, 4 off (too short to have left), 3 on
    the line, 5 off: it leaves after 30 steps. Touches begin at steps 10 and 20, and last 2 and
    3 + 4 + 3 steps.
    """
    line, off = [6.0], [9.0]
    drive = [3.0] * 10 + line * 2 + [3.0] * 8 + line * 3 + off * 4 + line * 3 + off * 5 + [0.0] * 9
    times = road_times(wheels(*drive), 6.0, 10)
    assert times.left_at_step == 30
    assert times.on_road_seconds == 3.0
    assert times.crossings == 2
    assert times.on_line_seconds == 1.2


def test_a_drive_that_stays_on_the_road_counts_to_its_end():
    times = road_times(wheels(*[1.0] * 25), 6.0, 10)
    assert (times.on_road_seconds, times.crossings, times.left_at_step) == (2.5, 0, None)
