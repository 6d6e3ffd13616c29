"""Which nodes train: chosen by the seed, whoever says its name, and whenever."""

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_grids import kind_of
from helpers_learners import initial as initial_walk
from helpers_learners import walking_app
from helpers_superlink import SuperLinkGrid

from conftest import initial_arrays, toy_app, train_reply
from gems_flwr import (
    Ball,
    Callback,
    DynamicAveraging,
    FedAvg,
    Gems,
    InProcessGrid,
    MeteredGrid,
    OneShotAverage,
)
from gems_flwr.core.records import pack_name
from gems_flwr.errors import MissingModError

NODES = 6


def start(strategy, grid, rounds=2, **options):
    return strategy.start(grid, initial_arrays(), num_rounds=rounds, **options)


def asked(result):
    return [record.nodes_asked for record in result.history[1:]]


def partitions(count):
    return [{"partition-id": number} for number in range(count)]


def test_a_fraction_of_the_nodes_is_chosen_by_the_seed():
    def run(seed):
        strategy = FedAvg(fraction_train=0.3, fraction_evaluate=0.0, seed=seed)
        return asked(start(strategy, InProcessGrid(toy_app(), 10), rounds=6))

    assert all(len(nodes) == 3 for nodes in run(1))
    assert run(1) == run(1) != run(2)
    assert len(set(run(1))) > 1


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 2), (0.29, 29), (0.7, 70), (1.0, 100)])
def test_the_number_of_nodes_is_the_fraction_but_never_below_the_minimum(fraction, expected):
    strategy = OneShotAverage(fraction_train=fraction)
    result = start(strategy, InProcessGrid(toy_app(), 100), rounds=1)
    assert len(asked(result)[0]) == expected


# --- where nobody has a name ------------------------------------------------------------------


def plain_app(calls, name=None):
    """An app of somebody who has never heard of us; or whose replies say a name all the same."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        partition = context.node_config["partition-id"]
        content = train_reply(message, context).content
        calls.append((message.content["config"]["server-round"], partition))
        del content["node"]
        if name is not None:
            content["node"] = pack_name(name(partition))["node"]
        return Message(content, reply_to=message)

    return app


def half(grid, rounds=3, **options):
    strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.0, seed=4)
    return start(strategy, grid, rounds, **options)


@pytest.fixture(scope="module")
def chosen():
    """Who trains where the grid knows all names: pairs of a round and a partition."""
    result = half(InProcessGrid(toy_app(), NODES))
    return [(n, int(name)) for n, names in enumerate(asked(result), 1) for name in names]


@pytest.mark.parametrize(
    "name",
    [None, lambda partition: str(NODES - partition)],
    ids=["no names", "partitions backwards"],
)
def test_a_plain_app_on_flowers_own_grid_is_asked_for_nothing_and_chosen_by_the_seed(chosen, name):
    """Flower gives random ids; who trains is what the seed says, whatever replies call a node.

    Nodes are registered in the order of partitions, as Flower's simulation does it.
    """
    for _ in range(3):
        calls = []
        grid = MeteredGrid(SuperLinkGrid(plain_app(calls, name), partitions(NODES)))
        result = half(grid)
        assert sorted(calls) == chosen
        assert grid.total.messages_down == 3 * 3
        assert result.failures == ()


class Joining(Callback):
    """One more node after the first round."""

    def __init__(self, grid):
        self.grid = grid

    def on_round_end(self, record):
        if record.round == 1:
            self.grid.register({"partition-id": NODES})


def test_sums_of_nodes_without_names_are_taken_in_the_order_in_which_they_were_registered():
    """Of three weights, one of them 2^60, the sum depends on the order: the model is the same."""

    def run():
        app = ClientApp()

        @app.train()
        def train(message, context):
            model = message.content["arrays"].to_numpy_ndarrays()[0].astype("float32")
            value = (2.0**30, 1.0, -(2.0**30))[context.node_config["partition-id"]]
            arrays = type(message.content["arrays"])([model + value])
            metrics = MetricRecord({"num-examples": 1})
            content = RecordDict({"arrays": arrays, "metrics": metrics})
            return Message(content, reply_to=message)

        model = type(initial_arrays())([initial_arrays()["weight"].numpy() * 0])
        grid = SuperLinkGrid(app, partitions(3))
        return FedAvg().start(grid, model, num_rounds=1).arrays.to_numpy_ndarrays()[0].tobytes()

    assert len({run() for _ in range(8)}) == 1


# --- where an account is kept by name ---------------------------------------------------------


def learn(grid, strategy=None, rounds=3, **options):
    """Play some rounds of local learners, which keep account of who has which model."""
    strategy = strategy or DynamicAveraging(delta=0.01, augmentation="all", seed=4)
    return strategy.start(grid, initial_walk(), num_rounds=rounds, **options)


class Hesitant(SuperLinkGrid):
    """Nodes without registered names, under random ids, that do not say their names at once.

    By partition: how often replies are looked for before the node says who it is.
    """

    def __init__(self, app, hesitation):
        super().__init__(app, partitions(len(hesitation)))
        self.hesitation, self.looks = hesitation, 0

    def ready(self, node, message):
        self.looks += 1
        partition = self.configs[node]["partition-id"]
        return kind_of(message.content) != "name" or self.looks > NODES * self.hesitation[partition]


def test_a_node_that_never_says_its_name_goes_by_its_id_and_the_run_goes_on(caplog):
    """The others answer at the first look, before any time is up."""
    grid = Hesitant(walking_app(), (0, 0, 10**9, 0, 0, 0))
    silent = list(grid.configs)[2]
    result = learn(grid, timeout=0.01)
    assert all(len(nodes) == NODES for nodes in asked(result))
    assert f"event=no_name node=#{silent} timeout=0.01" in caplog.text
    assert caplog.text.count("event=no_name") == 1


class CountingNames(MeteredGrid):
    """Counts the messages that ask for a name."""

    names = 0

    def stream(self, messages, **options):
        messages = list(messages)
        questions = [each.content["question"] for each in messages if "question" in each.content]
        self.names += sum(question["kind"] == "name" for question in questions)
        return super().stream(messages, **options)


def test_a_node_that_joins_later_is_asked_for_its_name_before_it_trains():
    grid = SuperLinkGrid(walking_app(), partitions(NODES))
    metered = CountingNames(grid)
    strategy = DynamicAveraging(delta=0.01, callbacks=[Joining(grid)])
    result = learn(metered, strategy)
    assert metered.names == NODES + 1
    assert asked(result)[1] == tuple(str(number) for number in range(NODES + 1))


# --- the question -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "written"),
    [(DynamicAveraging(), ""), (Gems(space=Ball(epsilon={"0": 0.5})), "data, model=Net")],
)
def test_an_app_without_the_mod_is_refused_before_anything_is_paid_for(strategy, written):
    calls = []
    grid = MeteredGrid(SuperLinkGrid(plain_app(calls), partitions(3)))
    with pytest.raises(MissingModError) as refused:
        strategy.start(grid, initial_arrays(), num_rounds=3)
    text = str(refused.value)
    assert text.startswith(f"write ClientApp(mods=[good_enough_mod({written})]): node #")
    assert f"answers {type(strategy).__name__}" in text
    assert "\n" not in text
    # One question to each, of less than a hundred bytes, and nobody has trained.
    assert (grid.total.messages_down, calls) == (3, [])
    assert grid.total.bytes_down < 3 * 100


def test_a_resumed_round_asks_for_names_only_if_its_replies_were_kept_under_names(tmp_path):
    """A plain app's were not: nobody can tell whose they are but by the id."""

    class Interrupt(Callback):
        def on_reply(self, server_round, node, usable):
            raise KeyboardInterrupt

    def run(app, folder, resume=False, **options):
        grid = MeteredGrid(SuperLinkGrid(app, partitions(3)))
        strategy = FedAvg(fraction_evaluate=0.0, checkpoint_dir=tmp_path / folder, **options)
        return strategy.start(grid, initial_arrays(), num_rounds=1, resume=resume), grid

    for app, folder, questions in ((plain_app([]), "plain", 0), (toy_app(), "named", 3)):
        with pytest.raises(KeyboardInterrupt):
            run(app, folder, callbacks=[Interrupt()])
        result, grid = run(app, folder, resume=True)
        # Its ids are new: of a plain app all train again, of one that says names but two.
        assert grid.total.messages_down == questions + (2 if questions else 3)
        assert result.failures == ()
