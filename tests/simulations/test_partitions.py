"""Partitions: every division is disjoint, complete and repeatable, and each does what it says."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from simulations.partitions.partitioners import (
    Dirichlet,
    Iid,
    LabelDivision,
    Partition,
    Quantity,
    Shards,
    _load,
    finished,
)

ROOT = Path(__file__).parents[2]
ALL: list[Partition] = [
    LabelDivision(),
    Dirichlet(alpha=0.5),
    Shards(2),
    Iid(),
    Quantity(1.0),
]


def balanced(count: int, classes: int) -> np.ndarray:
    return np.random.default_rng(7).permutation(np.arange(count) % classes)


def held(labels: np.ndarray, parts: list[np.ndarray]) -> list[set[int]]:
    return [set(labels[part].tolist()) for part in parts]


@pytest.mark.parametrize("partition", ALL, ids=lambda partition: type(partition).__name__)
@settings(max_examples=25, deadline=None)
@given(
    classes=st.integers(2, 12),
    nodes=st.integers(1, 15),
    count=st.integers(60, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_division_is_disjoint_complete_sorted_nonempty_and_repeatable(
    partition: Partition, classes: int, nodes: int, count: int, seed: int
) -> None:
    labels = balanced(count, classes)
    try:
        parts = partition(labels, nodes=nodes, classes=classes, seed=seed)
    except ValueError as error:
        # Of few samples a draw may leave nothing for a node, again and again.
        assume("no Dirichlet draw gave each" not in str(error))
        raise
    assert len(parts) == nodes
    assert all(len(part) > 0 for part in parts)
    assert all(np.all(np.diff(part) > 0) for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(count))
    again = partition(labels, nodes=nodes, classes=classes, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("partition", ALL[1:], ids=lambda partition: type(partition).__name__)
def test_another_seed_gives_another_division(partition: Partition) -> None:
    labels = balanced(500, 10)
    first, second = (partition(labels, nodes=5, classes=10, seed=seed) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@contextlib.contextmanager
def calls_of_python() -> Iterator[list[int]]:
    """Collect the calls of functions, Python's and built-in, that a block makes."""
    calls: list[int] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: calls.append(1) if "call" in event else None)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("partition", ALL, ids=lambda partition: type(partition).__name__)
def test_fifty_nodes_of_mnist_size_are_divided_quickly_and_quietly(
    partition: Partition, capfd: pytest.CaptureFixture[str]
) -> None:
    labels = balanced(55_000, 10)
    partition(labels[:100], nodes=2, classes=10, seed=0)  # imports are not what is timed
    capfd.readouterr()
    with warnings.catch_warnings(), calls_of_python() as calls:
        warnings.simplefilter("error")
        parts = partition(labels, nodes=50, classes=10, seed=0)
    # Quickly on any machine: some steps for each example, not some for each example and node.
    assert 0 < len(calls) < 40 * 55_000
    assert sum(map(len, parts)) == 55_000
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("labels", "nodes", "classes", "message"),
    [
        ([], 1, 2, "non-empty"),
        ([0.5, 1.0], 1, 2, "whole numbers"),
        ([0, 1], 3, 2, "nodes must be 1 … 2"),
        ([0, 1], 0, 2, "nodes must be 1 … 2"),
        ([0, 2], 1, 2, "labels must be 0 … 1"),
    ],
)
@pytest.mark.parametrize("partition", ALL, ids=lambda partition: type(partition).__name__)
def test_impossible_input_is_refused_with_the_allowed_range(
    partition: Partition, labels: list[int], nodes: int, classes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        partition(np.asarray(labels), nodes=nodes, classes=classes, seed=0)


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "nodes", "expected"),
    [
        (10, 2, [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}]),
        (10, 3, [{0, 1, 2}, {3, 4, 5}, {6, 7, 8, 9}]),
        (10, 5, [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}]),
        (7, 2, [{0, 1, 2, 3}, {4, 5, 6}]),
        (7, 3, [{0, 1}, {2, 3}, {4, 5, 6}]),
        (7, 5, [{0, 5, 6}, {1, 5, 6}, {2, 5, 6}, {3, 5, 6}, {4, 5, 6}]),
        (10, 4, [{0, 1}, {2, 3, 4}, {5, 6}, {7, 8, 9}]),
        (10, 10, [{k} for k in range(10)]),
        (3, 7, [{0}, {1}, {2}, {0}, {1}, {2}, {0}]),
    ],
)
def test_labels_are_divided_as_in_table_4_and_evenly_elsewhere(
    classes: int, nodes: int, expected: list[set[int]]
) -> None:
    labels = balanced(700, classes)
    assert held(labels, LabelDivision()(labels, nodes=nodes, classes=classes, seed=0)) == expected


def test_ham_on_five_nodes_spreads_the_two_last_labels_evenly() -> None:
    """Appendix B.2: labels 5 and 6 are divided uniformly; 100 examples make 20 per node."""
    labels = np.repeat(np.arange(7), 100)
    for part in LabelDivision()(labels, nodes=5, classes=7, seed=0):
        counts = np.bincount(labels[part], minlength=7)
        assert counts[5:].tolist() == [20, 20]
        assert sorted(counts[:5].tolist()) == [0, 0, 0, 0, 100]


def test_an_explicit_division_overrides_and_shares_labels_named_twice() -> None:
    labels = np.repeat([0, 1, 2], [10, 7, 5])
    parts = LabelDivision([[0, 1], [1, 2]])(labels, nodes=2, classes=3, seed=0)
    assert [np.bincount(labels[part], minlength=3).tolist() for part in parts] == [
        [10, 4, 0],
        [0, 3, 5],
    ]


@pytest.mark.parametrize(
    ("division", "message"),
    [
        ([[0, 1, 2]], "each of the 2 nodes, got 1"),
        ([[0], [1]], r"gives the labels \[2\] to no node"),
        ([[0, 1], [2, 3]], r"names the labels \[3\]"),
    ],
)
def test_a_division_that_does_not_fit_is_refused(division: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LabelDivision(division)(np.array([0, 1, 2]), nodes=2, classes=3, seed=0)


@pytest.mark.parametrize("division", [[[0], []], [[0, 0], [1]], [[-1], [0]]])
def test_a_malformed_division_is_refused_when_built(division: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"partition\.division: node \d must have"):
        LabelDivision(division)


def test_a_node_whose_labels_have_no_examples_is_named() -> None:
    with pytest.raises(ValueError, match="node 1 of 2 gets no examples: use fewer nodes"):
        LabelDivision()(np.array([0, 1, 2, 3, 4]), nodes=2, classes=10, seed=0)


# --- the others -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1238, 55_000])
def test_dirichlet_serves_fifty_nodes_at_a_tenth(count: int) -> None:
    labels = balanced(count, 10)
    parts = Dirichlet(alpha=0.1)(labels, nodes=50, classes=10, seed=0)
    assert min(map(len, parts)) >= 2


def test_dirichlet_concentrates_labels_when_alpha_is_small() -> None:
    """The share of a node's commonest label goes to 1 as alpha goes to 0, to 1/10 as it grows."""
    labels = balanced(10_000, 10)

    def purity(alpha: float) -> float:
        parts = Dirichlet(alpha)(labels, nodes=10, classes=10, seed=0)
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    assert purity(0.05) > 0.5
    assert purity(1000.0) < 0.15


def test_dirichlet_keeps_the_least_number_of_examples() -> None:
    labels = balanced(1000, 10)
    parts = Dirichlet(alpha=1.0, min_examples=30)(labels, nodes=10, classes=10, seed=0)
    assert min(map(len, parts)) >= 30


def test_dirichlet_says_what_to_change_when_no_draw_fits() -> None:
    with pytest.raises(ValueError, match=r"raise partition\.alpha"):
        Dirichlet(alpha=0.01)(balanced(40, 2), nodes=20, classes=2, seed=0)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(45, 120))
@settings(max_examples=25, deadline=None)
def test_shards_have_equal_sizes_and_nothing_is_left_over(
    nodes: int, shards_per_node: int, count: int
) -> None:
    """Shard sizes differ by at most one, so node sizes by at most one per shard."""
    labels = balanced(count, 5)
    parts = Shards(shards_per_node)(labels, nodes=nodes, classes=5, seed=0)
    sizes = [len(part) for part in parts]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= shards_per_node


def test_two_shards_hold_two_labels_when_shards_match_labels() -> None:
    """100 examples of 10 labels in 20 shards of 5: no shard has two labels."""
    labels = balanced(100, 10)
    parts = Shards(2)(labels, nodes=10, classes=10, seed=0)
    assert all(len(labels_held) <= 2 for labels_held in held(labels, parts))


def test_too_many_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="need at least 20 examples, got 10"):
        Shards(4)(balanced(10, 2), nodes=5, classes=2, seed=0)


def test_iid_nodes_have_equal_sizes_and_all_labels() -> None:
    labels = balanced(1003, 10)
    parts = Iid()(labels, nodes=5, classes=10, seed=0)
    assert sorted(map(len, parts)) == [200, 200, 201, 201, 201]
    assert held(labels, parts) == [set(range(10))] * 5


def test_quantities_follow_the_power_law() -> None:
    """Shares 1, 1/2, 1/3 of 110 are 60, 30, 20."""
    labels = balanced(110, 2)
    parts = Quantity(skew=1.0)(labels, nodes=3, classes=2, seed=0)
    assert [len(part) for part in parts] == [60, 30, 20]
    assert [len(p) for p in Quantity(skew=0.0)(labels, nodes=2, classes=2, seed=0)] == [55, 55]


def test_steep_quantities_still_leave_every_node_an_example() -> None:
    sizes = Quantity(skew=50.0).sizes(100, 5)
    assert sizes == [96, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dirichlet(alpha=0.0), "above 0"),
        (lambda: Dirichlet(alpha=float("nan")), "above 0"),
        (lambda: Dirichlet(min_examples=0), "at least 1"),
        (lambda: Shards(0), "at least 1"),
        (lambda: Quantity(-1.0), "at least 0"),
    ],
)
def test_options_out_of_range_are_refused_when_built(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf" / "partition").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_partition_config_instantiates_and_divides(path: Path) -> None:
    partition = instantiate(OmegaConf.load(path))
    more = {"groups": np.arange(200) % 5} if path.stem == "groups" else {}
    assert len(partition(balanced(200, 10), nodes=5, classes=10, seed=0, **more)) == 5


def test_a_division_can_be_given_in_the_config() -> None:
    config = OmegaConf.load(ROOT / "conf" / "partition" / "labels.yaml")
    config.division = [[0], [1, 2]]
    assert instantiate(config) == LabelDivision(((0,), (1, 2)))


def test_label_divisions_do_not_import_the_datasets_library() -> None:
    """It takes seconds to import, in every Ray worker."""
    code = (
        "import sys, numpy; from simulations.partitions.partitioners import LabelDivision;"
        "LabelDivision()(numpy.arange(10), nodes=5, classes=10, seed=0);"
        "sys.exit('datasets' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.parametrize(("count", "nodes"), [(103, 7), (60, 6), (11, 11)])
def test_iid_shares_are_those_of_flowers_partitioner(count: int, nodes: int) -> None:
    """Flower's own cuts the table into equal runs, of which the first have one row more."""
    from flwr_datasets.partitioner import IidPartitioner

    labels = balanced(count, 5)
    order = np.random.default_rng(3).permutation(count)
    theirs = finished(_load(IidPartitioner(num_partitions=nodes), order, labels, nodes))
    ours = Iid()(labels, nodes=nodes, classes=5, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
