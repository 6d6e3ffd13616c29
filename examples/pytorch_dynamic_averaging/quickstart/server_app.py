"""What the server does."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from gems_flwr import DynamicAveraging

from quickstart.task import Net, accuracy, test_data

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test a model on the digits that no node has."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": accuracy(net, test_data())})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn, and keep the model."""
    torch.manual_seed(0)
    strategy = DynamicAveraging(delta=0.7)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    if output := context.run_config["output"]:
        torch.save(result.arrays.to_torch_state_dict(), str(output))
