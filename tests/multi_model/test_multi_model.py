"""Several models on the same nodes, over the in-process grid."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_multi_model import (
    Several,
    Watching,
    app_of,
    echo,
    examples_of,
    initial,
    pull,
    pulling_app,
    several_mod,
    start_models,
)

from gems_flwr import FedAvg, InProcessGrid, MultiModel, Tolerance
from gems_flwr.averaging import best_beta, data_shares, draw_assignment, optimal_probabilities
from gems_flwr.core import generator
from gems_flwr.core.records import pack_name, to_numpy, to_record
from gems_flwr.errors import MultiModelError
from gems_flwr.strategies.multi_model import AboutModels, split_models


def play(strategy, app=None, nodes=6, rounds=5, grid=None, start=None, resume=False):
    grid = grid or InProcessGrid(app or pulling_app(), nodes)
    return strategy.start(grid, start or initial(), num_rounds=rounds, resume=resume)


def final(result):
    return split_models(to_numpy(result.arrays))


def counts(nodes=6, names=("a", "b")):
    return np.array([[examples_of(i).get(m, 0) for m in names] for i in range(nodes)])


def full_rounds(rounds, nodes=6):
    """Full participation by hand: w − Σ d U, model by model."""
    shares, models = data_shares(counts(nodes)), start_models()
    w = {name: arrays["w"] for name, arrays in models.items()}
    for _ in range(rounds):
        w = {
            m: w[m] - sum(shares[i, s] * pull(i, m, w[m]) for i in range(nodes))
            for s, m in enumerate(w)
        }
    return w


# --- what it comes to -----------------------------------------------------------------------------


def test_full_participation_is_the_weighted_step_of_every_model():
    result = play(MultiModel(sampling="full"))
    for model, expected in full_rounds(5).items():
        assert final(result)[model]["w"] == pytest.approx(expected)
    assert result.history[-1].train_metrics["step_size/a"] == pytest.approx(1)
    assert result.details["sampled"]["0"] == {"a": 5}


@pytest.mark.parametrize("sampling", ["random", "lvr", "gvr", "stale", "fedvarp", "mifa"])
def test_with_budget_for_everything_every_method_is_full_participation(sampling):
    result = play(MultiModel(sampling=sampling, budget=11))
    for model, expected in full_rounds(5).items():
        assert final(result)[model]["w"] == pytest.approx(expected)


def pull_only_model(message: Message, context: Context) -> Message:
    """An ordinary handler that knows nothing of models' names."""
    node = int(context.node_config["partition-id"])
    arrays = to_numpy(message.content["arrays"])
    trained = {"w": arrays["w"] - pull(node, "a", arrays["w"]), "n": arrays["n"] + 1}
    metrics = MetricRecord({"num-examples": node + 1, "loss": 1.0})
    content = RecordDict({"m": to_record(trained), "metrics": metrics})
    content["node"] = pack_name(str(node))["node"]
    return Message(content, reply_to=message)


@pytest.mark.parametrize("sampling", ["random", "gvr", "lvr"])
def test_one_model_and_a_budget_for_all_nodes_is_fedavg_bit_for_bit(sampling):
    mod = several_mod(
        lambda c: Several({"model": int(c.node_config["partition-id"]) + 1}, 1, lambda *_: 1.0)
    )
    # The very same app: the mod is inert for FedAvg.
    app = ClientApp(mods=[mod])
    app.train()(pull_only_model)
    start = to_record(start_models(("a",))["a"])
    theirs = FedAvg().start(InProcessGrid(app, 7), start, num_rounds=4)
    ours = play(MultiModel(sampling=sampling, budget=7), app, nodes=7, rounds=4, start=start)
    assert ours.arrays.keys() == theirs.arrays.keys()
    for key, array in ours.arrays.items():
        assert array.numpy().tobytes() == theirs.arrays[key].numpy().tobytes()


@pytest.mark.parametrize("sampling", ["random", "gvr"])
def test_no_node_trains_more_than_its_capacity_and_models_it_lacks(sampling):
    result = play(MultiModel(sampling=sampling, budget=4), pulling_app(capacity=1), rounds=12)
    assert result.failures == ()
    assert "b" not in result.details["sampled"].get("0", {})
    drawn = [r.train_metrics["pairs_drawn"] for r in result.history[1:]]
    assert max(drawn) <= 6
    assert np.mean(drawn) == pytest.approx(4, abs=1.2)
    json.dumps(result.details)


def test_stale_updates_are_corrected_with_the_best_beta():
    """Two rounds by hand; what was drawn in the first is h in the second."""
    strategy = MultiModel(sampling="stale", budget=3, seed=1)
    result = play(strategy, rounds=2)
    shares, models = data_shares(counts()), ("a", "b")
    w = {m: arrays["w"] for m, arrays in start_models().items()}
    old = {}
    for number in (1, 2):
        updates = {(i, m): pull(i, m, w[m]) for i in range(6) for m in models}
        rest = np.zeros((6, 2))
        beta = {}
        for i in range(6):
            for s, m in enumerate(models):
                h = old.get((i, m), np.zeros_like(w[m]))
                beta[i, m] = best_beta(updates[i, m].ravel(), h.ravel())
                rest[i, s] = np.linalg.norm(updates[i, m] - beta[i, m] * h)
        p = optimal_probabilities(shares * rest, 3, 2)
        drawn = draw_assignment(p, generator(1, "assign", number))
        new = {}
        for s, m in enumerate(models):
            step = np.zeros_like(w[m])
            for i in range(6):
                h = beta[i, m] * old.get((i, m), np.zeros_like(w[m]))
                step += shares[i, s] * h
                if drawn[i, s]:
                    step += shares[i, s] / p[i, s] * (updates[i, m] - h)
            new[m] = w[m] - step
        old |= {
            (i, m): updates[i, m] for i in range(6) for s, m in enumerate(models) if drawn[i, s]
        }
        w = new
    for m in models:
        assert final(result)[m]["w"] == pytest.approx(w[m])
    assert result.details["server_memory_bytes"] == sum(h.nbytes for h in old.values())


@pytest.mark.parametrize("sampling", ["lvr", "stale"])
def test_a_node_that_claims_a_million_examples_owns_the_models_unless_it_is_capped(sampling):
    """Nodes have k + 1 examples, node 5 claims a million; capped at 6 it is as if it were honest.

    With a budget for all pairs every method takes the full step, by shares of the examples.
    """

    def boast(node, names):
        return {n: 10**6 if node == 5 else count for n, count in examples_of(node, names).items()}

    def run(**options):
        strategy = MultiModel(sampling=sampling, budget=11, **options)
        return play(strategy, pulling_app(holdings=boast), rounds=2)

    owned, capped = final(run()), run(tolerance=Tolerance(max_examples=6))
    for model, honest in full_rounds(2).items():
        alone = pull(5, model, np.zeros(honest.shape))
        alone = -alone - pull(5, model, -alone)
        assert owned[model]["w"] == pytest.approx(alone, abs=1e-3)
        assert final(capped)[model]["w"] == pytest.approx(honest)
    # The result has its claim.
    assert capped.details["examples"]["5"] == {"a": 10**6, "b": 10**6}


def test_the_cap_holds_for_the_weights_of_metrics():
    """Node 0 trains on one example with loss 0, node 1 claims a million and 1: not 1, 1/2."""

    def train(message: Message, context: Context) -> Message:
        node, reply = int(context.node_config["partition-id"]), echo(message, context)
        numbers = {"num-examples": [1, 10**6][node], "loss": float(node)}
        reply.content["metrics"] = MetricRecord(numbers)
        return reply

    strategy = MultiModel(sampling="full", tolerance=Tolerance(max_examples=1))
    result = play(strategy, app_of(train, examples=1), nodes=2, rounds=1)
    assert result.history[-1].train_metrics["loss"] == pytest.approx(0.5)


# --- messages -------------------------------------------------------------------------------------


def test_a_train_message_carries_exactly_the_models_that_its_node_trains():
    grid = Watching(pulling_app(calls=(calls := [])), 6)
    result = play(MultiModel(sampling="fedvarp", budget=4), grid=grid)
    train = [(n, r, keys) for n, r, a, keys in grid.seen if a == "train"]
    assert {(n, r, key.split("/")[1]) for n, r, keys in train for key in keys} == set(calls)
    assert len(train) == len({(n, r) for n, r, _ in train})
    # Nodes report what they have once, and that counts as a message, too.
    assert [r for _, r, a, _ in grid.seen if a == "holdings"] == [1] * 6
    assert result.traffic.messages_down == len(grid.seen)


def test_with_lvr_a_model_goes_down_once_per_version_and_training_needs_no_weights():
    grid = Watching(pulling_app(), 6)
    result = play(MultiModel(sampling="lvr", budget=3), grid=grid, rounds=4)
    asked = [(n, r, keys) for n, r, a, keys in grid.seen if a == "losses"]
    assert len(asked) == 6 * 4
    assert all(keys == [] for _, _, a, keys in grid.seen if a == "train")
    # A model that nobody trained in a round is still the current one, and is not sent again.
    for number in (2, 3, 4):
        sizes = result.history[number - 1].train_metrics
        changed = {m for m in ("a", "b") if sizes[f"step_size/{m}"] > 0}
        for node, r, keys in asked:
            if r == number:
                assert {k.split("/")[1] for k in keys} == changed & set(examples_of(node))


def test_with_gvr_everything_is_trained_once_and_only_what_is_drawn_goes_up():
    calls = []
    grid = Watching(pulling_app(calls=calls), 6)
    result = play(MultiModel(sampling="gvr", budget=3), grid=grid, rounds=4)
    assert len(calls) == len(set(calls)) == 4 * 11
    sends = [keys for _, _, a, keys in grid.seen if a == "send"]
    assert all(keys == [] for keys in sends)
    drawn = sum(n for by in result.details["sampled"].values() for n in by.values())
    assert drawn == sum(r.train_metrics["pairs"] for r in result.history[1:])


# --- failures -------------------------------------------------------------------------------------


def fail(_):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("sampling", ["random", "lvr", "stale", "mifa"])
def test_a_fault_drops_this_models_contribution_only_and_the_coefficients_say_so(sampling):
    """Node 5 cannot train b in round 2; everything is drawn, so the rest is known by hand."""
    app = pulling_app({(5, 2, "b"): fail})
    result = play(MultiModel(sampling=sampling, budget=11), app, rounds=2)
    shares = data_shares(counts())
    (lost,) = result.details["lost"]
    assert (lost["round"], lost["node"], lost["model"]) == (2, "5", "b")
    assert lost["coefficient"] == pytest.approx(shares[5, 1])
    assert "out of memory" in lost["reason"]
    metrics = result.history[2].train_metrics
    assert metrics["step_size/a"] == pytest.approx(1)
    assert metrics["step_size/b"] == pytest.approx(1 - shares[5, 1])
    if sampling in ("random", "lvr"):
        w = full_rounds(1)["b"]
        expected = w - sum(shares[i, 1] * pull(i, "b", w) for i in range(5))
        assert final(result)["b"]["w"] == pytest.approx(expected)
    assert final(result)["a"]["w"] == pytest.approx(full_rounds(2)["a"])


@pytest.mark.parametrize("action", ["losses", "train"])
def test_a_silent_node_is_out_of_the_round_and_back_in_the_next(action):
    grid = Watching(pulling_app(), 6, away={(4, 2, action)})
    result = play(MultiModel(sampling="lvr", budget=11), grid=grid, rounds=3)
    assert {(n, f.node) for n, f in result.failures} == {(2, "4")}
    assert {(x["round"], x["node"], x["model"]) for x in result.details["lost"]} == {
        (2, "4", "a"),
        (2, "4", "b"),
    }
    assert result.history[3].train_metrics["step_size/a"] == pytest.approx(1)


@pytest.mark.parametrize(("sampling", "action"), [("lvr", "train"), ("stale", "send")])
def test_a_node_that_lost_its_state_in_the_middle_of_a_round_is_given_the_model_again(
    sampling, action
):
    grid = Watching(pulling_app(), 6, forget={(4, 2, action)})
    result = play(MultiModel(sampling=sampling, budget=11), grid=grid, rounds=4)
    assert result.details["lost"] == []
    for model, expected in full_rounds(4).items():
        assert final(result)[model]["w"] == pytest.approx(expected)


def test_an_update_that_never_arrived_is_no_control_variate():
    """The node has sent its update of round 2 as well, but the server has used round 1's alone."""
    grid, models = InProcessGrid(pulling_app(), 1), start_models(("a",))
    (node,) = grid.get_node_ids()

    def ask(number, action, settled):
        models["a"]["w"] = np.arange(3.0) ** number
        question = AboutModels("run", action, {"a": number}, "residual", settled, models=models)
        beside = question.beside({"a": to_record(models["a"])}, {})
        config = ConfigRecord({"server-round": number, "run-seed": 0})
        content = RecordDict({**question.to_records(), **beside, "config": config})
        message = Message(content, dst_node_id=node, message_type="train")
        (reply,) = grid.send_and_receive([message])
        return reply if reply.has_error() else question.read(reply.content).parts["a"]

    for number, settled in ((1, {}), (2, {"a": 1})):
        ask(number, "train", settled)
        ask(number, "send", settled)
    part = ask(3, "train", {"a": 1})
    first, third = (pull(0, "a", np.arange(3.0) ** number) for number in (1, 3))
    assert part.beta == pytest.approx(best_beta(third, first))
    assert part.norm == pytest.approx(np.linalg.norm(third - part.beta * first))
    assert "a message of round 2 came after round 3" in ask(2, "train", {}).error.reason


def test_scaffold_needs_more_than_an_ordinary_handler():
    result = play(MultiModel(sampling="scaffold", budget=11), rounds=1)
    assert "does not do; use task_client_app" in result.failures[0][1].reason


# --- bad input ------------------------------------------------------------------------------------


def test_a_budget_beyond_the_capacities_is_refused_with_what_is_possible():
    with pytest.raises(MultiModelError, match="budget is 7, but the 6 nodes can train at most 6"):
        play(MultiModel(budget=7), pulling_app(capacity=1))


def test_a_model_nobody_has_data_for_is_named():
    app = pulling_app(holdings=lambda node, names: {"a": 5})
    with pytest.raises(MultiModelError, match=r"no node has data for 'b'.*nodes have \['a'\]"):
        play(MultiModel(), app)


@pytest.mark.parametrize("sampling", ["lvr", "stale"])
def test_without_any_importance_sampling_is_uniform_and_says_so(sampling):
    """Nobody moves a weight, and every loss is 0."""
    app = app_of(echo, examples=3, loss=lambda *_: 0.0)
    with np.errstate(all="raise"):
        result = play(MultiModel(sampling=sampling, budget=4), app, rounds=2)
    assert result.details["uniform_rounds"] == [1, 2]
    assert result.failures == ()
    assert final(result)["a"]["w"] == pytest.approx(np.zeros(3))


# --- order, resuming ------------------------------------------------------------------------------


class DiesOnce(InProcessGrid):
    """The server dies in the middle of round 2, after two nodes have trained."""

    dead, count = False, 0

    def _deliver(self, message, timeout):
        if message.content["config"]["server-round"] == 2 and not self.dead:
            self.count += 1
            if self.count == 3:
                self.dead = True
                raise KeyboardInterrupt
        return super()._deliver(message, timeout)


def test_an_interrupted_round_trains_no_model_twice(tmp_path):
    calls = []
    grid = DiesOnce(pulling_app(calls=calls), 6)
    options = {"sampling": "stale", "budget": 5, "checkpoint_dir": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        play(MultiModel(**options), grid=grid, rounds=3)
    resumed = play(MultiModel(**options), grid=grid, rounds=3, resume=True)
    assert len(calls) == len(set(calls)) == 3 * 11
    unbroken = play(MultiModel(sampling="stale", budget=5), rounds=3)
    assert resumed.details == unbroken.details
    for key, array in unbroken.arrays.items():
        assert array.numpy().tobytes() == resumed.arrays[key].numpy().tobytes()


def test_what_a_handler_noted_before_it_failed_does_not_count():
    """It counts its calls in the node's state; the one that raises leaves no trace."""
    seen = []

    def train(message: Message, context: Context) -> Message:
        calls = context.state.get("calls", MetricRecord({"n": 0}))["n"] + 1
        context.state["calls"] = MetricRecord({"n": calls})
        seen.append(calls)
        if message.content["config"]["server-round"] == 2:
            raise RuntimeError("out of memory")
        return echo(message, context)

    start = to_record({"w": np.zeros(2)})
    app = app_of(train, examples=1, names=("model",))
    strategy = MultiModel(sampling="full", min_nodes=1)
    result = play(strategy, app, nodes=1, rounds=3, start=start)
    assert seen == [1, 2, 2]
    assert [number for number, _ in result.failures] == [2]
