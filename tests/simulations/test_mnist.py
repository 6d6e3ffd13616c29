"""The baselines of the GEMS paper on real MNIST, 5 nodes by label, logistic model.

Guha & Smith 2019, Table 5: global .926 ± .001, local .198 ± .010, averaged .444 ± .028.
"""

import os

import pytest
from rich.console import Console

from simulations.config import compose_config
from simulations.run import run

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(
        "GEMS_FLWR_DATA" not in os.environ, reason="GEMS_FLWR_DATA names no folder with MNIST"
    ),
]


@pytest.mark.parametrize(
    ("strategy", "low", "high"),
    [("global", 0.920, 0.935), ("local", 0.188, 0.208), ("one_shot_average", 0.38, 0.50)],
)
def test_the_baselines_are_those_of_the_paper(tmp_path, strategy, low, high):
    """Ten epochs instead of forty: quicker, and the figures hardly differ."""
    overrides = ["dataset=mnist", f"strategy={strategy}", "train.epochs=10", "progress=false"]
    result = run(compose_config(overrides), tmp_path, Console(quiet=True))
    assert low <= result["accuracy"] <= high


@pytest.mark.parametrize(
    ("options", "accuracy", "bytes_per_node"),
    [([], 0.910, 2.48e6), (["strategy.space.rank=20"], 0.907, 36_000)],
    ids=["full", "rank 20"],
)
def test_one_round_of_cones_comes_close_to_the_pooled_model(
    tmp_path, options, accuracy, bytes_per_node
):
    overrides = ["dataset=mnist", "strategy=gems", "progress=false", *options]
    result = run(compose_config(overrides), tmp_path, Console(quiet=True))
    assert result["rounds"] == 1
    assert result["accuracy"] >= accuracy
    assert result["bytes_up"] / 5 <= bytes_per_node
    assert result["details"]["status"] == "feasible"


def test_the_papers_balls_give_the_plain_average_and_say_so(tmp_path):
    """ε = 0.4 as in the paper; fewer epochs and directions than there, for time."""
    overrides = [
        "dataset=mnist",
        "strategy=gems",
        "strategy/space=ball",
        "strategy.space.directions=100",
        "train.epochs=5",
        "progress=false",
    ]
    result = run(compose_config(overrides), tmp_path, Console(quiet=True))
    assert result["details"]["is_average"]
    assert 0.3 < result["accuracy"] < 0.6
