"""`strategy.refine` as an ordinary run, on real data."""

import os

import pytest
from rich.console import Console

from simulations.config import compose_config
from simulations.run import run

needs_data = [
    pytest.mark.deep,
    pytest.mark.skipif(
        "GEMS_FLWR_DATA" not in os.environ, reason="GEMS_FLWR_DATA names no folder with data sets"
    ),
]


def refined(tmp_path, *overrides):
    given = ["strategy=gems", "strategy.refine.rounds=3", "progress=false", *overrides]
    return run(compose_config(given), tmp_path, Console(quiet=True))


def losses_of(result):
    return [each["loss"] for each in result["details"]["refinement"]]


def test_a_run_on_the_digits_is_refined_and_says_so(tmp_path):
    one = refined(tmp_path / "one", "strategy.refine.rounds=0")
    result = refined(tmp_path / "four", "strategy.verify=true")
    losses = losses_of(result)
    assert result["rounds"] == 4
    assert losses == sorted(losses, reverse=True)
    assert result["details"]["loss"] == losses[-1]
    assert 0 <= result["details"]["loss_bound"] <= losses[-1] * (1 + 1e-6)
    assert len(result["details"]["node_scores"]) == 5
    assert result["loss"] < one["loss"]


REAL = ["mnist", "fashion_mnist", "cifar10_features", "ham10000_features", "tweets"]


@pytest.mark.parametrize("dataset", [pytest.param(name, marks=needs_data) for name in REAL])
@pytest.mark.parametrize("weights", ["counts", "balanced"])
def test_the_loss_never_rises(tmp_path, dataset, weights):
    result = refined(
        tmp_path,
        f"dataset={dataset}",
        "strategy.space.rank=10",
        f"strategy.class_weight={weights}",
        "strategy.refine.rounds=5",
    )
    losses = losses_of(result)
    assert losses == sorted(losses, reverse=True)
    assert all(each["taken"] for each in result["details"]["refinement"])
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize(
    ("overrides", "accuracy", "bytes_per_node"),
    [
        pytest.param(
            ("dataset=mnist", "strategy.space.rank=20", "strategy.refine.ridge=0.0003"),
            0.921,
            60_000,
            marks=needs_data,
            id="mnist",
        ),
        pytest.param(
            (
                "dataset=cifar10_features",
                "strategy.space.rank=56",
                "strategy.refine.rounds=5",
                "strategy.refine.ridge=0.001",
            ),
            0.641,
            60_000,
            marks=needs_data,
            id="cifar10_features",
        ),
    ],
)
def test_a_few_rounds_come_close_to_the_converged_pooled_model(
    tmp_path, overrides, accuracy, bytes_per_node
):
    """Converged on pooled data: .926 on MNIST's pixels, .645 to .649 on CIFAR-10's features."""
    result = refined(tmp_path, *overrides)
    assert result["accuracy"] > accuracy
    assert result["bytes_up"] / 5 < bytes_per_node
