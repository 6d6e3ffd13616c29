"""Spaces survive the way to a file and back; files that are not spaces are refused."""

import dataclasses
import json

import numpy as np
import pytest
from helpers_spaces import BALL, CURVED, FULL, LOW
from safetensors.numpy import save_file

from gems_flwr.errors import SpaceError
from gems_flwr.spaces import load_space, save_space, space_from_arrays

RNG = np.random.default_rng(0)
SPACES = {"ball": BALL, "ellipsoid": CURVED, "full": FULL}
SPACES["int8"] = dataclasses.replace(LOW, privacy=(1.0, 1e-5))


@pytest.mark.parametrize("name", SPACES)
def test_a_file_gives_back_the_same_space(name, tmp_path):
    space = SPACES[name]
    path = tmp_path / "space.safetensors"
    size = save_space(path, space)
    again = load_space(path)
    arrays, meta = space.to_arrays()
    arrays_again, meta_again = again.to_arrays()
    assert meta == meta_again
    assert arrays.keys() == arrays_again.keys()
    for key, value in arrays.items():
        np.testing.assert_array_equal(value, arrays_again[key])
        assert value.dtype == arrays_again[key].dtype
    w = RNG.normal(size=15)
    assert again.margin(w) == space.margin(w)
    assert space.size_bytes <= size + 16
    assert size <= space.size_bytes + 1200


@pytest.mark.parametrize("name", SPACES)
def test_missing_and_extra_arrays_are_refused(name):
    arrays, meta = SPACES[name].to_arrays()
    for key in arrays.keys() - {"curve"}:
        with pytest.raises(SpaceError):
            space_from_arrays({k: v for k, v in arrays.items() if k != key}, meta)
    with pytest.raises(SpaceError, match="extra"):
        space_from_arrays(arrays | {"surprise": np.zeros(1)}, meta)
    with pytest.raises(SpaceError, match="kind"):
        space_from_arrays(arrays, {k: v for k, v in meta.items() if k != "kind"})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ball", {"kind": "cube"}),
        ("ball", {"radius": {"value": -1.0, "method": "certified"}}),
        ("full", {"form": "round"}),
        ("full", {"num_classes": 2}),
        ("full", {"total_count": 94}),
        ("full", {"privacy": 3}),
    ],
)
def test_meta_that_does_not_fit_is_refused(name, change):
    arrays, meta = SPACES[name].to_arrays()
    with pytest.raises(SpaceError):
        space_from_arrays(arrays, meta | change)


def test_files_that_hold_no_space_are_refused_by_name(tmp_path):
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"not a tensor file at all")
    with pytest.raises(SpaceError, match="junk"):
        load_space(junk)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"center": np.zeros(3, np.float32)}, str(foreign))
    with pytest.raises(SpaceError, match=r"foreign\.safetensors: format"):
        load_space(foreign)
    for header in ({"version": "9"}, {"meta": "[]"}, {"meta": "{"}):
        meta = {"format": "gems-space", "version": "1", "meta": json.dumps({"kind": "ball"})}
        save_file({"center": np.zeros(3, np.float32)}, str(foreign), metadata=meta | header)
        with pytest.raises(SpaceError, match="foreign"):
            load_space(foreign)
