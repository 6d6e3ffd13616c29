"""Whatever a strategy plays: nodes evaluate the model with their own handlers if asked to."""

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from helpers_gems import initial, linear_app, node_data

from gems_flwr.errors import OptionError
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.strategies.ensemble import Ensemble
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.strategies.local_models import LocalModels


def evaluating_app():
    """An ordinary app with our mod, and an evaluate handler of its own."""
    app = linear_app()

    @app.evaluate()
    def evaluate(message, context):
        weight, bias = message.content["arrays"].to_numpy_ndarrays()
        x, y = node_data(context, 1)
        right = (x.numpy() @ weight.T + bias).argmax(1) == y.numpy()
        metrics = MetricRecord({"own_accuracy": float(right.mean()), "num-examples": len(y)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


@pytest.mark.parametrize("strategy", [Gems, LayerwiseGems])
def test_a_space_and_then_the_apps_own_evaluation(strategy):
    grid = InProcessGrid(evaluating_app(), 2)
    result = strategy(fraction_evaluate=1.0).start(grid, initial())
    assert result.evaluate_metrics_clientapp[1]["own_accuracy"] > 0.9
    assert result.history[1].exchanges == ("space", "evaluate")


def test_without_being_asked_nobody_evaluates():
    result = Gems().start(InProcessGrid(evaluating_app(), 2), initial())
    assert result.evaluate_metrics_clientapp == {}
    assert result.history[1].exchanges == ("space",)


def test_a_subclass_hears_of_every_round_even_if_nobody_evaluates():
    """As in Flower, whose loop calls both methods whatever the fraction is."""
    heard = []

    class Listening(Gems):
        def aggregate_evaluate(self, server_round, replies):
            heard.append((server_round, list(replies)))
            return super().aggregate_evaluate(server_round, replies)

    Listening().start(InProcessGrid(evaluating_app(), 2), initial())
    assert heard == [(1, [])]


@pytest.mark.parametrize("strategy", [LocalModels, Ensemble])
def test_models_of_all_nodes_cannot_be_evaluated_by_one(strategy):
    with pytest.raises(OptionError, match="fraction_evaluate must be 0"):
        strategy(fraction_evaluate=1.0)
