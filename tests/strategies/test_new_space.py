"""A space that the library does not know: its set, its question, its config, and nothing else.

Here an axis-aligned box: every weight may move by a width of its own, as far as a random choice of
its corners stays good enough.
"""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
from helpers_gems import CLASSES, FEATURES, accuracy, initial, linear_app

from gems_flwr import Gems, InProcessGrid
from gems_flwr.core.question import Disclosure
from gems_flwr.errors import OptionError, SpaceError
from gems_flwr.networks import linear_layer
from gems_flwr.spaces import intersect, load_space, register_space
from gems_flwr.spaces.ball import EllipsoidSpace, LayerData, Radius
from gems_flwr.spaces.ball import accuracy as accuracy_of
from gems_flwr.spaces.convex import check_array, check_keys, check_number, take
from gems_flwr.spaces.question import SpaceQuestion


@dataclasses.dataclass(frozen=True, eq=False)
class BoxSpace:
    """All layers of which no weight is farther than a width from the centre's."""

    kind: ClassVar[str] = "example-box"
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
        return cls(arrays["center"], check_number("width", take(meta, "width", "a box"), 0, 1e3))


register_space(BoxSpace)


@dataclasses.dataclass(frozen=True)
class Box(SpaceQuestion):
    """A box around the node's trained layer, the largest of some widths."""

    kind: ClassVar[str] = "example-box"
    trains: ClassVar[bool] = True

    epsilon: float = 0.9
    corners: int = 20

    def discloses(self, node):
        return Disclosure("radius")

    def build(self, node):
        layer, samples = node.output_layer("validation"), node.inputs("validation")
        below = [key for key in node.model if key not in layer.keys]
        tensors = linear_layer(node.train(below), layer, node.device)
        data = LayerData(*tensors, samples.inputs, samples.labels)
        rng = np.random.default_rng(node.seed("space"))
        signs = rng.choice([-1.0, 1.0], size=(self.corners, data.dimension))
        center = np.concatenate([tensor.numpy().reshape(-1) for tensor in tensors])
        for width in np.geomspace(10, 0.001, 40):
            corners = (layer.replace_in(node.model, center + width * sign) for sign in signs)
            if min(self._quality(each, layer, samples) for each in corners) >= self.epsilon:
                return BoxSpace(center, float(width))
        raise SpaceError("epsilon", f"at most what the model reaches, {self.epsilon}", "no box")

    def check_fit(self, space):
        if not isinstance(space, BoxSpace):
            raise SpaceError("kind", self.kind, space.kind)
        self._check_shape((self.output_layer.dimension,), (space.dimension,))

    def _quality(self, arrays, layer, samples):
        data = LayerData(*linear_layer(arrays, layer), samples.inputs, samples.labels)
        return accuracy_of(*data.scores())


def run(**options):
    return Gems(**options).start(InProcessGrid(linear_app(), 3), initial())


def test_a_space_of_one_s_own_goes_through_gems_from_end_to_end(tmp_path):
    result = run(space=Box(epsilon=0.3), verify=True, checkpoint_dir=tmp_path)
    assert result.details["space"] == "example-box"
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


def test_its_options_are_checked_and_travel_as_those_of_any_space():
    question = Box(epsilon=0.7, corners=5)
    assert question.to_json() == '{"epsilon": 0.7, "corners": 5}'
    assert Box.from_records(question.to_json(), {}) == question
    assert Gems(space="example-box").space == Box()
    with pytest.raises(OptionError, match="robust needs spaces that can be held"):
        Gems(space="example-box", robust=True)


def test_a_kind_has_one_set_and_one_question():
    @dataclasses.dataclass(frozen=True, eq=False)
    class OtherBox(BoxSpace):
        pass

    with pytest.raises(ValueError, match=r"kind 'example-box' is that of .*BoxSpace"):
        register_space(OtherBox)
    with pytest.raises(ValueError, match=r"kind 'example-box' is that of .*Box"):
        type("OtherBox", (SpaceQuestion,), {"kind": "example-box"})
