"""Data are read once for runs that follow each other, and are those that each run would read."""

import numpy as np

from simulations.config import compose_config
from simulations.experiment.experiment import Experiment
from simulations.experiment.remembered import built_once, remember_training


def experiment(*words):
    return Experiment(
        compose_config(["experiment=gems2018_mnist", "dataset=digits_permuted", *words])
    )


def test_only_inside_the_memory_and_only_with_equal_settings():
    with remember_training():
        one, same = experiment(), experiment("strategy=local")
        assert one.dataset is same.dataset
        assert one.shares is same.shares
        for other in ("seed=1", "dataset.public=100"):
            assert experiment(other).dataset is not one.dataset
        for other in ("partition.mixing=0.5", "validation=0.2"):
            assert experiment(other).shares is not one.shares
    assert experiment().shares is not experiment().shares


def test_what_is_remembered_is_what_would_be_read():
    plain = experiment("partition.mixing=0.7").shares
    with remember_training():
        _ = experiment().shares
        found = experiment("partition.mixing=0.7").shares
    for ours, wanted in zip(found, plain, strict=True):
        np.testing.assert_array_equal(ours.train.features, wanted.train.features)
        np.testing.assert_array_equal(ours.validation.labels, wanted.validation.labels)


def test_only_the_last_few_are_kept():
    with remember_training():
        kept = [built_once(f"key {i}", list) for i in range(3)]
        assert built_once("key 2", list) is kept[2]
        assert built_once("key 0", list) is not kept[0]
