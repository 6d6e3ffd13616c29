"""What the server does."""

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from gems_flwr import Gems

from quickstart.task import from_arrays, new_model, test_data, to_arrays

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test a model on the digits that no node has."""
    return MetricRecord({"accuracy": float(from_arrays(arrays).score(*test_data()))})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn, and keep the model."""
    strategy = Gems(space="cone", verify=True)
    result = strategy.start(
        grid=grid,
        initial_arrays=to_arrays(new_model()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    if output := context.run_config["output"]:
        np.savez(str(output), *result.arrays.to_numpy_ndarrays())
