"""Every config composes and can be built; every mistake is refused with what is allowed."""

import dataclasses
import itertools

import pytest
import torch
from hydra.errors import HydraException

from gems_flwr import Ball, Cone, Ellipsoid, Means, Neurons, TargetReached
from simulations.config import (
    CONFIG_DIR,
    ConfigError,
    RunConfig,
    compose_config,
    explain,
    variant_of,
)
from simulations.data import DATA_VARIABLE, MissingDataError
from simulations.experiment.experiment import Experiment, experiment_of

FILES = sorted(path.relative_to(CONFIG_DIR) for path in CONFIG_DIR.rglob("*.yaml"))
BALL = ["strategy=gems", "strategy/space=ball"]
LAYERS = ["strategy=gems_layerwise", "model=mlp"]
# What a file needs beside itself, to be built on data that need no files.
BESIDE = {
    "strategy/gems_layerwise": ["model=mlp"],
    "strategy/head": LAYERS,
    "strategy/space": ["strategy=gems"],
    "strategy/space/means": ["strategy=gems", "strategy.head.name=lda"],
    "search": ["hydra.mode=RUN"],
    "partition/groups": ["dataset=permuted", "dataset.base=digits", "nodes=2"],
    "experiment/gems2018": ["dataset.base=digits"],
    "model/lenet": ["dataset=mnist"],
    "model/pilotnet": ["dataset=driving", "strategy=fedavg"],
    "model/pilotnet_small": ["dataset=driving"],
}


def options(group):
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def strategy_of(*overrides, simulated=True):
    return Experiment(compose_config(overrides)).strategy(None, [], simulated=simulated)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.with_suffix("")))
def test_every_file_composes_alone_and_can_be_built(path, monkeypatch):
    """Data sets that need files say which; everything else is instantiated."""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    group, name = str(path.parent), path.stem
    beside = BESIDE.get(f"{group}/{name}", BESIDE.get(group, []))
    config = compose_config([*beside, *([] if group == "." else [f"{group}={name}"])])
    assert group != "strategy" or variant_of(config) in ("", "model=mlp")
    assert RunConfig.from_json(config.to_json()) == config
    text = (CONFIG_DIR / path).read_text()
    assert "/work" not in text
    assert "/home" not in text
    experiment = experiment_of(config.to_json())
    if config.names["dataset"] != "own":
        try:
            _ = experiment.shares, experiment.build_model()
        except MissingDataError:
            return
        assert experiment.strategy(None, []).seed == 0
    assert config.run_name().endswith(config.fingerprint())


def test_what_is_nested_is_chosen_by_overrides():
    each = [
        (["strategy=gems", "strategy.space.clusters=8"], Cone(clusters=8)),
        ([*BALL, "strategy.space.radius=certified"], Ball(radius="certified")),
        (["strategy=gems", "strategy/space=ellipsoid"], Ellipsoid()),
    ]
    for overrides, space in each:
        assert strategy_of(*overrides, simulated=False).space == space
        # In a simulation noise comes from the run's seed, so that the run can be repeated.
        seeded = dataclasses.replace(space, dp_seeded=True)
        assert strategy_of(*overrides).space == seeded
    strategy = strategy_of(*LAYERS, "strategy/head=ball", "strategy.neurons.epsilon=[0.4]")
    assert strategy.head.space == dataclasses.replace(Ball(epsilon=0.7), dp_seeded=True)
    assert strategy.neurons == Neurons(epsilon=(0.4,))
    assert strategy_of("strategy=gems", "strategy.head.name=lda").head.name == "lda"


def test_files_say_what_the_classes_do():
    """Every option of a space stands in its file, at its default."""
    for kind in (Cone, Ball, Ellipsoid, Means):
        chosen = compose_config(["strategy=gems", f"strategy/space={kind.kind}"]).strategy["space"]
        given = {key: value for key, value in chosen.items() if key != "_target_"}
        assert kind(**given) == kind()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy=fedavgg"], ["fedavgg", "one_shot_average"]),
        (["strategy.fractoin=1"], ["no key 'fractoin' in strategy", "fraction_train"]),
        (["+strategy.fractoin=1"], ["no strategy.fractoin", "fraction_train"]),
        (["sede=1"], ["no key 'sede'", "seed"]),
        (["strategy.fraction_train=half"], ["strategy.fraction_train must be float", "half"]),
        (["nodes=many"], ["nodes=many", "Integer"]),
        (["nodes=0"], ["nodes must be at least 1", "0"]),
        (["seed=-1"], ["seed must be at least 0"]),
        (["timeout=0"], ["timeout must be above 0"]),
        (["validation=1.0"], ["validation must be between 0 and 1"]),
        (["train.optimizer=lion"], ["adam, sgd, rmsprop", "lion"]),
        (["backend.kind=dask"], ["inprocess, lockstep, ray", "dask"]),
        (["backend.device=tpu"], ["backend.device must be one of cpu, cuda", "tpu"]),
        (["backend.client_gpus=-1"], ["backend.client_gpus must be at least 0"]),
        (["backend.address=auto"], ["backend.kind must be ray with backend.address"]),
        (["backend=ray", "backend.address=nowhere"], ["auto or host:port, or null"]),
        (["stop.goal=up"], ["max or min"]),
        (["+tracking.x._target_=gems_flwr.nope.X"], ["there is no gems_flwr.nope.X"]),
        (["stream.batches_per_round=0"], ["stream.batches_per_round must be at least 1"]),
        (["stream.source=cloud"], ["share or pool"]),
        (["stream.drift.kind=weather"], ["labels or pixels"]),
        (["stream.drift.probability=2.0"], ["between 0 and 1"]),
        (["strategy=gems", "strategy.space=ball"], ["write strategy/space=ball"]),
        ([*BALL, "strategy.space.rank=20"], ["the keys are: epsilon, radius, directions"]),
        ([*BALL, "+strategy.space.rank=20"], ["there is no strategy.space.rank; the options of"]),
        (["+tracking.other=3"], ["tracking.other must be an object"]),
        (["multi_model.tasks=[{share: 2}]"], ["tasks[0].share must be in (0, 1]"]),
        (["multi_model.tasks=[{data: mnist}]"], ["tasks[0] has ['data'], allowed are"]),
        (["multi_model.tasks=[{name: x}, {name: x}]"], ["different names"]),
        (["multi_model.capacities=[0.5, 0.2]"], ["shares of the nodes that sum to 1"]),
    ],
    ids=lambda v: " ".join(v),
)
def test_a_wrong_key_or_value_is_refused_with_the_allowed_ones(overrides, words):
    with pytest.raises((ConfigError, HydraException)) as caught:
        compose_config(overrides)
    text = explain(caught.value, overrides)
    for word in words:
        assert word in text
    assert str(CONFIG_DIR) not in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["partition=dirichlet", "partition.alpha=-1"], "alpha"),
        (["dataset.public=5000"], "public"),
        (["nodes=2000"], "nodes"),
        (["model=lenet"], "model=lenet"),
        (["strategy.fraction_train=1.5"], "fraction_train must be between 0 and 1"),
        (["strategy=gems", "strategy.space.rank=0"], "rank must be 'auto', 'full' or a whole"),
        (["strategy=gems", "strategy.tune=300"], "200 public samples, got 300"),
        (["secure=sum", "secure.threshold=0.4"], "threshold must be above"),
        (["secure=sum", "strategy=ensemble"], "looks at the replies of single nodes"),
    ],
)
def test_a_value_that_cannot_be_is_the_configs_fault(overrides, words):
    experiment = Experiment(compose_config(overrides))
    with pytest.raises(ConfigError, match=words):
        _ = experiment.shares, experiment.build_model(), experiment.strategy(None, [])


@pytest.mark.parametrize(
    ("share", "nodes", "asked"), [(0, 100, 1), (0.29, 100, 29), (0.7, 30, 21), (1, 7, 7)]
)
def test_fedavgs_share_of_the_nodes_is_mcmahans(share, nodes, asked):
    """C = 0 is one node, and 0.29 of 100 are 29; Flower's own would take none, and 28."""
    strategy = strategy_of(f"strategy.fraction_train={share}", f"nodes={nodes}")
    assert strategy.sample_size(nodes, strategy.fraction_train, "train") == asked
    assert strategy.fraction_evaluate == 0


def test_stop_rules_come_from_the_config():
    config = compose_config(["stop.target=0.9", "stop.metric=loss"])
    rules = Experiment(config).stop_rules()
    assert rules == [TargetReached(0.9, "loss")]


# --- names of runs ------------------------------------------------------------------------------


def test_a_run_is_named_after_what_can_change_its_result():
    base = compose_config([])
    same = ["progress=false", "data_dir=/somewhere", "label=mine", "fresh=true", "live=true"]
    same += ["+tracking=mlflow", "++tracking=tensorboard", "objective=loss", "evaluate_on=test"]
    same += ["hydra/launcher=slurm", "hydra/launcher=ray_cluster"]
    for override in same:
        assert compose_config([override]).run_name() == base.run_name(), override
    ray = ["backend=ray", "backend.address=auto"]
    assert compose_config(ray).run_name() == compose_config(ray[:1]).run_name()
    others = ["seed=1", "nodes=4", "train.lr=0.2", "strategy.fraction_train=0.5", "model=mlp"]
    others += ["secure=sum", "evaluate_on=validation", "backend.threads=2", "stop.target=0.9"]
    names = [compose_config([each]).run_name() for each in others]
    assert len({base.run_name(), *names}) == len(others) + 1
    assert base.run_name().startswith("digits-labels-5-logistic/fedavg-s0-")


@pytest.mark.parametrize(
    ("overrides", "variant"),
    [
        (["secure=sum", "secure.threshold=0.8"], "secure=sum secure.threshold=0.8"),
        (["partition=dirichlet", "partition.alpha=0.7"], "partition.alpha=0.7"),
        (["evaluate_on=validation"], "evaluate_on=validation"),
        (["strategy=multi_model", "multi_model.lacking=0.5"], "multi_model.lacking=0.5"),
        ([*BALL, "strategy.tune=5"], "tune=5 space=ball"),
        ([*LAYERS, "strategy.head.space.rank=20"], "head.space.rank=20"),
        (["strategy=gems", "train.lr=0.1"], "train.lr=0.1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_variant_is_what_differs_from_the_files(overrides, variant):
    assert variant_of(compose_config(overrides)) == variant


# --- what a run is made of ------------------------------------------------------------------------


def test_initial_weights_depend_on_the_seed_alone():
    def weights(seed):
        torch.manual_seed(123 + seed)
        return Experiment(compose_config([f"seed={seed}"])).initial_arrays()["1.weight"].data

    assert weights(0) == weights(0)
    assert weights(0) != weights(1)


def test_public_and_test_data_are_never_part_of_a_nodes():
    experiment = Experiment(compose_config([]))
    shares = [part for s in experiment.shares for part in (s.train, s.validation)]
    seen = {row.tobytes() for part in shares for row in part.features}
    tested = {x.tobytes() for x in experiment.dataset.test.features}
    public = {x.tobytes() for x in experiment.dataset.public.features}
    for one, other in itertools.combinations([seen, tested, public], 2):
        assert not one & other
    counts = experiment.label_counts()["nodes"]
    assert sum(sum(n["train"]) + sum(n["validation"]) for n in counts) == sum(map(len, shares))


def test_a_node_has_its_own_data_and_gives_raw_ones_to_global_alone():
    experiment = experiment_of(compose_config(["nodes=3"]).to_json())
    with pytest.raises(ValueError, match=r"partition-id 3 does not exist: .* nodes=3"):
        experiment.task(3)
    task = experiment.task(0)
    inputs, labels = task.validation_data()
    assert inputs.shape[1:] == (1, 8, 8)
    assert 0 <= inputs.min() <= inputs.max() <= 1
    assert set(labels.tolist()) == {0, 1, 2}
    with pytest.raises(PermissionError, match="strategy=global"):
        task.shared_examples()


def test_the_lift_of_a_model_is_the_same_for_every_seed_of_a_run():
    first, second = (
        Experiment(compose_config(["model=random_filters", f"seed={seed}"])).build_model()
        for seed in (0, 1)
    )
    assert (first[0].weight == second[0].weight).all()
    assert (first[1].weight != second[1].weight).any()
