"""Several models without messages: what a run with them gives, up to rounding."""

import json

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from simulations.config import ConfigError, compose_config
from simulations.run import run

QUIET = Console(quiet=True)
SMALL = [
    "experiment=multi_model_slides",
    "dataset=digits",
    "nodes=12",
    "rounds=4",
    "evaluate_every=2",
    "train.lr=0.1",
    "strategy.budget=5",
    "multi_model.tasks=[{name: a}, {name: b}]",
    "progress=false",
    "seed=4",
]
RULES = ["random", "full", "lvr", "gvr", "stale", "fedvarp", "mifa", "scaffold"]


def both(tmp_path, *words):
    """Run with and without messages; return folders and results."""
    found = []
    for backend in ("inprocess", "silent"):
        config = compose_config([*SMALL, *words, f"backend={backend}"])
        found.append((tmp_path / backend, run(config, tmp_path / backend, QUIET)))
    return found


def rounds(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("warm", ["false", "true"])
def test_a_silent_run_has_the_models_of_a_run_with_messages(tmp_path, rule, warm):
    """And everything of its rounds that the strategy tells, and its result's scores."""
    words = (f"strategy.sampling={rule}", f"strategy.warm_start={warm}")
    (loud, told), (silent, found) = both(tmp_path, *words)
    one, other = (load_file(folder / "model.safetensors") for folder in (loud, silent))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-5)
    for before, after in zip(rounds(loud), rounds(silent), strict=True):
        for name, value in after["train_metrics"].items():
            assert before["train_metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-6)
        for name, value in after["server_metrics"].items():
            assert before["server_metrics"][name] == pytest.approx(value, abs=0.005)
    assert told["details"]["sampled"] == found["details"]["sampled"]
    # Nearly all that travels are weights; a net for digits is small beside what is around it.
    for way in ("bytes_up", "bytes_down"):
        assert 0.5 < found[way] / told[way] < 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["train.batch_size=16"], "whole shares"),
        (["train.momentum=0.9"], "plain SGD"),
        (["model.dropout=0.5"], "dropout"),
        (["strategy.compress=int8"], "masked or packed"),
    ],
)
def test_what_needs_messages_or_draws_is_refused(tmp_path, words, why):
    config = compose_config([*SMALL, "strategy.sampling=random", *words, "backend=silent"])
    with pytest.raises(ConfigError, match=why):
        run(config, tmp_path, QUIET)


def test_other_strategies_are_refused(tmp_path):
    config = compose_config(["strategy=fedavg", "rounds=1", "progress=false", "backend=silent"])
    with pytest.raises(ConfigError, match="lockstep"):
        run(config, tmp_path, QUIET)


def test_a_finished_silent_run_is_read(tmp_path):
    config = compose_config([*SMALL, "strategy.sampling=random", "backend=silent"])
    first = run(config, tmp_path, QUIET)
    made = (tmp_path / "result.json").stat().st_mtime_ns
    assert run(config, tmp_path, QUIET) == first
    assert (tmp_path / "result.json").stat().st_mtime_ns == made
