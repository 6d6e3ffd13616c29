"""Partitions: every division is disjoint, complete and repeatable, and each does what it says."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simulations.partitions import Dirichlet, Groups, Iid, LabelDivision, Quantity, Shards, Skew

ALL = [LabelDivision(), Dirichlet(alpha=0.5), Shards(2), Iid(), Quantity(1.0), Skew(rich_nodes=0.3)]


def named(partition):
    return type(partition).__name__


def balanced(count, classes):
    return np.random.default_rng(7).permutation(np.arange(count) % classes)


def held(labels, parts):
    return [set(labels[part].tolist()) for part in parts]


@pytest.mark.parametrize("partition", ALL, ids=named)
@settings(max_examples=15)
@given(
    classes=st.integers(2, 12),
    nodes=st.integers(1, 15),
    count=st.integers(60, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_division_is_disjoint_complete_sorted_nonempty_and_repeatable(
    partition, classes, nodes, count, seed
):
    labels = balanced(count, classes)
    try:
        parts = partition(labels, nodes=nodes, classes=classes, seed=seed)
    except ValueError as error:
        # Of few samples a draw may leave nothing for a node; few nodes cannot hold all labels.
        assume("no Dirichlet draw gave each" not in str(error))
        assume(not isinstance(partition, Skew))
        raise
    assert len(parts) == nodes
    assert all(len(part) > 0 for part in parts)
    assert all(np.all(np.diff(part) > 0) for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(count))
    again = partition(labels, nodes=nodes, classes=classes, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize(
    ("labels", "nodes", "message"),
    [
        ([], 1, "non-empty"),
        ([0.5, 1.0], 1, "whole numbers"),
        ([0, 1], 3, "nodes must be 1 … 2"),
        ([0, 2], 1, "labels must be 0 … 1"),
    ],
)
def test_impossible_input_is_refused_with_the_allowed_range(labels, nodes, message):
    for partition in ALL:
        with pytest.raises(ValueError, match=message):
            partition(np.asarray(labels), nodes=nodes, classes=2, seed=0)


def test_numbers_are_divided_by_partitions_that_need_no_classes():
    labels = np.random.default_rng(0).normal(size=90)
    for partition in ALL:
        if isinstance(partition, LabelDivision | Dirichlet | Skew):
            with pytest.raises(ValueError, match="take partition=iid, quantity, shards or groups"):
                partition(labels, nodes=3, classes=0, seed=0)
        else:
            parts = partition(labels, nodes=3, classes=0, seed=0)
            np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(90))
    # One shard each: everything of one node is below everything of the other.
    low, high = sorted(Shards(1)(labels, nodes=2, classes=0, seed=0), key=lambda p: labels[p].min())
    assert labels[low].max() <= labels[high].min()


@pytest.mark.parametrize(
    ("classes", "nodes", "expected"),
    [
        (10, 2, [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}]),
        (10, 5, [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}]),
        (7, 5, [{0, 5, 6}, {1, 5, 6}, {2, 5, 6}, {3, 5, 6}, {4, 5, 6}]),
        (10, 4, [{0, 1}, {2, 3, 4}, {5, 6}, {7, 8, 9}]),
        (3, 7, [{0}, {1}, {2}, {0}, {1}, {2}, {0}]),
    ],
)
def test_labels_are_divided_as_in_table_4_and_evenly_elsewhere(classes, nodes, expected):
    labels = balanced(700, classes)
    assert held(labels, LabelDivision()(labels, nodes=nodes, classes=classes, seed=0)) == expected


def test_an_explicit_division_shares_labels_named_twice():
    labels = np.repeat([0, 1, 2], [10, 7, 5])
    parts = LabelDivision([[0, 1], [1, 2]])(labels, nodes=2, classes=3, seed=0)
    counts = [np.bincount(labels[part], minlength=3).tolist() for part in parts]
    assert counts == [[10, 4, 0], [0, 3, 5]]


def test_quantities_follow_the_power_law_and_leave_every_node_an_example():
    """Shares 1, 1/2, 1/3 of 110 are 60, 30, 20."""
    parts = Quantity(skew=1.0)(balanced(110, 2), nodes=3, classes=2, seed=0)
    assert [len(part) for part in parts] == [60, 30, 20]
    parts = Quantity(skew=50.0)(balanced(100, 2), nodes=5, classes=2, seed=0)
    assert [len(part) for part in parts] == [96, 1, 1, 1, 1]


@pytest.mark.parametrize(("nodes", "mixing"), [(2, 0.75), (4, 0.25), (4, 0.4)])
def test_a_node_has_its_share_of_each_group(nodes, mixing):
    """Shares of n = 20,000 / nodes are within 4 standard deviations, at most 2 / sqrt(n).

    The node's own group is there with probability γ, each other one with (1 - γ) / (nodes - 1);
    with γ = 1 / nodes all are equal, which is a random division.
    """
    groups = np.arange(20_000) % nodes
    parts = Groups(mixing)(np.zeros(20_000, int), nodes=nodes, classes=1, seed=5, groups=groups)
    shares = np.stack([np.bincount(groups[part], minlength=nodes) for part in parts])
    expected = np.full((nodes, nodes), (1 - mixing) / (nodes - 1))
    np.fill_diagonal(expected, mixing)
    deviation = np.abs(shares / (20_000 / nodes) - expected).max()
    assert deviation < 2 / np.sqrt(20_000 / nodes)


def test_without_mixing_every_node_holds_its_own_group():
    groups, labels = np.asarray([2, 0, 1, 1, 0, 2]), np.zeros(6, int)
    parts = Groups()(labels, nodes=3, classes=1, seed=0, groups=groups)
    assert [part.tolist() for part in parts] == [[1, 4], [2, 3], [0, 5]]
    with pytest.raises(ValueError, match="has 3 groups: set nodes=3, got 2"):
        Groups()(labels, nodes=2, classes=1, seed=0, groups=groups)
    with pytest.raises(ValueError, match=r"no groups.*permuted"):
        Groups()(labels, nodes=2, classes=1, seed=0)


def test_a_tenth_of_the_nodes_hold_more_than_half_of_the_data_and_all_a_third_of_the_labels():
    """The slides: 30 % of the labels each, 10 % of the nodes have 52.6 % of the data."""
    labels = balanced(20_000, 10)
    parts = Skew()(labels, nodes=100, classes=10, seed=0)
    sizes = np.sort([len(part) for part in parts])[::-1]
    assert 0.5 < sizes[:10].sum() / 20_000 < 0.55
    assert {len(each) for each in held(labels, parts)} == {3}
    with pytest.raises(ValueError, match=r"raise partition\.label_share"):
        Skew(label_share=0.1)(labels, nodes=5, classes=10, seed=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dirichlet(alpha=float("nan")), "above 0"),
        (lambda: Dirichlet(min_examples=0), "at least 1"),
        (lambda: Shards(0), "at least 1"),
        (lambda: Shards(4)(balanced(10, 2), nodes=5, classes=2, seed=0), "at least 20 examples"),
        (lambda: Quantity(-1.0), "at least 0"),
        (lambda: Groups(1.1), r"partition\.mixing must be in \[0, 1\]"),
        (lambda: Skew(rich_data=1.0), r"partition\.rich_data must be in \(0, 1\)"),
        (
            lambda: Dirichlet(alpha=0.01)(balanced(40, 2), nodes=20, classes=2, seed=0),
            r"raise partition\.alpha",
        ),
        (
            lambda: LabelDivision()(np.arange(5), nodes=2, classes=10, seed=0),
            "node 1 of 2 gets no examples: use fewer nodes",
        ),
    ],
)
def test_options_and_divisions_that_cannot_be_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3])
def test_draws_are_those_of_flowers_partitioners(seed):
    """Flower's cut the table's rows as they come: given in our random order, shards by label."""
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, ShardPartitioner

    labels, order = balanced(120, 5), np.random.default_rng(seed).permutation(120)
    draws = int(np.random.SeedSequence(seed).generate_state(1)[0])
    options = {"partition_by": "label", "shuffle": False}
    by_label = order[np.argsort(labels[order], kind="stable")]
    dirichlet = {"alpha": 0.5, "min_partition_size": 2, "self_balancing": False, "seed": draws}
    shards = ShardPartitioner(6, num_shards_per_partition=2, seed=seed, **options)
    for ours, theirs, rows in (
        (Iid(), IidPartitioner(num_partitions=6), order),
        (Dirichlet(alpha=0.5), DirichletPartitioner(6, **dirichlet, **options), order),
        (Shards(2), shards, by_label),
    ):
        table = Dataset.from_dict({"label": labels[rows], "position": rows})
        theirs.dataset = table.with_format("numpy")
        expected = [np.sort(theirs.load_partition(n)["position"][:]) for n in range(6)]
        found = ours(labels, nodes=6, classes=5, seed=seed)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
