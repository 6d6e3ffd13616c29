"""What the server does."""

from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from gems_flwr import Gems  # was: from flwr.serverapp.strategy import FedAvg

from quickstart.task import create_model, get_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn, and keep the model."""
    model = create_model(float(context.run_config["penalty"]))
    arrays = ArrayRecord(get_params(model))
    strategy = Gems(verify=True)  # was: FedAvg(fraction_train=1.0, fraction_evaluate=1.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    folder = Path(str(context.run_config["output"])).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Saving the model in {folder}")
    coefficients, intercept = result.arrays.to_numpy_ndarrays()
    np.savez(folder / "final_model.npz", coef=coefficients, intercept=intercept)
