"""The experiments: Hydra runs, the Flower app, data sets, models and reports."""
