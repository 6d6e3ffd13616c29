"""What the server does."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from gems_flwr import Gems  # was: from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net, load_centralized_dataset, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn, and keep the model."""
    torch.manual_seed(int(context.run_config["seed"]))
    arrays = ArrayRecord(Net().state_dict())
    strategy = Gems(verify=True)  # was: FedAvg(fraction_evaluate=0.5)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": float(context.run_config["learning-rate"])}),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=global_evaluate,
    )
    folder = Path(str(context.run_config["output"])).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Saving the model in {folder}")
    torch.save(result.arrays.to_torch_state_dict(), folder / "final_model.pt")


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test a model on the images that no node has."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    loss, accuracy = test(model, load_centralized_dataset(), device)
    return MetricRecord({"accuracy": accuracy, "loss": loss})
