"""The driving data set: tracks as groups, held-out ends, numbers for labels."""

import numpy as np
import pytest
from helpers_driving import SIDE, write_tracks

from gems_flwr import Numbers
from simulations.config import ConfigError, compose_config
from simulations.data import MissingDataError, driving
from simulations.data.driving_data import split_track
from simulations.data.examples import Dataset, Examples
from simulations.experiment.experiment import Experiment


def experiment(folder, *overrides):
    words = ["dataset=driving", "model=pilotnet_small", "strategy=periodic", f"data_dir={folder}"]
    return Experiment(compose_config([*words, *overrides]))


def test_labels_are_numbers_and_the_images_have_the_size_of_the_files(tmp_path):
    dataset = driving(data_dir=write_tracks(tmp_path), seed=0)
    assert dataset.target == Numbers()
    assert dataset.input_shape == (1, SIDE, SIDE)
    assert dataset.train.labels.dtype == np.float32
    assert len(dataset.public) == 0
    # 40 frames, 20 in each direction: two held out at the end, and a gap of (20 - 2) // 4 before.
    assert len(dataset.test) == 3 * 2 * 2
    assert len(dataset.train) == 3 * 2 * (20 - 2 - 4)


def test_what_is_held_out_is_the_end_of_each_direction_with_a_second_between():
    train, test = split_track(4800, 0.1)
    assert test.tolist() == [*range(2160, 2400), *range(4560, 4800)]
    assert train.tolist() == [*range(2135), *range(2400, 4535)]


def test_a_track_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match=r"lower dataset\.test_fraction"):
        split_track(4, 0.9)


def test_each_of_as_many_nodes_as_tracks_can_have_a_track(tmp_path):
    write_tracks(tmp_path)
    made = experiment(tmp_path, "partition=groups", "nodes=3")
    pool, groups = made.dataset.train, made.dataset.groups
    for node, share in enumerate(made.shares):
        held = {
            image.tobytes() for part in (share.train, share.validation) for image in part.features
        }
        assert held == {image.tobytes() for image in pool.features[groups == node]}


@pytest.mark.parametrize("partition", ["iid", "quantity", "shards"])
def test_partitions_that_need_no_classes_divide_numbers(partition, tmp_path):
    write_tracks(tmp_path)
    made = experiment(tmp_path, f"partition={partition}", "nodes=4")
    sizes = [len(share.train) + len(share.validation) for share in made.shares]
    assert sum(sizes) == len(made.dataset.train)
    assert min(sizes) > 0


@pytest.mark.parametrize("partition", ["labels", "dirichlet", "skew"])
def test_partitions_by_class_say_what_to_take_instead(partition, tmp_path):
    write_tracks(tmp_path)
    with pytest.raises(ConfigError, match="take partition=iid, quantity, shards or groups"):
        _ = experiment(tmp_path, f"partition={partition}").shares


def test_shards_of_numbers_are_sorted_by_size(tmp_path):
    """Two nodes with one shard each: everything of one is below everything of the other."""
    write_tracks(tmp_path)
    made = experiment(tmp_path, "partition=shards", "partition.shards_per_node=1", "nodes=2")
    one, other = sorted(([*s.train.labels, *s.validation.labels] for s in made.shares), key=min)
    assert max(one) <= min(other)


def test_a_public_sample_is_never_a_nodes_and_comes_from_every_track(tmp_path):
    dataset = driving(data_dir=write_tracks(tmp_path), seed=0, public=9)
    assert len(dataset.public) == 9
    assert len(dataset.train) == 3 * 28 - 9
    assert np.bincount(dataset.groups).tolist() == [25, 25, 25]


def test_missing_tracks_are_said_with_the_command_that_records_them(tmp_path):
    with pytest.raises(MissingDataError, match=r"python -m simulations\.driving record"):
        driving(data_dir=tmp_path, seed=0)
    write_tracks(tmp_path, tracks=2)
    with pytest.raises(MissingDataError, match=r"has 2 tracks; .* --tracks 5"):
        driving(data_dir=tmp_path, seed=0, tracks=5)
    assert len(driving(data_dir=tmp_path, seed=0, tracks=1).train) == 28


def test_files_are_read_once_and_again_when_they_have_changed(tmp_path, monkeypatch):
    write_tracks(tmp_path)
    first = driving(data_dir=tmp_path, seed=0)
    made = experiment(tmp_path, "partition=iid", "seed=0")
    made.build_model()
    assert driving(data_dir=tmp_path, seed=0) is not first  # another seed came between
    again = driving(data_dir=tmp_path, seed=0)
    assert driving(data_dir=tmp_path, seed=0) is again
    write_tracks(tmp_path, frames=60)
    assert len(driving(data_dir=tmp_path, seed=0).train) > len(again.train)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": np.zeros((4, 8, 8), np.uint8)}, "no array 'angles'"),
        ({"images": np.zeros((4, 8, 8)), "angles": np.zeros(4)}, "grey images"),
        ({"images": np.zeros((4, 8, 8), np.uint8), "angles": np.full(4, 2.0)}, "from -1 to 1"),
        ({"images": np.zeros((4, 8, 8), np.uint8), "angles": np.full(4, np.nan)}, "from -1 to 1"),
    ],
)
def test_a_file_that_holds_something_else_is_named(arrays, words, tmp_path):
    (tmp_path / "driving").mkdir()
    np.savez(tmp_path / "driving" / "track-000.npz", **arrays)
    with pytest.raises(ValueError, match=words) as caught:
        driving(data_dir=tmp_path, seed=0)
    assert "track-000.npz" in str(caught.value)


def test_classes_and_numbers_are_not_mixed_up():
    numbers = Examples(np.zeros((2, 3)), np.array([0.5, 1.5]))
    classes = Examples(np.zeros((2, 3)), np.array([0, 1]))
    with pytest.raises(ValueError, match="labels must be classes"):
        Dataset("made", 2, (3,), 1.0, numbers, numbers, numbers)
    with pytest.raises(ValueError, match="labels are finite numbers"):
        Dataset("made", 0, (3,), 1.0, classes, classes, classes)
    lost = Examples(np.zeros((2, 3)), np.array([0.5, np.nan]))
    with pytest.raises(ValueError, match="with 1 that are not finite"):
        Dataset("made", 0, (3,), 1.0, lost, lost, lost)
