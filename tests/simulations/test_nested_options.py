"""Options of GEMS nest, in Python and on the command line; runs are found under their old names."""

import dataclasses
import inspect

import pytest
from hydra.errors import HydraException

from gems_flwr.server.settings import LoopSettings
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.wire.requests import Neurons
from gems_flwr.wire.space_requests import Ball, Cone, Ellipsoid, Means
from simulations.config import ConfigError, compose_config, explain, variant_of
from simulations.experiment.experiment import Experiment
from simulations.flat_options import flat_strategy

BALL = ["strategy=gems", "strategy/space=ball"]
LAYERS = ["strategy=gems_layerwise", "model=mlp"]


def strategy_of(*overrides, simulated=True):
    experiment = Experiment(compose_config([*overrides, "progress=false"]))
    return experiment.strategy(None, [], simulated=simulated)


# --- the command line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "space"),
    [
        (["strategy=gems"], Cone()),
        (
            ["strategy=gems", "strategy.space.rank=20", "strategy.space.clusters=8"],
            Cone(rank=20, clusters=8),
        ),
        (["strategy=gems", "strategy.space.dp_classes=[0,2]"], Cone(dp_classes=(0, 2))),
        (BALL, Ball()),
        ([*BALL, "strategy.space.radius=worst"], Ball(radius="worst")),
        (
            ["strategy=gems", "strategy/space=ellipsoid", "strategy.space.floor=0.3"],
            Ellipsoid(floor=0.3),
        ),
    ],
)
def test_a_space_and_its_options_are_chosen_by_overrides(overrides, space):
    assert strategy_of(*overrides, simulated=False).request() == space
    # In a simulation noise comes from the run's seed, whatever the space.
    seeded = dataclasses.replace(space, dp_seeded=True)
    assert strategy_of(*overrides).request() == seeded


def test_a_head_and_its_options_are_chosen_by_overrides():
    strategy = strategy_of(*LAYERS)
    assert strategy.head.asked_space == Cone()
    assert strategy.neurons == Neurons()
    strategy = strategy_of(
        *LAYERS,
        "strategy/head=ball",
        "strategy.head.on_empty=fail",
        "strategy.neurons.epsilon=[0.4]",
    )
    assert strategy.head.asked_space == Ball(epsilon=0.7)
    assert strategy.head.on_empty == "fail"
    assert strategy.neurons == Neurons(epsilon=(0.4,))


def test_files_say_what_the_classes_do():
    """Every option of a space stands in its file, at its default, but for what `Gems` sets."""
    for kind in (Cone, Ball, Ellipsoid, Means):
        chosen = compose_config(["strategy=gems", f"strategy/space={kind.kind}"]).strategy["space"]
        options = {key: value for key, value in chosen.items() if key != "_target_"}
        assert kind(**options) == kind()
        unset = {f.name for f in dataclasses.fields(kind)} - options.keys()
        assert unset <= {"curve", "dp_seeded"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy=gems", "strategy.rank=20"], "write strategy.space.rank=20"),
        ([*BALL, "strategy.radius=worst"], "write strategy.space.radius=worst"),
        ([*LAYERS, "strategy.radius=worst"], "write strategy.neurons.radius=worst"),
        ([*LAYERS, "strategy.epsilon_hidden=1"], "write strategy.neurons.epsilon=1"),
        ([*LAYERS, "strategy.deviation=relative"], "write strategy.neurons.measure=relative"),
        ([*LAYERS, "strategy.output.rank=full"], "write strategy.head.space.rank=full"),
        ([*LAYERS, "strategy.output.ridge=0.1"], "write strategy.head.ridge=0.1"),
        (["strategy=gems", "strategy.space=ball"], "write strategy/space=ball"),
        ([*LAYERS, "strategy.head=ball"], "write strategy/head=ball"),
        ([*BALL, "strategy.epsilon=0.6"], "for all: strategy.space.epsilon=0.6"),
        ([*BALL, "strategy.space.rank=20"], "the keys are: epsilon, measure, radius, directions"),
        ([*BALL, "+strategy.space.rank=20"], "there is no strategy.space.rank; the options of"),
        ([*BALL, "strategy.space.directions=many"], "strategy.space.directions must be int"),
    ],
)
def test_an_option_in_its_old_place_is_refused_with_the_new_one(overrides, words):
    with pytest.raises((HydraException, ConfigError)) as error:
        compose_config(overrides)
    assert words in explain(error.value, overrides)


def test_a_value_out_of_range_is_the_config_s_fault():
    with pytest.raises(ConfigError, match="strategy=gems: rank must be 'auto', 'full' or a whole"):
        strategy_of("strategy=gems", "strategy.space.rank=0")


def test_a_head_is_a_word_for_one_round_and_a_group_for_a_network():
    assert strategy_of("strategy=gems", "strategy.head=lda", "strategy.prior=0.5").prior == 0.5
    changed = compose_config(["strategy=gems", "strategy.head=lda", "strategy.prior=uniform"])
    assert variant_of(changed) == "head=lda prior=uniform"
    inner = strategy_of(*LAYERS, "strategy.head.head=ridge").head
    assert inner.head == "ridge"


# --- names of runs ----------------------------------------------------------------------------

# What config files of commit 8e2c036 had.
OLD_GEMS = {
    "_target_": "gems_flwr.strategies.Gems",
    "space": "cone",
    "epsilon": None,
    "measure": "accuracy",
    "radius": "sampled",
    "directions": 500,
    "floor": 0.1,
    "rank": "auto",
    "clusters": 1,
    "int8": True,
    "min_count": None,
    "sums": False,
    "dp_epsilon": None,
    "dp_delta": 1e-5,
    "dp_clip": 1.0,
    "dp_classes": None,
    "dp_seeded": False,
    "select": None,
    "ridge": None,
    "class_weight": "counts",
    "on_empty": "least",
    "retrains": 3,
    "tune": 0,
    "tune_rate": 0.001,
    "verify": False,
    "robust": False,
    "audit": False,
    "max_examples": None,
    "min_nodes": 1,
}
OLD_OUTPUT = {
    "epsilon": None,
    "radius": "sampled",
    "directions": 500,
    "floor": 0.1,
    "rank": "auto",
    "clusters": 1,
    "int8": True,
    "min_count": None,
    "sums": False,
    "ridge": None,
    "class_weight": "counts",
    "select": None,
    "on_empty": "least",
    "robust": None,
}
OLD_LAYERS = {
    "_target_": "gems_flwr.strategies.LayerwiseGems",
    "merge": "kmeans",
    "clusters": 100,
    "epsilon_hidden": 0.02,
    "deviation": "absolute",
    "max_hidden": None,
    "budget": "drop",
    "radius": "sampled",
    "directions": 500,
    "outgoing": False,
    "max_rows": 20000,
    "head": "cone",
    "output": OLD_OUTPUT,
    "tune": 0,
    "tune_layers": "last",
    "tune_rate": 0.001,
    "verify": False,
    "robust": False,
    "min_nodes": 1,
}
CASES = [
    (["strategy=gems"], OLD_GEMS, ""),
    (
        ["strategy=gems", "strategy.space.rank=20", "strategy.verify=true"],
        OLD_GEMS | {"rank": 20, "verify": True},
        "rank=20 verify=True",
    ),
    (
        [*BALL, "strategy.space.epsilon=0.7", "strategy.space.radius=worst", "strategy.tune=5"],
        OLD_GEMS | {"space": "ball", "epsilon": 0.7, "radius": "worst", "tune": 5},
        "space=ball epsilon=0.7 radius=worst tune=5",
    ),
    (
        [*BALL, "strategy.epsilon=auto"],
        OLD_GEMS | {"space": "ball", "epsilon": "auto"},
        "space=ball epsilon=auto",
    ),
    (LAYERS, OLD_LAYERS, ""),
    (
        [*LAYERS, "strategy.head.space.rank=20", "strategy.head.ridge=0.1"],
        OLD_LAYERS | {"output": OLD_OUTPUT | {"rank": 20, "ridge": 0.1}},
        "output.rank=20 output.ridge=0.1",
    ),
    (
        [
            *LAYERS,
            "strategy/head=ball",
            "strategy.head.space.epsilon=0.3",
            "strategy.neurons.epsilon=1.0",
            "strategy.neurons.measure=relative",
            "strategy.clusters=20",
        ],
        OLD_LAYERS
        | {"clusters": 20, "epsilon_hidden": 1.0, "deviation": "relative", "head": "ball"}
        | {"output": OLD_OUTPUT | {"epsilon": 0.3}},
        "clusters=20 epsilon_hidden=1.0 deviation=relative head=ball output.epsilon=0.3",
    ),
]


@pytest.mark.parametrize(("overrides", "old", "label"), CASES)
def test_a_run_made_before_options_nested_has_the_same_name(overrides, old, label):
    config = compose_config(overrides)
    assert flat_strategy(config.strategy) == old
    before = dataclasses.replace(config, strategy=old)
    assert before.fingerprint() == config.fingerprint()
    assert variant_of(config) == variant_of(before) == label


def test_no_option_is_left_out_of_a_run_s_name():
    each = {"0": 0.3}
    names = set()
    for space in ({}, {"epsilon": 0.6}, {"epsilon": 0.6, "directions": 5}):
        config = compose_config([*BALL, "strategy.epsilon={0:0.3}"])
        nested = config.strategy["space"] | space
        changed = config.strategy | {"space": nested, "epsilon": each}
        names.add(dataclasses.replace(config, strategy=changed).fingerprint())
    config = compose_config([*LAYERS, "strategy.head.audit=true"])
    names |= {config.fingerprint(), compose_config(LAYERS).fingerprint()}
    config = compose_config([*LAYERS, "strategy.head.space.dp_epsilon=3"])
    assert variant_of(config) == "output.dp_epsilon=3"
    names |= {config.fingerprint()}
    assert len(names) == 6


# --- size of a constructor --------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Gems, LayerwiseGems])
def test_a_strategy_has_at_most_twenty_options_of_its_own_each_with_a_word(strategy):
    shared = {f.name for f in dataclasses.fields(LoopSettings)}
    own = [f.name for f in dataclasses.fields(strategy) if f.name not in shared]
    assert len(own) <= 20
    assert set(own) <= set(inspect.signature(strategy).parameters)
    documented = "".join(base.__doc__ or "" for base in strategy.__mro__)
    assert [name for name in own if f"    {name} :" not in documented] == []
