"""What can a hostile node do, with and without a defence?

One of five or three of ten nodes lie, the data split at random and by label, to GEMS with balls and
with cones, FedAvg, dynamic averaging and GEMS layer by layer. Liars work as honest nodes do and
then change what they send (`simulations.reproduce.studies.lies`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from simulations.reproduce.findings import Finding
from simulations.reproduce.pictures import draw_methods
from simulations.reproduce.study import OURS, Study

SETTINGS = ((5, 1), (10, 3))
SPLITS = ("iid", "labels")
_GEMS = ("strategy=gems", "train.epochs=8", "train.patience=null")
# What lies are written for: every class of low rank, in full precision.
_LOW_RANK = ("rank=10", "min_count=11", "int8=false")
METHODS: dict[str, tuple[str, ...]] = {
    "ball": (*_GEMS, "strategy/space=ball"),
    "cone": (*_GEMS, *(f"strategy.space.{option}" for option in _LOW_RANK)),
    "fedavg": ("strategy=fedavg", "rounds=6", "model=mlp"),
    "dynamic": ("strategy=dynamic", "rounds=40", "stream.batches_per_round=5", "model=mlp"),
    "layerwise": (
        *("strategy=gems_layerwise", "model=mlp", "train.epochs=4", "train.patience=null"),
        *("strategy/head=cone", *(f"strategy.head.space.{option}" for option in _LOW_RANK)),
    ),
}
_ROBUST = {"off": (), "robust": ("strategy.robust=true",)}
_RULES = {"off": (), **{name: (f"strategy.robust={name}",) for name in ("median", "multi_krum")}}
DEFENCES: dict[str, dict[str, tuple[str, ...]]] = {
    "ball": _ROBUST,
    "cone": _ROBUST,
    "layerwise": {"off": (), "robust": ("strategy.head.robust=true",)},
    **{name: _RULES for name in ("fedavg", "dynamic")},  # noqa: C420
}


def measure(
    overrides: Sequence[str], seed: int, folder: Path, console: Console
) -> Iterator[Finding]:
    """Yield the test accuracy of every method with every defence under every attack."""
    from simulations.reproduce.studies.lies import ATTACKS

    # A quick version has the first setting alone.
    quick = "quick" in overrides
    words = [word for word in overrides if word != "quick"]
    for nodes, liars in SETTINGS[: 1 if quick else None]:
        for split in SPLITS[1 if quick else 0 :]:
            for method, base in METHODS.items():
                for attack in ATTACKS:
                    if attack == "counts" and method in ("ball", "dynamic"):
                        continue  # nodes count alike there
                    for defence, more in DEFENCES[method].items():
                        chosen = [f"partition={split}", f"nodes={nodes}", f"seed={seed}"]
                        score = _score([*base, *chosen, *words], more, attack, liars, seed)
                        case = f"{liars} of {nodes} nodes lie, {split}, {attack}"
                        yield Finding(case, f"{method}, {defence}", "accuracy", [score])
                console.print(f"[dim]{nodes} nodes, {split}: {method}[/dim]")


def _score(
    overrides: Sequence[str], defence: Sequence[str], attack: str, liars: int, seed: int
) -> float:
    # Not before: the list of studies needs neither Flower nor Torch.
    from gems_flwr import InProcessGrid
    from simulations.backends.launch import simulated_client_app
    from simulations.config import compose_config
    from simulations.experiment.experiment import experiment_of
    from simulations.experiment.training import torch_threads
    from simulations.reproduce.studies.lies import LyingApp
    from simulations.run import quiet_flower

    nodes = compose_config([*overrides, "progress=false"])
    config = compose_config([*overrides, *defence, "progress=false"])
    app = simulated_client_app(nodes)
    if attack != "none":
        app = LyingApp(app, attack, liars, seed)  # type: ignore[assignment]
    experiment = experiment_of(config.to_json())
    strategy = experiment.strategy(None, [])
    with quiet_flower(), torch_threads(config.backend.threads):
        grid = InProcessGrid(app, config.nodes)
        result = strategy.start(grid, experiment.initial_arrays(), num_rounds=config.rounds)
        scores = experiment.evaluate(strategy, result.arrays, config.rounds)
    assert scores is not None
    return float(scores["accuracy"])  # type: ignore[arg-type]


STUDY = Study(
    name="hostile",
    paper=OURS,
    where="",
    about="What can a hostile node do to spaces and averages, with and without a defence?",
    measure=measure,
    draw=draw_methods,
    seeds=1,
    minutes=20,
    quick=("quick",),
)
