"""FedAvg is Flower's FedAvg: its signature and its behaviours are the specification.

Every behaviour in `BEHAVIOURS` is read off Flower's ``FedAvg`` and ``Strategy.start`` and played
twice on the same app, with Flower's class and with ours; what is seen must be equal.
"""

import inspect
import random
import time

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.serverapp.strategy import Strategy, strategy_utils

from gems_flwr import FedAvg, InProcessGrid, RoundLoop, Tolerance
from gems_flwr.core.records import to_numpy
from gems_flwr.errors import NotEnoughNodesError, RoundFailedError

NODES = 5
SEED_KEY = "run-seed"


# --- what Flower's class asks for -------------------------------------------------------------


def parameters_of(function):
    own = list(inspect.signature(function).parameters.values())[1:]
    return {p.name: (p.kind, p.default) for p in own}


def test_every_argument_of_flowers_constructor_is_ours_in_its_place():
    """A new Flower with a new argument fails here, and the message has its name."""
    flowers, ours = parameters_of(FlowersFedAvg.__init__), parameters_of(FedAvg.__init__)
    missing = [name for name in flowers if name not in ours]
    assert not missing, f"FedAvg lacks {missing} of Flower's constructor"
    for name, argument in flowers.items():
        assert ours[name] == argument, f"'{name}' is not what it is in Flower"
    assert list(ours)[: len(flowers)] == list(flowers), "Flower's arguments come first, in order"
    more = {name: kind for name, (kind, _) in ours.items() if name not in flowers}
    assert set(more.values()) == {inspect.Parameter.KEYWORD_ONLY}, "ours are keywords"


def test_every_argument_of_flowers_start_is_ours_in_its_place():
    flowers, ours = parameters_of(Strategy.start), parameters_of(RoundLoop.start)
    missing = [name for name in flowers if name not in ours]
    assert not missing, f"start lacks {missing} of Flower's"
    assert list(ours.items())[: len(flowers)] == list(flowers.items())


# --- what it does -----------------------------------------------------------------------------


class Watched:
    """A run of either class on the same app, and all that can be seen of it.

    Nodes add their number to each weight, and count as many examples. `heard` has what came
    to each node, `scored` what the server's evaluation got.
    """

    def __init__(
        self, cls, *, metrics=None, evaluate_metrics=None, rename=None, grid=InProcessGrid
    ):
        self.cls, self.heard, self.scored = cls, [], []
        app = ClientApp()

        def told(own, context):
            node = context.node_config["partition-id"] + 1
            return MetricRecord(own(node) if own else {"num-examples": node, "loss": 1 / node})

        @app.train()
        def train(message, context):
            self._hear("train", message, context)
            [record] = message.content.array_records.values()
            node = context.node_config["partition-id"] + 1
            arrays = ArrayRecord([w + np.float32(node / 3) for w in record.to_numpy_ndarrays()])
            keys = rename or ("arrays", "metrics")
            content = RecordDict(dict(zip(keys, (arrays, told(metrics, context)), strict=True)))
            return Message(content, reply_to=message)

        @app.evaluate()
        def evaluate(message, context):
            self._hear("evaluate", message, context)
            content = RecordDict({"metrics": told(evaluate_metrics, context)})
            return Message(content, reply_to=message)

        self.grid = grid(app, NODES)

    def _hear(self, what, message, context):
        [(array_key, _)] = message.content.array_records.items()
        [(config_key, config)] = message.content.config_records.items()
        node = context.node_config["partition-id"]
        seen = {key: value for key, value in config.items() if key != SEED_KEY}
        self.heard.append((what, node, array_key, config_key, seen))

    def evaluate_fn(self, server_round, arrays):
        self.scored.append((server_round, [w.tolist() for w in arrays.to_numpy_ndarrays()]))
        return MetricRecord({"round": server_round, "sums": [0.5, float(server_round)]})

    def play(self, *arguments, strategy=None, rounds=3, **options):
        strategy = strategy or self.cls(*arguments)
        start = ArrayRecord([np.zeros((2, 3), np.float32), np.ones(2, np.float64)])
        self.result = strategy.start(self.grid, start, num_rounds=rounds, **options)
        return self

    @property
    def seen(self):
        """What a user of either class can see."""
        counts = [
            sum(
                what == kind and config["server-round"] == number for what, *_, config in self.heard
            )
            for kind in ("train", "evaluate")
            for number in (1, 2, 3)
        ]
        return {
            "train": metrics_of(self.result.train_metrics_clientapp),
            "evaluate": metrics_of(self.result.evaluate_metrics_clientapp),
            "server": metrics_of(self.result.evaluate_metrics_serverapp),
            "messages": counts,
            "scored": self.scored,
        }


def metrics_of(by_round):
    return {number: dict(record) for number, record in by_round.items()}


class Late(InProcessGrid):
    """Some nodes connect only after a while."""

    looks = 0

    def get_node_ids(self):
        self.looks += 1
        ids = list(super().get_node_ids())
        return ids if self.looks > 6 else ids[:2]


@pytest.fixture(autouse=True)
def nodes_in_order(monkeypatch):
    """Let Flower take nodes in the order in which we do: by partition.

    Who is chosen is random in both; how many, and what becomes of it, is not. Nobody sleeps.
    """

    def sample(population, size):
        ids = list(InProcessGrid(ClientApp(), len(population))._configs)
        return (ids if set(ids) == set(population) else population)[:size]

    monkeypatch.setattr(random, "sample", sample)
    monkeypatch.setattr(strategy_utils, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


BEHAVIOURS = {}


def behaviour(text):
    def note(function):
        assert text not in BEHAVIOURS
        BEHAVIOURS[text] = function
        return function

    return note


@behaviour("all options can be left out, or given by position")
def _(cls):
    key = Watched(cls, metrics=weighing, evaluate_metrics=weighing)
    by_place = (1.0, 1.0, 2, 2, 2, "weight", "arrays", "config", None, None)
    return Watched(cls).play().seen, key.play(*by_place).seen


@behaviour("fraction_train=0 sends no train messages; evaluation goes on with the same model")
def _(cls):
    run = Watched(cls)
    run.play(strategy=cls(fraction_train=0.0), evaluate_fn=run.evaluate_fn)
    assert run.seen["messages"] == [0, 0, 0, *[NODES] * 3]
    assert run.seen["train"] == {}
    return run.seen


@behaviour("fraction_evaluate=0 sends no evaluate messages")
def _(cls):
    run = Watched(cls).play(strategy=cls(fraction_evaluate=0.0))
    assert run.seen["messages"] == [*[NODES] * 3, 0, 0, 0]
    assert run.seen["evaluate"] == {}
    return run.seen, arrays_of(run)


@behaviour("max(int(n * fraction), minimum) nodes are chosen")
def _(cls):
    sizes = []
    for n in (2, 5, 10, 100):
        for fraction in (0.01, 0.29, 0.3, 0.58, 0.7, 0.99, 1.0):
            grid = InProcessGrid(ClientApp(), n)
            strategy = cls(fraction, fraction, min_train_nodes=1, min_evaluate_nodes=2)
            for configure in (strategy.configure_train, strategy.configure_evaluate):
                sizes.append(len(list(configure(1, ArrayRecord(), ConfigRecord(), grid))))
    return sizes


@behaviour("more nodes than are there are waited for: the minimum available, or the sample")
def _(cls):
    runs = []
    for option in ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes"):
        run = Watched(cls, grid=Late).play(strategy=cls(**{option: NODES}))
        # None of them is sent before all are there, unless it is evaluation that wants more.
        assert option == "min_evaluate_nodes" or run.seen["messages"][2:] == [NODES] * 4
        runs.append((run.result.evaluate_metrics_clientapp.keys(), run.seen["messages"][-1]))
    return runs


@behaviour("models and metrics are weighted by the metric that weighted_by_key names")
def _(cls):
    run = Watched(cls, metrics=weighing, evaluate_metrics=weighing)
    run.play(strategy=cls(weighted_by_key="weight"))
    assert run.result.train_metrics_clientapp[1].keys() == {"num-examples", "loss"}
    return run.seen, arrays_of(run)


@behaviour("messages have their records under the keys that were asked for")
def _(cls):
    run = Watched(cls)
    run.play(strategy=cls(arrayrecord_key="model", configrecord_key="settings"))
    assert {(array, config) for _, _, array, config, _ in run.heard} == {("model", "settings")}
    return sorted(map(str, run.heard))


@behaviour("replies may have their records under any keys")
def _(cls):
    run = Watched(cls, rename=("trained", "told")).play()
    return run.seen, arrays_of(run)


@behaviour("functions for metrics get the replies and the key; their result is kept whole")
def _(cls):
    def spread(replies, key):
        losses = [float(reply["metrics"]["loss"]) for reply in replies]
        assert all(type(reply) is RecordDict for reply in replies)
        return MetricRecord(
            {"losses": losses, "examples": sum(r["metrics"][key] for r in replies), key: 7}
        )

    run = Watched(cls)
    run.play(strategy=cls(train_metrics_aggr_fn=spread, evaluate_metrics_aggr_fn=spread))
    assert run.result.train_metrics_clientapp[1]["num-examples"] == 7
    return run.seen


@behaviour("lists in metrics are averaged number by number")
def _(cls):
    def listed(node):
        return {"num-examples": node, "a": [0.1 * node, -0.0], "b": [node, 2], "c": []}

    run = Watched(cls, metrics=listed, evaluate_metrics=listed).play()
    assert len(run.result.train_metrics_clientapp[1]["a"]) == 2
    return str(run.seen)  # 0.0 and -0.0 differ


@behaviour("nodes get the round, and the configs for training and evaluation")
def _(cls):
    run = Watched(cls)
    configs = {
        "train_config": ConfigRecord({"lr": 0.1, "layers": [1, 2]}),
        "evaluate_config": ConfigRecord({"batch": 32}),
    }
    run.play(**configs)
    assert {(what, *config) for what, *_, config in run.heard} == {
        ("train", "lr", "layers", "server-round"),
        ("evaluate", "batch", "server-round"),
    }
    return sorted(map(str, run.heard))


@behaviour("the server evaluates before the first round and after each, lists and all")
def _(cls):
    run = Watched(cls)
    run.play(evaluate_fn=run.evaluate_fn)
    assert [number for number, _ in run.scored] == [0, 1, 2, 3]
    assert run.result.evaluate_metrics_serverapp[2]["sums"] == [0.5, 2.0]
    return run.seen


@behaviour("a server's evaluation that returns nothing leaves no trace; an empty record does")
def _(cls):
    found = {0: None, 1: MetricRecord(), 2: None, 3: MetricRecord({"accuracy": 0.5})}
    run = Watched(cls).play(evaluate_fn=lambda number, arrays: found[number])
    assert run.seen["server"] == {1: {}, 3: {"accuracy": 0.5}}
    return run.seen


@behaviour("a subclass may override each of the four methods and call super()")
def _(cls):
    class Custom(cls):
        def configure_train(self, server_round, arrays, config, grid):
            if server_round == 2:
                config["lr"] = config["lr"] * 0.5
            return super().configure_train(server_round, arrays, config, grid)

        def configure_evaluate(self, server_round, arrays, config, grid):
            config["of"] = float(arrays.to_numpy_ndarrays()[0].sum())
            return super().configure_evaluate(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, list(replies)[1:])
            metrics["replies"] = server_round
            return arrays, metrics

        def aggregate_evaluate(self, server_round, replies):
            metrics = super().aggregate_evaluate(server_round, replies)
            return MetricRecord({**metrics, "twice": 2 * metrics["loss"]})

    run = Watched(cls).play(strategy=Custom(), train_config=ConfigRecord({"lr": 0.1}))
    rates = {config["lr"] for what, *_, config in run.heard if what == "train"}
    assert rates == {0.1, 0.05}
    return run.seen, sorted(map(str, run.heard)), arrays_of(run)


@behaviour("a subclass may play the rounds itself, with the four methods")
def _(cls):
    class Own(cls):
        start = Strategy.start

    run = Watched(cls)
    run.play(strategy=Own(), evaluate_fn=run.evaluate_fn)
    return run.seen, arrays_of(run)


@behaviour("methods that get no reply return nothing")
def _(cls):
    return cls().aggregate_train(1, []), cls().aggregate_evaluate(1, [])


@pytest.mark.parametrize("text", BEHAVIOURS)
def test_what_flowers_class_does_ours_does(text):
    assert BEHAVIOURS[text](FedAvg) == BEHAVIOURS[text](FlowersFedAvg)


# --- an app, and nothing but the import -------------------------------------------------------


def test_a_run_with_lists_and_empty_records_goes_on_from_its_checkpoint(tmp_path):
    def play(rounds, folder, resume=False):
        run = Watched(FedAvg, evaluate_metrics=lambda node: {"num-examples": node})
        strategy = FedAvg(checkpoint_dir=tmp_path / folder)
        return run.play(
            strategy=strategy, rounds=rounds, evaluate_fn=run.evaluate_fn, resume=resume
        )

    play(1, "parts")
    resumed, whole = play(3, "parts", resume=True), play(3, "whole")
    assert resumed.seen["messages"] != whole.seen["messages"]
    for what in ("train", "evaluate", "server"):
        assert resumed.seen[what] == whole.seen[what]
    assert arrays_of(resumed) == arrays_of(whole)
    assert whole.seen["evaluate"] == {1: {}, 2: {}, 3: {}}


# --- what is ours on purpose ------------------------------------------------------------------


def test_a_round_without_a_usable_reply_fails_where_flowers_goes_on():
    def broken(cls):
        return Watched(cls, metrics=lambda node: {"loss": float("nan"), "num-examples": 1})

    assert np.isnan(broken(FlowersFedAvg).play().seen["train"][3]["loss"])
    with pytest.raises(RoundFailedError, match=r"0 of 5 nodes gave a usable reply, min_nodes is 1"):
        broken(FedAvg).play()


def test_a_run_that_trains_nobody_returns_the_model_that_it_evaluated():
    run = Watched(FedAvg).play(strategy=FedAvg(fraction_train=0.0))
    assert [w.sum() for w in run.result.arrays.to_numpy_ndarrays()] == [0, 2]
    assert len(Watched(FlowersFedAvg).play(strategy=FlowersFedAvg(0.0)).result.arrays) == 0


@pytest.mark.parametrize(
    "option", ["min_available_nodes", "min_train_nodes", "min_evaluate_nodes", "min_nodes"]
)
def test_waiting_ends_with_the_option_that_asks_for_more_nodes(option):
    words, options = f"{option} is 9", {option: 9}
    run = Watched(FedAvg)
    with pytest.raises(NotEnoughNodesError, match=f"5 nodes are connected after 0 s, {words}"):
        run.play(strategy=FedAvg(tolerance=Tolerance(wait_seconds=0), **options))
    assert run.heard == []


def test_no_fewer_nodes_are_chosen_than_must_answer():
    run = Watched(FedAvg).play(strategy=FedAvg(fraction_train=0.1, min_nodes=4))
    assert run.seen["messages"][:3] == [4, 4, 4]


# --- helpers of the behaviours ------------------------------------------------------------------


def weighing(node):
    return {"num-examples": 1, "weight": 0.25 * node, "loss": 1 / node}


def arrays_of(run):
    return {
        key: (array.dtype.str, array.tobytes())
        for key, array in to_numpy(run.result.arrays).items()
    }
