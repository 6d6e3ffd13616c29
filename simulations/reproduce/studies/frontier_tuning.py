"""Rates for FedAvg and its family, chosen with equal care and without a look at the test data.

First the nodes' options, with plain FedAvg: learning rate, batch size and local epochs, all
combinations (on a lift the rate alone). Then for each method its own options together with the
nodes' rate, around what FedAvg chose. Every candidate plays the same number of rounds, so all have
spent the same bytes up (SCAFFOLD twice as many), and is judged by its last model's accuracy on the
nodes' validation parts, which nobody trains on. The seed is one that no result is made with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from safetensors.numpy import load_file

from gems_flwr import scoring
from gems_flwr.errors import RoundFailedError
from gems_flwr.networks.surgery import resize_model
from gems_flwr.server.members import split_models
from simulations.config import RunConfig, compose_config
from simulations.data.examples import Examples
from simulations.experiment.experiment import experiment_of
from simulations.experiment.multi_model_experiment import MultiModelExperiment
from simulations.reproduce.studies.frontier_methods import FrontierMethod
from simulations.run import run as run_one

SEED = 100
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
# Batch size and epochs of a node in a round: from few long steps to many short ones.
LOCAL = ((4096, 1), (512, 1), (64, 1), (64, 5))
GRIDS: Mapping[str, Mapping[str, Sequence[float]]] = {
    "fedavg": {},
    "fedavgm": {
        "strategy.inner.server_momentum": (0.5, 0.9),
        "strategy.inner.server_learning_rate": (0.3, 1.0),
    },
    "fedadam": {"strategy.inner.eta": (0.01, 0.03, 0.1, 0.3)},
    "fedprox": {"strategy.inner.proximal_mu": (0.01, 0.1, 1.0)},
    "SCAFFOLD": {},
}


@dataclass(frozen=True)
class Trial:
    """A candidate and how often it is right on validation data."""

    method: str
    options: tuple[str, ...]
    accuracy: float


class Tuning:
    """Chooses options of a method, and remembers what was tried.

    Parameters
    ----------
    common : sequence of str
        Overrides of all runs.
    rounds : int
        What a candidate plays, at least 1.
    folder : Path
        Where candidates' runs are kept; finished ones are not repeated.
    console : Console
        Where progress is shown.
    """

    def __init__(self, common: Sequence[str], rounds: int, folder: Path, console: Console) -> None:
        self._common = [*common, f"seed={SEED}", f"rounds={rounds}"]
        self._folder = folder
        self._console = console
        self.trials: list[Trial] = []

    def options_for(self, method: FrontierMethod) -> tuple[str, ...]:
        """Return the best options of a method's grid; nothing for one that has none."""
        if not method.tuned:
            return ()
        # What is trained decides the nodes' rate, so each model has its own.
        model = tuple(each for each in method.overrides if each.startswith("model="))
        rate, local = self._local(model)
        if method.tuned == "fedavg":
            return (_rate(rate), *local)
        grid = GRIDS[method.tuned]
        own = [
            tuple(f"{key}={value:g}" for key, value in zip(grid, values, strict=True))
            for values in itertools.product(*grid.values())
        ]
        near = _around(rate)
        candidates = [(_rate(each), *local, *options) for options in own for each in near]
        return self._best(method.name, method.overrides, candidates)

    def _local(self, model: tuple[str, ...]) -> tuple[float, tuple[str, ...]]:
        """Return the rate, batch size and epochs that are best for FedAvg.

        On a model of its own all rates are tried, with batch size and epochs of the plain one.
        """
        ways = [self._local(())[1]] if model else [_local(*each) for each in LOCAL]
        candidates: dict[tuple[str, ...], tuple[float, tuple[str, ...]]] = {
            (_rate(rate), *way): (rate, way) for rate in RATES for way in ways
        }
        name = "FedAvg" + "".join(f", {each}" for each in model)
        return candidates[self._best(name, ("strategy=fedavg", *model), list(candidates))]

    def _best(
        self, name: str, overrides: Sequence[str], candidates: Sequence[tuple[str, ...]]
    ) -> tuple[str, ...]:
        known = {trial.options: trial for trial in self.trials if trial.method == name}
        for number, options in enumerate(candidates, start=1):
            if options in known:
                continue
            config = compose_config(
                [*overrides, *self._common, *options, "progress=false", f"evaluate_every={10**6}"]
            )
            self._console.print(
                f"[dim]tuning {name}, {number} of {len(candidates)}: {' '.join(options)}[/dim]",
                highlight=False,
                soft_wrap=True,
            )
            known[options] = Trial(name, options, self._score(config))
            self.trials.append(known[options])
        return max((known[options] for options in candidates), key=lambda t: t.accuracy).options

    def _score(self, config: RunConfig) -> float:
        """Return what a candidate reaches; 0 for one whose models ran away and were refused."""
        folder = self._folder / config.run_name()
        try:
            run_one(config, folder, Console(quiet=True))
        except RoundFailedError:
            return 0.0
        return validation_accuracy(config, folder)


def validation_accuracy(config: RunConfig, folder: Path) -> float:
    """Return how often a run's model is right on all nodes' validation parts."""
    experiment = experiment_of(config.to_json())
    if isinstance(experiment, MultiModelExperiment):
        [experiment] = experiment.tasks.values()
    [arrays] = split_models(load_file(folder / "model.safetensors")).values()
    held_out = Examples.concatenate([share.validation for share in experiment.shares])
    model = resize_model(experiment.build_model(), arrays)
    return scoring.score(experiment.predict(model, held_out), held_out.labels)["accuracy"]


def _rate(rate: float) -> str:
    return f"train.lr={rate:g}"


def _local(batch_size: int, epochs: int) -> tuple[str, str]:
    return f"train.batch_size={batch_size}", f"train.epochs={epochs}"


def _around(rate: float) -> Sequence[float]:
    """Return a rate with its neighbours on the grid."""
    at = RATES.index(rate)
    return RATES[max(0, at - 1) : at + 2]
