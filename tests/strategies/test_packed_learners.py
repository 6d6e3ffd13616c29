"""Models that live on the nodes, and travel as differences in a few bits.

The model is a matrix (vectors of a few numbers are not rounded) and steps do not depend on it, so
the mean of all models walks by the mean of the steps, whatever is averaged when.
"""

import numpy as np
import pytest
from helpers_learners import Troubled, fail, initial, mean_walk, walking_app
from helpers_packed import HALF_STEP, TAMPERED, PackedGrid, beside, two

from gems_flwr import DynamicAveraging, InProcessGrid, PeriodicAveraging
from gems_flwr.core.folder import CheckpointFolder
from gems_flwr.core.records import to_numpy
from gems_flwr.errors import CheckpointError
from gems_flwr.strategies.local_learners import LearnerState

SIZE = (30, 20)


def play(strategy, app=None, nodes=5, rounds=9, grid=None, start=None, **options):
    grid = grid or InProcessGrid(app or walking_app(size=SIZE), nodes)
    return strategy.start(grid, start or initial(SIZE), num_rounds=rounds, **options)


def weights_of(result):
    return result.arrays["w"].numpy()


def memory_in(folder):
    groups, _ = CheckpointFolder(folder).load()
    return LearnerState.from_memory(groups["memory"])


def left_over_on(grid):
    left = [state.get("learner-left_over") for state in grid.states()]
    return [np.zeros(SIZE) if each is None else each["w"].numpy() for each in left]


PROTOCOLS = {
    "dynamic": lambda **kw: DynamicAveraging(delta=3.0, **kw),
    "total": lambda **kw: DynamicAveraging(delta=3.0, condition="total", augmentation="all", **kw),
    "fraction": lambda **kw: PeriodicAveraging(b=2, fraction=0.5, **kw),
    "weighted": lambda **kw: PeriodicAveraging(b=3, weighted=True, **kw),
}
every_form = pytest.mark.parametrize("form", ["int8", "int4"])


@every_form
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_result_is_the_mean_of_all_models_but_for_what_is_left_over(protocol, form, tmp_path):
    """Error feedback: nothing is lost, it is only said later.

    A message says f − r + e − e' where e was left over before and e' after, and averaging keeps the
    (weighted) mean. So mean(f + e) + L, with what the server has left over for each node as L,
    never changes but by the steps. In the end all f are the result R: R = mean walk − mean(e) − L.
    And nodes and server have the same reference to the last bit.
    """
    strategy = PROTOCOLS[protocol](compress=form, checkpoint_dir=tmp_path)
    grid = Troubled(walking_app(size=SIZE), 5)
    result = play(strategy, grid=grid)
    counts = [1, 2, 3, 4, 5] if strategy.weighted else None
    learners = memory_in(tmp_path)
    left = np.average(left_over_on(grid), axis=0, weights=counts) + learners.left_over["w"]
    expected = mean_walk(range(5), range(1, 10), SIZE, counts)
    assert weights_of(result) + left == pytest.approx(expected, abs=2e-6)
    # Every difference here is below 2, so each of the two is off by two half steps at most.
    plain = weights_of(play(PROTOCOLS[protocol]()))
    assert np.abs(weights_of(result) - plain).max() < 4 * HALF_STEP[form]
    assert result.arrays["steps"].numpy() == 0
    for number, state in enumerate(grid.states()):
        assert state["learner-notes"]["reference_version"] == learners.known[str(number)][1]
        own = to_numpy(state["learner-reference"])
        assert all(np.array_equal(own[k], learners.reference[k]) for k in own)


def test_the_initial_model_is_sent_in_half_precision_and_the_rest_with_the_first_average(tmp_path):
    """1/3 is off by 8e-5 in half precision: nodes begin with that, the server says the rest."""
    start = initial(SIZE, np.float32)
    start["w"] = type(start["w"])(np.full(SIZE, 1 / 3, np.float32))
    grid = Troubled(walking_app(size=SIZE), 3)
    strategy = PeriodicAveraging(b=1, compress="int8", checkpoint_dir=tmp_path, final_sync=False)
    play(strategy, grid=grid, rounds=1, start=start)
    assert np.abs(grid.states()[0]["learner-reference"]["w"].numpy() - 1 / 3).max() > 7e-5
    strategy = PeriodicAveraging(b=1, compress="int8", checkpoint_dir=tmp_path)
    result = play(strategy, grid=grid, rounds=3, start=start, resume=True)
    left = np.mean(left_over_on(grid), axis=0) + memory_in(tmp_path).left_over["w"]
    expected = 1 / 3 + mean_walk(range(3), range(1, 4), SIZE)
    assert weights_of(result) + left == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("form", "most"), [("int8", 0.27), ("int4", 0.15)])
def test_fifty_thousand_gaussian_weights_take_a_fraction_of_their_bytes(form, most):
    """Of the first model, which no node has, half; of all others what their bits say.

    No model is sent whole to who has the reference, not even by the synchronisation that ends a run
    which has just had one.
    """
    size = (250, 200)

    def run(compress):
        grid = Troubled(walking_app(size=size), 4)
        strategy = PeriodicAveraging(b=1, compress=compress)
        return strategy.start(grid, initial(size, np.float32), 12).traffic, grid.sent

    (packed, sent), (plain, _) = run(form), run("float32")
    assert packed.bytes_up <= most * plain.bytes_up
    assert packed.bytes_down <= most * plain.bytes_down
    assert packed.messages_down == plain.messages_down
    assert ["layout" in content.get("arrays", {}) for *_, content in sent] == [True] * 4 + [
        False
    ] * (len(sent) - 4)


@pytest.mark.parametrize("protocol", ["dynamic", "fraction"])
@pytest.mark.parametrize(
    "away", [{"misses": [2, 3]}, {"unheard": [3, 5, 6]}, {"forgets": [4]}, {"joins": 4}]
)
def test_a_node_that_was_away_is_brought_up_to_date(protocol, away, tmp_path):
    """It got no message, its reply was lost (it is further than the server knows), it restarted or
    joined late: nothing but rounding differs from the run with whole models.
    """
    grid = Troubled(walking_app(size=SIZE), 4, **away)
    result = play(PROTOCOLS[protocol](compress="int4", checkpoint_dir=tmp_path), grid=grid)
    plain = play(PROTOCOLS[protocol](), grid=Troubled(walking_app(size=SIZE), 4, **away))
    gone = {(number, "0") for number in away.get("misses", []) + away.get("unheard", [])}
    assert {(number, f.node) for number, f in result.failures} <= gone
    assert np.abs(weights_of(result) - weights_of(plain)).max() < 6 * HALF_STEP["int4"]
    learners = memory_in(tmp_path)
    for state in grid.states():
        own = state["learner-reference"]["w"].numpy()
        assert np.array_equal(own, learners.reference["w"])


DIVERGED = {
    "nan": lambda model: {**model, "w": model["w"] * np.nan},
    "infinity": lambda model: {**model, "w": model["w"] + np.inf},
    "far": lambda model: {**model, "w": model["w"] * 1e28},
}


@pytest.mark.parametrize("how", DIVERGED)
def test_a_node_that_diverges_is_named_restarts_and_spoils_nothing_later(how):
    """Its left-over went with its model: what it sends two rounds later is that of another run."""
    app = walking_app({(2, 2): DIVERGED[how], (1, 5): fail}, size=SIZE)
    strategy = DynamicAveraging(delta=0.01, augmentation="all", compress="int4")
    result = play(strategy, app, nodes=4, rounds=6)
    assert [(number, f.node) for number, f in result.failures] == [(2, "2"), (5, "1")]
    assert np.abs(weights_of(result)).max() < 2
    assert [len(r.nodes_answered) for r in result.history[1:]] == [4, 3, 4, 4, 3, 4]


LIES = [TAMPERED[n] for n in ("codes cut", "codes bomb", "scales nan", "surprise", "whole")]


@pytest.mark.parametrize(
    ("tamper", "words"), [*LIES, (beside, "one packed model"), (two, "one packed model")]
)
def test_a_learner_that_lies_is_named_and_restarts(tamper, words):
    grid = PackedGrid(walking_app(size=SIZE), 4, tamper={(2, 2): tamper})
    result = play(PeriodicAveraging(b=1, compress="int8"), grid=grid, rounds=5)
    [(number, failure)] = result.failures
    assert (number, failure.node) == (2, "2")
    assert words in failure.reason, failure.reason
    assert (3, "train", 2, "whole") in grid.sent
    assert len(result.history[3].nodes_answered) == 4
    assert np.abs(weights_of(result)).max() < 3


def test_killed_at_any_message_after_the_first_round_it_goes_on_to_the_last_bit(tmp_path):
    """A node whose reply was lost with the server answers with the same bytes when asked again."""
    counting = Troubled(walking_app(size=SIZE), 3)
    unbroken = play(PROTOCOLS["dynamic"](compress="int4"), grid=counting, rounds=4)
    for at in range(4, counting.count + 1, 2):
        grid, made = Troubled(walking_app(size=SIZE), 3, dies=at), {"compress": "int4"}
        made["checkpoint_dir"] = tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt):
            play(PROTOCOLS["dynamic"](**made), grid=grid, rounds=4)
        resumed = play(PROTOCOLS["dynamic"](**made), grid=grid, rounds=4, resume=True)
        assert np.array_equal(weights_of(resumed), weights_of(unbroken)), at
        assert resumed.details["synchronisations"] == unbroken.details["synchronisations"]


def test_a_checkpoint_of_another_form_is_refused(tmp_path):
    play(DynamicAveraging(compress="int8", checkpoint_dir=tmp_path), rounds=2)
    with pytest.raises(CheckpointError, match="compress=int8, this run has int4"):
        play(DynamicAveraging(compress="int4", checkpoint_dir=tmp_path), resume=True)
