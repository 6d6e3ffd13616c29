"""What the server does."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from gems_flwr import Gems  # was: from flwr.serverapp.strategy import FedAvg

from quickstart.task import Classifier

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn, and keep the model."""
    torch.manual_seed(int(context.run_config["seed"]))
    arrays = ArrayRecord(Classifier().state_dict())
    strategy = Gems(verify=True)  # was: FedAvg()
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    folder = Path(str(context.run_config["output"])).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Saving the model in {folder}")
    torch.save(result.arrays.to_torch_state_dict(), folder / "final_model.pt")
