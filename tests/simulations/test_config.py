"""Every config composes and can be built; every mistake is refused with what is allowed."""

import itertools
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord
from hydra.errors import HydraException

from gems_flwr.server.stopping import PatienceExhausted, TargetReached
from simulations.config import (
    CONFIG_DIR,
    ConfigError,
    RunConfig,
    compose_config,
    explain,
    variant_of,
)
from simulations.data.archives import MissingDataError
from simulations.experiment.experiment import Experiment

GROUPS = ["strategy", "dataset", "partition", "model", "backend"]


def options(group):
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


@pytest.mark.parametrize(
    ("group", "option"), [(g, o) for g in GROUPS for o in options(g)], ids=lambda v: str(v)
)
def test_every_config_there_is_composes(group, option):
    config = compose_config([f"{group}={option}"])
    assert config.names[group] == option
    assert RunConfig.from_json(config.to_json()) == config


# Experiments with streams; the others have tests of their own.
STREAMS = [
    name
    for name in options("experiment")
    if not name.startswith(("multi_model", "gems2018", "gems2019", "slides", "fedavg"))
]


@pytest.mark.parametrize("experiment", STREAMS)
def test_every_experiment_composes_with_every_protocol_of_local_learners(experiment):
    for strategy in ("dynamic", "periodic", "nosync", "serial"):
        config = compose_config([f"experiment={experiment}", f"strategy={strategy}"])
        assert config.stream.is_on
        assert config.names["strategy"] == strategy
        # An experiment has the last word on the number of rounds.
        assert config.rounds == config.evaluate_every


def test_secure_sums_are_a_group_that_leaves_the_names_of_other_runs_alone():
    plain, secure = compose_config([]), compose_config(["secure=sum", "secure.threshold=0.8"])
    assert plain.secure == {}
    assert Experiment(secure).strategy(None, []).secure.threshold == 0.8
    assert secure.fingerprint() != plain.fingerprint()
    assert variant_of(secure) == "secure=sum secure.threshold=0.8"
    assert RunConfig.from_json(secure.to_json()) == secure
    with pytest.raises(ConfigError, match="threshold must be above"):
        Experiment(compose_config(["secure=sum", "secure.threshold=0.4"])).strategy(None, [])
    with pytest.raises(ConfigError, match="looks at the replies of single nodes"):
        Experiment(compose_config(["secure=sum", "strategy=ensemble"])).strategy(None, [])


@pytest.mark.parametrize(
    ("overrides", "digest"),
    [
        (["strategy=gems"], "eb45a687"),
        (["strategy=gems", "strategy.space.rank=20", "dataset=mnist"], "0fc015dd"),
        (["strategy=gems_layerwise", "model=mlp"], "ce06dbfb"),
        (["strategy=fedavg"], "e73ce020"),
    ],
)
def test_runs_keep_the_names_that_they_had_before_secure_sums(overrides, digest):
    """Digests of commit 3fa1577; a run whose name changes is not found and run again."""
    assert compose_config(overrides).fingerprint() == digest


def test_the_promised_names_are_there():
    assert {"dynamic", "periodic", "nosync", "serial"} <= set(options("strategy"))
    assert {"fedavg", "one_shot_average", "ensemble", "local", "global"} <= set(options("strategy"))
    assert "public_only" in options("strategy")
    assert {"dirichlet", "groups", "iid", "labels"} <= set(options("partition"))
    assert {"quantity", "shards", "skew"} <= set(options("partition"))
    assert {"gems", "gems_layerwise", "merge"} <= set(options("strategy"))
    assert {"inprocess", "lockstep", "ray", "ray_gpu"} <= set(options("backend"))
    assert {"cnn", "lenet", "logistic", "mlp", "two_layers_200"} <= set(options("model"))
    assert {
        "cifar10",
        "cifar10_features",
        "digits",
        "digits_parity",
        "digits_permuted",
        "fashion_mnist",
        "graphical",
        "ham10000",
        "ham10000_features",
        "mnist",
        "mnist_parity",
        "mnist_permuted",
        "own",
        "tweets",
        "tweets_by_terms",
    } <= set(options("dataset"))


@pytest.mark.parametrize("strategy", options("strategy"))
def test_every_strategy_is_built_from_its_config(strategy, tmp_path):
    experiment = Experiment(compose_config([f"strategy={strategy}", "seed=4"]))
    built = experiment.strategy(tmp_path, [])
    assert built.seed == 4
    assert built.wait_for_nodes == 5
    assert built.stop_rules == []


@pytest.mark.parametrize(
    ("share", "nodes", "asked"),
    [(0, 100, 1), (0.1, 5, 1), (0.29, 100, 29), (0.7, 30, 21), (1, 7, 7)],
)
def test_fedavgs_share_of_the_nodes_is_mcmahans(share, nodes, asked):
    """C = 0 is one node, and 0.29 of 100 are 29; Flower's own would take none, and 28."""
    overrides = ["strategy=fedavg", f"strategy.fraction_train={share}", f"nodes={nodes}"]
    strategy = Experiment(compose_config(overrides)).strategy(None, [])
    assert strategy.sample_size(nodes, strategy.fraction_train, "train") == asked
    assert strategy.fraction_evaluate == 0
    evaluating = compose_config([*overrides, f"strategy.fraction_evaluate={share}"])
    strategy = Experiment(evaluating).strategy(None, [])
    expected = asked if share else 0
    assert strategy.sample_size(nodes, strategy.fraction_evaluate, "evaluate") == expected


@pytest.mark.parametrize("partition", [p for p in options("partition") if p != "groups"])
def test_every_partition_divides_the_digits(partition):
    experiment = Experiment(compose_config([f"partition={partition}", "nodes=4"]))
    shares = experiment.shares
    assert len(shares) == 4
    total = sum(len(share.train) + len(share.validation) for share in shares)
    assert total == len(experiment.dataset.train)
    counts = experiment.label_counts()
    assert counts["classes"] == 10
    assert sum(sum(n["train"]) + sum(n["validation"]) for n in counts["nodes"]) == total


@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn"])
def test_every_model_that_fits_digits_predicts_them(model):
    experiment = Experiment(compose_config([f"model={model}"]))
    test = experiment.dataset.test
    probabilities = experiment.predict(experiment.build_model(), test)
    assert probabilities.shape == (len(test), 10)


def test_a_model_that_does_not_fit_the_data_is_the_configs_fault():
    experiment = Experiment(compose_config(["model=lenet"]))
    with pytest.raises(ConfigError, match="model=lenet"):
        experiment.build_model()


def needs_files(dataset):
    text = (CONFIG_DIR / "dataset" / f"{dataset}.yaml").read_text()
    return "needs no files" not in text and dataset != "own"


@pytest.mark.parametrize("dataset", [d for d in options("dataset") if needs_files(d)])
def test_missing_data_is_said_with_what_to_put_where(dataset, tmp_path):
    experiment = Experiment(compose_config([f"dataset={dataset}", f"data_dir={tmp_path}"]))
    with pytest.raises(MissingDataError) as caught:
        _ = experiment.dataset
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy=fedavgg"], ["fedavgg", "one_shot_average"]),
        (["partition=labelz"], ["labelz", "dirichlet"]),
        (["strategy.fractoin=1"], ["no key 'fractoin' in strategy", "fraction_train"]),
        (["+strategy.fractoin=1"], ["no strategy.fractoin", "fraction_train"]),
        (["train.epoch=3"], ["no key 'epoch' in train", "epochs"]),
        (["stop.goals=max"], ["no key 'goals' in stop", "goal"]),
        (["sede=1"], ["no key 'sede'", "seed"]),
        (["strategy.fraction_train=half"], ["strategy.fraction_train must be float", "half"]),
        (["strategy.weighted=3"], ["strategy.weighted must be bool", "3"]),
        (["nodes=many"], ["nodes=many", "Integer"]),
        (["nodes=0"], ["nodes must be at least 1", "0"]),
        (["seed=-1"], ["seed must be at least 0"]),
        (["rounds=0"], ["rounds must be at least 1"]),
        (["timeout=0"], ["timeout must be above 0"]),
        (["validation=1.0"], ["validation must be between 0 and 1"]),
        (["train.optimizer=lion"], ["adam, sgd, rmsprop", "lion"]),
        (["train.lr=-1"], ["train.lr must be"]),
        (["backend.kind=dask"], ["inprocess or ray", "dask"]),
        (["backend.device=tpu"], ["backend.device must be one of cpu, cuda", "tpu"]),
        (["backend.threads=0"], ["backend.threads must be at least 1"]),
        (["backend.client_gpus=-1"], ["backend.client_gpus must be at least 0"]),
        (["stop.goal=up"], ["max or min"]),
        (["stop.patience=0"], ["at least 1, or null"]),
        (["stop.rules=[{value: 1}]"], ["stop.rules[0]", "_target_"]),
        (["stop.rules=[{_target_: gems_flwr.nope.X}]"], ["there is no gems_flwr.nope.X"]),
        (
            ["stop.rules=[{_target_: gems_flwr.server.stopping.TargetReached, valu: 1}]"],
            ["no stop.rules[0].valu", "goal, metric, value"],
        ),
        (["partition=dirichlet", "partition.alpha=x"], ["partition.alpha must be float"]),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
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
    ],
)
def test_a_value_that_the_data_does_not_allow_is_the_configs_fault(overrides, words):
    experiment = Experiment(compose_config(overrides))
    with pytest.raises(ConfigError, match=words):
        _ = experiment.shares


def test_a_mistake_in_a_multirun_is_explained_too():
    with pytest.raises(HydraException) as caught:
        compose_config(["strategy.fractoin=1"])
    text = explain(caught.value, ["-m", "seed=0,1", "strategy.fractoin=1", "--cfg", "job"])
    assert "no key 'fractoin' in strategy; the keys are: fraction_train" in text


def test_a_strategy_setting_out_of_range_is_the_configs_fault(tmp_path):
    experiment = Experiment(compose_config(["strategy.fraction_train=1.5"]))
    with pytest.raises(ConfigError, match="fraction_train must be between 0 and 1"):
        experiment.strategy(tmp_path, [])


def test_stop_rules_come_from_the_config(tmp_path):
    config = compose_config(["stop.target=0.9", "stop.patience=3", "stop.metric=loss"])
    rules = Experiment(config).strategy(tmp_path, []).stop_rules
    assert rules == [TargetReached(0.9, "loss"), PatienceExhausted(3, "loss")]


def stop_rule(text):
    return f"stop.rules=[{{_target_: gems_flwr.server.stopping.{text}}}]"


def test_further_stop_rules_are_named_by_their_class(tmp_path):
    config = compose_config(["stop.target=0.9", stop_rule("TargetReached, value: 3, goal: min")])
    rules = Experiment(config).strategy(tmp_path, []).stop_rules
    assert rules == [TargetReached(0.9), TargetReached(3, goal="min")]
    assert RunConfig.from_json(config.to_json()) == config
    # They can change the result; without any, runs are called as they were before there were any.
    assert config.fingerprint() != compose_config(["stop.target=0.9"]).fingerprint()
    assert compose_config(["strategy=fedavg"]).fingerprint() == "e73ce020"


def test_a_stop_rule_out_of_range_is_the_configs_fault(tmp_path):
    experiment = Experiment(compose_config([stop_rule("PatienceExhausted, rounds: 0")]))
    with pytest.raises(ConfigError, match=r"stop\.rules: rounds must be at least 1"):
        experiment.strategy(tmp_path, [])


def test_a_run_is_named_after_what_can_change_its_result():
    base = compose_config([])
    same = ["progress=false", "data_dir=/somewhere", "label=mine", "fresh=true"]
    for override in same:
        assert compose_config([override]).run_name() == base.run_name(), override
    others = ["seed=1", "nodes=4", "train.lr=0.2", "strategy.fraction_train=0.5", "model=mlp"]
    names = [compose_config([each]).run_name() for each in others]
    assert len({base.run_name(), *names}) == len(others) + 1
    assert base.run_name().startswith("digits-labels-5-logistic/fedavg-s0-")


@pytest.mark.parametrize("strategy", options("strategy"))
def test_a_config_as_it_stands_in_the_files_is_no_variant(strategy):
    assert variant_of(compose_config([f"strategy={strategy}"])) == ""


def test_nested_options_are_named_with_their_section():
    config = compose_config(["strategy=gems_layerwise", "strategy.head.space.rank=20"])
    assert variant_of(config) == "output.rank=20"


def test_initial_weights_depend_on_the_seed_alone():
    def weights(seed):
        torch.manual_seed(123 + seed)
        model = Experiment(compose_config([f"seed={seed}"])).build_model()
        return ArrayRecord(model.state_dict())["1.weight"].data

    assert weights(0) == weights(0)
    assert weights(0) != weights(1)


def test_public_data_is_never_part_of_a_nodes():
    experiment = Experiment(compose_config([]))
    seen = {
        x.tobytes() for s in experiment.shares for x in (*s.train.features, *s.validation.features)
    }
    tested = {x.tobytes() for x in experiment.dataset.test.features}
    public = {x.tobytes() for x in experiment.dataset.public.features}
    # Some digits occur twice in the data set itself; none of these sets is a copy of another.
    for one, other in itertools.combinations([seen, tested, public], 2):
        assert len(one & other) <= 2


def test_the_configs_name_no_machine():
    for path in Path(CONFIG_DIR).rglob("*.yaml"):
        assert "/work" not in path.read_text()
        assert "/home" not in path.read_text()
