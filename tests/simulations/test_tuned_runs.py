"""Fine-tuned baselines as ordinary runs on the digits."""

import pytest
from rich.console import Console

from simulations.config import ConfigError, compose_config
from simulations.run import run


def finish(folder, *overrides):
    config = compose_config(["progress=false", "train.epochs=4", *overrides])
    return run(config, folder, Console(quiet=True))


@pytest.mark.parametrize("strategy", ["local", "one_shot_average"])
def test_public_data_helps_those_who_know_two_labels_of_ten(tmp_path, strategy):
    options = [f"strategy={strategy}", "model=mlp", "strategy.tune_rate=0.01"]
    plain = finish(tmp_path / "plain", *options)
    tuned = finish(tmp_path / "tuned", *options, "strategy.tune=200")
    assert tuned["accuracy"] > plain["accuracy"] + 0.1
    assert tuned["details"]["tuned_on"] == 200
    assert tuned["bytes_up"] == plain["bytes_up"]


def test_a_model_of_the_public_sample_alone_costs_no_bytes(tmp_path):
    result = finish(tmp_path, "strategy=public_only", "strategy.tune_rate=0.01")
    assert result["bytes_up"] == result["bytes_down"] == result["messages"] == 0
    assert result["details"]["tuned_on"] == 200
    assert result["accuracy"] > 0.5


@pytest.mark.parametrize("strategy", ["local", "one_shot_average", "public_only", "gems"])
def test_more_samples_than_there_are_is_the_configs_fault(tmp_path, strategy):
    with pytest.raises(ConfigError, match=f"strategy={strategy}: tune=300 needs .* are 200"):
        finish(tmp_path, f"strategy={strategy}", "strategy.tune=300")
