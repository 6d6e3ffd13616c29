"""A space that the library does not know: its set, its request, its config, and nothing else.

Here an axis-aligned box: every weight may move by a width of its own, as far as a random choice of
its corners stays good enough.
"""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
from helpers_gems import CLASSES, FEATURES, accuracy, initial, linear_app
from rich.console import Console

from gems_flwr.errors import RoundFailedError, SpaceError
from gems_flwr.intersect.intersect import intersect
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.checks import check_array, check_keys
from gems_flwr.spaces.ellipsoid import EllipsoidSpace
from gems_flwr.spaces.radius import Radius
from gems_flwr.spaces.space_files import load_space, register_space
from gems_flwr.strategies.gems import Gems
from gems_flwr.wire.space_requests import SpaceRequest
from simulations.config import ConfigError, compose_config, variant_of
from simulations.run import run as run_experiment

# --- one file: the set --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class BoxSpace:
    """All layers of which no weight is farther than a width from the centre's."""

    kind: ClassVar[str] = "box"
    center: np.ndarray
    width: float

    def __post_init__(self):
        object.__setattr__(self, "center", check_array("center", self.center, (None,)))
        if not 0 < self.width < 1e3:
            raise SpaceError("width", "a number in (0, 1000)", self.width)

    @property
    def dimension(self):
        return self.center.size

    @property
    def size_bytes(self):
        return self.center.nbytes + 8

    def margin(self, w):
        beyond = np.abs(np.asarray(w, dtype=np.float64) - self.center) - self.width
        outside = float(np.linalg.norm(np.maximum(beyond, 0)))
        return -outside if outside else -float(beyond.max())

    def contains(self, w):
        return self.margin(w) >= -1e-6

    def outer(self):
        """The ellipsoid through the corners."""
        half = np.full(self.dimension, self.width * np.sqrt(self.dimension), dtype=np.float32)
        return EllipsoidSpace(self.center, half * np.float32(1.001), Radius(1.0, "certified", 0.5))

    def cuts(self, w):
        offset = w - self.center.astype(np.float64)
        normals, offsets = [], []
        for index in np.flatnonzero(np.abs(offset) > self.width):
            normal = np.zeros(w.size)
            normal[index] = np.sign(offset[index])
            normals.append(normal)
            offsets.append(normal[index] * float(self.center[index]) + self.width)
        return np.array(normals).reshape(-1, w.size), np.array(offsets)

    def to_arrays(self):
        return {"center": self.center}, {"kind": self.kind, "width": self.width}

    @classmethod
    def from_arrays(cls, arrays, meta):
        check_keys(arrays, ["center"], "a box")
        return cls(arrays["center"], meta["width"])


register_space(BoxSpace)

# --- another: the request -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Box(SpaceRequest):
    """A box around the node's trained layer, the largest of some widths."""

    kind: ClassVar[str] = "box"

    epsilon: float = 0.9
    corners: int = 20

    def build(self, node):
        data = LayerData(node.weight, node.bias, node.samples.inputs, node.samples.labels)
        rng, center = np.random.default_rng(node.seed), data.center
        signs = rng.choice([-1.0, 1.0], size=(self.corners, center.size))
        for width in np.geomspace(10, 0.001, 40):
            if min(self._quality(data, center + width * sign) for sign in signs) >= self.epsilon:
                return BoxSpace(center, float(width))
        raise SpaceError("epsilon", f"at most what the model reaches, {self.epsilon}", "no box")

    def _quality(self, data, flat):
        weight, bias = np.split(flat, [data.weight.numel()])
        scores = data.inputs.numpy() @ weight.reshape(data.weight.shape).T + bias
        return float((scores.argmax(axis=1) == data.labels.numpy()).mean())


# --- and the config -----------------------------------------------------------------------------

CONFIG = f"""
_target_: {__name__}.Box
epsilon: 0.3 # what is good enough: an accuracy
corners: 20 # how many corners of the box have to be good enough
"""


def run(**options):
    return Gems(**options).start(InProcessGrid(linear_app(), 3), initial())


def test_a_space_of_one_s_own_goes_through_gems_from_end_to_end(tmp_path):
    result = run(space=Box(epsilon=0.3), verify=True, checkpoint_dir=tmp_path)
    assert result.details["space"] == "box"
    assert result.details["status"] == "feasible"
    assert set(result.details["node_scores"]) == {"0", "1", "2"}
    # The point that was found is in every box that was received.
    point = np.concatenate([result.arrays[k].numpy().reshape(-1) for k in ("weight", "bias")])
    boxes = [load_space(path) for path in sorted(tmp_path.glob("spaces/*"))]
    assert len(boxes) == 3
    for box, margin in zip(boxes, result.details["margins"].values(), strict=True):
        assert isinstance(box, BoxSpace)
        assert box.contains(point)
        assert box.margin(point) == pytest.approx(margin, abs=1e-5)
    assert point.size == CLASSES * (FEATURES + 1)
    assert accuracy(result.arrays) > 0.5


def test_boxes_that_do_not_meet_are_proved_not_to():
    far = np.zeros(4, dtype=np.float32)
    far[0] = 3.0
    boxes = [BoxSpace(np.zeros(4, dtype=np.float32), 1.0), BoxSpace(far, 1.0)]
    assert intersect(boxes).status == "empty"
    near = [boxes[0], BoxSpace(far / 2, 1.0)]
    found = intersect(near)
    assert found.status == "feasible"
    assert all(box.contains(found.point) for box in near)


def test_a_box_and_a_ball_meet_where_both_hold():
    """The ball's nearest point to the box is (2, 2, 0, 0): inside by 0.01 of its radius."""
    box = BoxSpace(np.zeros(4, dtype=np.float32), 2.0)
    center = np.array([3, 3, 0, 0], dtype=np.float32)
    for radius, status in ((1.43, "feasible"), (1.40, "empty")):
        ball = BallSpace(center, Radius(radius, "certified", 0.5))
        found = intersect([box, ball])
        assert found.status == status
        assert (box.contains(found.point) and ball.contains(found.point)) == (status == "feasible")


def test_a_demand_that_no_box_meets_is_a_named_failure():
    with pytest.raises(RoundFailedError, match="epsilon: expected at most what the model reaches"):
        run(space=Box(epsilon=1.01))


def test_its_options_are_checked_and_travel_as_those_of_any_space():
    request = Box(epsilon=0.7, corners=5)
    assert request.to_json() == '{"kind": "box", "epsilon": 0.7, "corners": 5}'
    assert SpaceRequest.from_json(request.to_json()) == request
    assert Gems(space="box").request() == Box()
    for options in ({"robust": True}, {"on_empty": "relax"}, {"epsilon": "auto"}):
        with pytest.raises(ValueError, match="needs"):
            Gems(space="box", **options)


def test_its_config_is_a_file_in_the_group_of_spaces(tmp_path):
    (tmp_path / "strategy" / "space").mkdir(parents=True)
    (tmp_path / "strategy" / "space" / "box.yaml").write_text(CONFIG)
    chosen = [f"hydra.searchpath=[file://{tmp_path}]", "strategy=gems", "strategy/space=box"]
    config = compose_config([*chosen, "strategy.space.corners=5", "train.epochs=2", "nodes=2"])
    assert variant_of(config) == "space=box epsilon=0.3 corners=5 train.epochs=2"
    run_experiment(config, tmp_path / "run", Console(quiet=True))
    boxes = [load_space(path) for path in sorted((tmp_path / "run").glob("spaces/*"))]
    assert [type(box) for box in boxes] == [BoxSpace, BoxSpace]
    with pytest.raises(ConfigError, match=r"there is no strategy\.space\.colour"):
        compose_config([*chosen, "+strategy.space.colour=red"])


def test_a_kind_has_one_set_and_one_request():
    @dataclasses.dataclass(frozen=True, eq=False)
    class OtherBox(BoxSpace):
        pass

    with pytest.raises(ValueError, match=r"kind 'box' is that of .*BoxSpace"):
        register_space(OtherBox)
    with pytest.raises(ValueError, match=r"kind 'box' is that of .*Box"):
        type("OtherBox", (SpaceRequest,), {"kind": "box"})
