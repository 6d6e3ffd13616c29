"""Merged layers keep the app's widths; other widths are tried before anything is paid for."""

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord
from helpers_layerwise import initial as blob_initial
from helpers_layerwise import ready_app
from helpers_quickstart import (
    FlexibleNet,
    Net,
    evaluate_with,
    initial_arrays,
    quickstart_app,
)

from gems_flwr import (
    InProcessGrid,
    LayerwiseGems,
    MeteredGrid,
    ModelError,
    Neurons,
    RoundFailedError,
    resize_model,
)
from gems_flwr.networks.layers import weight_layers
from gems_flwr.networks.other_widths import try_other_widths, widened
from gems_flwr.wire.records import to_numpy

CONFIG = ConfigRecord({"lr": 0.05})
FEW = Neurons(directions=20, max_rows=500)


def start(strategy, app, nodes=3, net=Net, **options):
    grid = MeteredGrid(app if isinstance(app, InProcessGrid) else InProcessGrid(app, nodes))
    result = strategy.start(
        grid=grid, initial_arrays=initial_arrays(net), train_config=CONFIG, **options
    )
    return result, grid


# --- the app's own widths ---------------------------------------------------------------------


def test_a_quickstart_app_needs_three_lines():
    """Strategy, mod and freeze_layers; module, forward and evaluate_fn stay as they are."""
    strategy = LayerwiseGems(neurons=FEW)
    result, _ = start(strategy, quickstart_app(), evaluate_fn=evaluate_with())
    assert result.failures == ()
    assert {key: array.shape for key, array in to_numpy(result.arrays).items()} == {
        key: array.shape for key, array in to_numpy(initial_arrays()).items()
    }
    scores = [record.server_metrics["accuracy"] for record in result.history]
    assert len(scores) == 6
    assert scores[-1] > 0.85 > 0.3 > scores[0]


def test_a_quickstart_app_that_forgets_to_freeze_is_told_after_one_step():
    steps = {}
    with pytest.raises(RoundFailedError, match=r"^write freeze_layers.*\['conv1.weight'\]"):
        start(LayerwiseGems(neurons=FEW), quickstart_app(freeze=False, steps=steps))
    assert [steps[2, node] for node in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("merge", ["kmeans", "verified", "concat"])
@pytest.mark.parametrize("options", [{}, {"budget": "drop"}, {"robust": True}])
def test_every_merge_keeps_the_widths(merge, options):
    strategy = LayerwiseGems(merge=merge, neurons=Neurons(directions=20), **options)
    result = strategy.start(InProcessGrid(ready_app((8, 5)), 3), blob_initial((8, 5)))
    assert result.details["hidden"] == [8, 5]
    for layer in result.details["layers"]:
        assert layer["merged"] == len(layer["origins"])


def test_too_few_different_neurons_are_filled_up():
    """At so large a deviation all neurons of a layer would be one."""
    strategy = LayerwiseGems(neurons=Neurons(epsilon=1e3, directions=20), clusters=1)
    result = strategy.start(InProcessGrid(ready_app((8, 5)), 3), blob_initial((8, 5)))
    assert result.details["hidden"] == [8, 5]
    assert result.details["layers"][0]["uncovered"] == []


# --- other widths -----------------------------------------------------------------------------


class Refusing(InProcessGrid):
    """Notes what is sent."""

    def __init__(self, app, nodes):
        super().__init__(app, nodes)
        self.sent = []

    def _deliver(self, message, timeout):
        self.sent.append("arrays" in message.content)
        return super()._deliver(message, timeout)


@pytest.mark.parametrize("limit", [None, 30, [8, 16, 40, 24]])
def test_a_forward_with_sizes_in_it_is_refused_before_a_network_is_sent(limit):
    steps = {}
    grid = Refusing(quickstart_app(steps=steps), 3)
    words = r"^keep the app's widths \(max_hidden=\"same\"\), or .*torch.flatten.*Net does not run"
    with pytest.raises(RoundFailedError, match=words) as caught:
        start(LayerwiseGems(max_hidden=limit, neurons=FEW), grid)
    assert grid.sent == [False] * 3
    assert steps == {}
    assert [failure.node for failure in caught.value.failures] == ["0", "1", "2"]
    assert str(caught.value).count("torch.flatten") == 1


def test_an_evaluation_that_cannot_take_other_widths_is_refused_before_anything_is_sent():
    grid = Refusing(quickstart_app(net=FlexibleNet), 3)
    words = r"^write model = resize_model\(Net\(\), arrays\) in evaluate_fn"
    with pytest.raises(ModelError, match=words):
        start(LayerwiseGems(max_hidden=None), grid, evaluate_fn=evaluate_with(FlexibleNet))
    assert grid.sent == []


def test_one_node_that_cannot_is_left_out_by_name_and_the_others_go_on():
    class Mixed:
        def __init__(self):
            self.apps = [ready_app((8, 5)), quickstart_app()]

        def __call__(self, message, context):
            return self.apps[context.node_config["partition-id"] == 1](message, context)

    options = {"max_hidden": None, "neurons": Neurons(directions=20)}
    grid = Refusing(Mixed(), 4)
    result = LayerwiseGems(**options).start(grid, blob_initial((8, 5)), train_config=CONFIG)
    first = result.history[1]
    assert first.nodes_answered == ("0", "2", "3")
    (failure,) = first.failures
    assert failure.node == "1"
    assert "keep the app's widths" in failure.reason
    # Four questions without a network, then three networks.
    assert grid.sent[:7] == [False] * 4 + [True] * 3


def seen_by(strategy, evaluate=True):
    calls = []

    def evaluate_fn(server_round, arrays):
        calls.append([layer.width for layer in weight_layers(to_numpy(arrays))])
        return MetricRecord({"accuracy": 0.0})

    grid = Refusing(ready_app((8, 5)), 2)
    strategy.start(grid, blob_initial((8, 5)), evaluate_fn=evaluate_fn)
    return calls, grid.sent


def test_other_widths_are_tried_only_if_they_can_come():
    few = {"neurons": Neurons(directions=20), "merge": "concat"}
    calls, sent = seen_by(LayerwiseGems(**few))
    assert calls[0] == [8, 5, 4]
    assert all(sent)
    for options in ({"max_hidden": None}, {"max_hidden": [8, 5]}):
        calls, sent = seen_by(LayerwiseGems(**few, **options))
        assert calls[:2] == [[9, 6, 4], [8, 5, 4]]
        assert sent[:3] == [False, False, True]
    calls, sent = seen_by(LayerwiseGems(**few, max_hidden=None, check_widths=False))
    assert calls[0] == [8, 5, 4]
    assert all(sent)


def test_the_trial_costs_some_bytes_and_changes_nothing():
    def played(**options):
        strategy = LayerwiseGems(max_hidden=None, neurons=Neurons(directions=20), **options)
        grid = MeteredGrid(InProcessGrid(ready_app((8, 5)), 2))
        return strategy.start(grid, blob_initial((8, 5))), grid.total

    (tried, more), (untried, less) = played(), played(check_widths=False)
    assert tried.arrays == untried.arrays
    assert 0 < more.bytes_down - less.bytes_down < 2 * 200
    assert 0 < more.bytes_up - less.bytes_up < 2 * 200


def test_a_widened_network_runs_and_has_one_more_neuron_in_each_hidden_layer():
    arrays = to_numpy(initial_arrays(FlexibleNet))
    wider = widened(arrays)
    widths = [layer.width for layer in weight_layers(wider)]
    assert widths == [9, 17, 41, 25, 10]
    model = resize_model(FlexibleNet(), wider)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    try_other_widths(FlexibleNet(), torch.zeros(2, 1, 8, 8))
    again = widened(arrays)
    assert all(np.array_equal(wider[key], again[key]) for key in wider)


def test_outputs_that_are_not_one_per_sample_are_noticed():
    class Wrong(FlexibleNet):
        def forward(self, x):
            return super().forward(x)[:1]

    with pytest.raises(ModelError, match="2 samples gave 1 outputs"):
        try_other_widths(Wrong(), torch.zeros(2, 1, 8, 8))
