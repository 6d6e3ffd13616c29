"""Which nodes train: chosen by the seed, whenever and in whichever order they say their names."""

import pytest
from flwr.clientapp import ClientApp
from helpers_grids import Nameless
from helpers_superlink import SuperLinkGrid
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import initial_arrays, toy_app, train_reply
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.runtime.metered_grid import MeteredGrid
from gems_flwr.server.settings import Callback
from gems_flwr.strategies.fedavg import FedAvg
from gems_flwr.wire.keys import INTRODUCE

NODES = 6


def start(strategy, grid, rounds=2, **options):
    return strategy.start(grid, initial_arrays(), num_rounds=rounds, **options)


def asked(result):
    return [record.nodes_asked for record in result.history[1:]]


def test_a_fraction_of_the_nodes_is_chosen_by_the_seed():
    def run(seed):
        return asked(
            start(FedAvg(fraction_train=0.3, seed=seed), InProcessGrid(toy_app(), 10), rounds=6)
        )

    assert all(len(nodes) == 3 for nodes in run(1))
    assert run(1) == run(1)
    assert run(1) != run(2)
    assert len(set(run(1))) > 1


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 2), (0.29, 29), (0.7, 70), (1.0, 100)])
def test_the_number_of_nodes_is_the_fraction_but_never_below_the_minimum(fraction, expected):
    strategy = FedAvg(fraction_train=fraction)
    chosen = strategy.choose_nodes(1, InProcessGrid(toy_app(), 100), fraction, "train")
    assert len(set(chosen)) == expected


def test_nodes_are_asked_for_their_names_only_when_choosing_needs_them():
    everyone = MeteredGrid(Nameless(toy_app(), 4))
    # The names that come with the replies are in the record all the same.
    assert asked(start(FedAvg(), everyone, rounds=1)) == [("0", "1", "2", "3")]
    assert everyone.total.messages_down == 4

    some = MeteredGrid(Nameless(toy_app(), 4))
    result = start(FedAvg(fraction_train=0.5), some, rounds=3)
    assert some.total.messages_down == 4 + 3 * 2
    assert result.traffic.messages_down == 4 + 3 * 2
    named = start(FedAvg(fraction_train=0.5), InProcessGrid(toy_app(), 4), rounds=3)
    assert asked(result) == asked(named)


def test_nodes_that_cannot_introduce_themselves_go_by_their_ids():
    app = ClientApp()
    app.train()(train_reply)
    result = start(FedAvg(fraction_train=0.5), Nameless(app, 4), rounds=1)
    assert len(result.history[1].nodes_answered) == 2


# --- whenever they say their names ------------------------------------------------------------


def half(grid, rounds=3, *, wait_seconds=0.0, **options):
    """Let half of the nodes train; a node's name may be late by more than is waited for nodes."""
    strategy = FedAvg(fraction_train=0.5, seed=4, wait_seconds=wait_seconds)
    return start(strategy, grid, rounds, **options)


@pytest.fixture(scope="module")
def chosen():
    """Who trains where the grid knows all names."""
    return asked(half(InProcessGrid(toy_app(), NODES)))


class Hesitant(SuperLinkGrid):
    """Nodes without registered names, under random ids, that do not introduce themselves at once.

    By partition: how often replies are looked for before the node says who it is.
    """

    def __init__(self, app, hesitation):
        super().__init__(app, [{"partition-id": i} for i in range(len(hesitation))])
        self.hesitation, self.looks = hesitation, 0

    def ready(self, node, message):
        self.looks += 1
        partition = self.configs[node]["partition-id"]
        introduce = message.metadata.message_type == INTRODUCE
        return not introduce or self.looks > NODES * self.hesitation[partition]


@settings(max_examples=10)
@given(st.permutations(range(NODES)))
def test_nodes_that_introduce_themselves_in_any_order_are_chosen_as_ever(chosen, order):
    class Shuffled(Nameless):
        def collect(self, message_ids, *, timeout):
            replies = list(super().collect(message_ids, timeout=timeout))
            return [replies[i] for i in order if i < len(replies)]

    assert asked(half(Shuffled(toy_app(), NODES))) == chosen


@pytest.mark.parametrize("hesitation", [(0,) * 6, (3, 0, 1, 0, 2, 0), (0, 5, 5, 5, 5, 5)])
def test_nodes_that_introduce_themselves_late_are_chosen_as_ever(chosen, hesitation, caplog):
    grid = MeteredGrid(Hesitant(toy_app(), hesitation))
    assert asked(half(grid)) == chosen
    assert "no_name" not in caplog.text
    # Each is asked once, however long it takes.
    assert grid.by_round[0].messages_down == NODES


class Returning(SuperLinkGrid):
    """Whoever dies with a message in hand is back when all have been asked for their replies."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gone, self.looks = [], 0

    def killed(self, node):
        super().killed(node)
        self.gone.append(node)

    def get_node_ids(self):
        self.looks += bool(self.gone)
        if self.looks == len(self.configs):
            for node in self.gone:
                self.start(node)
            self.gone, self.looks = [], 0
        return super().get_node_ids()


def test_a_node_that_is_lost_while_it_introduces_itself_is_asked_again_and_chosen_as_ever(chosen):
    grid = Returning(toy_app(), [{"partition-id": i} for i in range(NODES)])
    grid.dies = dict.fromkeys(list(grid.configs)[1:3], 1)
    metered = MeteredGrid(grid)
    assert asked(half(metered)) == chosen
    assert metered.by_round[0].messages_down == NODES + 2


def test_a_node_that_never_says_its_name_goes_by_its_id_and_the_run_goes_on(caplog):
    """The others answer at the first look, before any time is up."""
    grid = Hesitant(toy_app(), (0, 0, 10**9, 0, 0, 0))
    silent = list(grid.configs)[2]
    result = half(grid, timeout=0.01)
    assert all(len(nodes) == 3 for nodes in asked(result))
    assert f"event=no_name node=#{silent} timeout=0.01" in caplog.text
    assert caplog.text.count("event=no_name") == 1


def test_a_node_that_joins_later_is_asked_for_its_name_before_the_next_choice():
    """Seven from the second round on, whatever ids they have."""

    class Joining(Callback):
        def __init__(self, grid):
            self.grid = grid

        def on_round_end(self, record):
            if record.round == 1:
                self.grid.register({"partition-id": NODES})

    def run():
        grid = SuperLinkGrid(toy_app(), [{"partition-id": i} for i in range(NODES)])
        metered = MeteredGrid(grid)
        strategy = FedAvg(fraction_train=0.5, seed=4, callbacks=[Joining(grid)])
        result = start(strategy, metered, 5)
        assert metered.by_round[0].messages_down == NODES + 1
        return asked(result)

    first = run()
    assert "6" in {name for names in first for name in names}
    assert all(run() == first for _ in range(3))
