"""Computations that must come to the same on every device: each gets a device, returns arrays.

``tests/device`` compares them with the CPU. Sizes are small and shapes few, because xla compiles a
program for each shape.

Every case says how far a device may be off, relative to the largest number of an array: ``EXACT``
where double precision is kept throughout, ``SINGLE`` where float32 is trained or searched with.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from rich.console import Console
from torch import nn

from gems_flwr import (
    Ball,
    Cone,
    Gems,
    InProcessGrid,
    LayerwiseGems,
    MergedModels,
    MultiModel,
    Neurons,
    PrivateGems,
    RandomFourier,
    Report,
    Task,
    Tune,
    good_enough_mod,
    task_client_app,
)
from gems_flwr.core.records import to_numpy, to_record
from gems_flwr.devices import chosen_device, exact_device
from gems_flwr.node import (
    CORRECTION,
    GRADIENT,
    UNLIMITED,
    corrected_gradients,
    vector_in,
    vector_record,
)
from gems_flwr.samples import Samples
from gems_flwr.spaces.ball import LayerData, build_ball, build_ellipsoid
from gems_flwr.spaces.cone import (
    ConeOptions,
    PrivateRelease,
    build_cone,
    solve_cones,
)
from gems_flwr.stages import tune_cones
from gems_flwr.strategies.multi_model import join_models
from simulations.config import compose_config
from simulations.data.examples import Examples
from simulations.experiment.fixed_lift import LiftMemory
from simulations.experiment.together import Order, train_together
from simulations.experiment.training import TrainOptions, fit, learn, predictions
from simulations.run import run

FEATURES, CLASSES, NODES = 6, 3, 2
SINGLE, EXACT = 1e-4, 1e-8

Numbers = dict[str, Any]


class Case(NamedTuple):
    """A computation: gets the name of a device, returns arrays and numbers by name."""

    name: str
    compute: Callable[[str], Numbers]
    tolerance: float


CASES: list[Case] = []


def case(name: str, tolerance: float) -> Callable[[Callable[..., Numbers]], Callable[..., Numbers]]:
    def add(compute: Callable[..., Numbers]) -> Callable[..., Numbers]:
        CASES.append(Case(name, compute, tolerance))
        return compute

    return add


def start_device(name: str) -> torch.device:
    """Return a device of which PyTorch knows before it computes any gradient.

    xla works operation by operation here: it would compile a program for every path through the
    searches of radii otherwise, which takes minutes for each.
    """
    device = chosen_device(name)
    if device.type == "xla":
        from torch_xla.experimental import eager_mode

        eager_mode(True)
    return device


def difference(expected: Numbers, found: Numbers) -> float:
    """Return the largest difference, relative to the largest number of its array."""
    assert expected.keys() == found.keys()
    worst = 0.0
    for name, array in expected.items():
        one, other = np.asarray(array, dtype=np.float64), np.asarray(found[name], dtype=np.float64)
        if one.shape != other.shape:
            return float("inf")
        size = float(np.abs(one).max(initial=0.0)) or 1.0
        off = np.abs(one - other).max(initial=0.0) / size
        worst = max(worst, float("inf") if np.isnan(off) else float(off))
    return worst


# --- data and models ----------------------------------------------------------------------------


def blobs(count: int = 48, seed: int = 0) -> Samples:
    """Return samples of three clouds that overlap a little."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(7).normal(size=(CLASSES, FEATURES)) * 1.5
    labels = np.arange(count) % CLASSES
    inputs = centers[labels] + rng.normal(size=(count, FEATURES))
    return Samples(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels))


def examples(count: int = 48, seed: int = 0) -> Examples:
    samples = blobs(count, seed)
    return Examples(samples.inputs.numpy(), samples.labels.numpy())


def network(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)]
    return nn.Sequential(*(layers if dropout else [*layers[:2], layers[3]]))


def arrays_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: each.detach().cpu().numpy().copy() for name, each in model.state_dict().items()}


def linear_layer(device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer that is right about most samples: Fisher's direction of the clouds."""
    samples = blobs()
    means = torch.stack([samples.inputs[samples.labels == c].mean(0) for c in range(CLASSES)])
    return means.to(device), (-0.5 * (means**2).sum(1)).to(device)


# --- training, evaluation, streams --------------------------------------------------------------


@case("training: Adam, FedProx", SINGLE)
def training_adam(device: str) -> Numbers:
    model = network()
    options = TrainOptions("adam", lr=0.01, batch_size=16, epochs=3)
    metrics = fit(
        model, examples(), scale=0.5, options=options, seed=3, device=device, proximal_mu=0.1
    )
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    return {**arrays_of(model), "metrics": list(metrics.values())}


# Dropout is drawn on the CPU there, as models on the CPU draw it.
@case("training: several nodes at once, dropout", SINGLE)
def training_together(device: str) -> Numbers:
    """The reference on the CPU is training one by one."""
    options = TrainOptions("adam", lr=0.01, batch_size=16, epochs=2)
    orders = [
        Order(network(0.3, seed), [examples(40 + 8 * seed, seed)], seed, options=options,
              device=device, proximal_mu=0.1)
        for seed in range(3)
    ]  # fmt: skip
    alone = [order.alone() for order in orders] if device == "cpu" else train_together(orders)
    metrics = [list(each.values()) for each in alone if isinstance(each, dict)]
    models = {f"{s} {k}": v for s, o in enumerate(orders) for k, v in arrays_of(o.model).items()}
    return {**models, "metrics": metrics}


@case("training: SCAFFOLD's corrections", SINGLE)
def training_scaffold(device: str) -> Numbers:
    model = network()
    size = sum(each.numel() for each in model.parameters())
    correction = np.linspace(-0.5, 0.5, size).astype(np.float32)
    options = TrainOptions("sgd", lr=0.05, momentum=0.5, batch_size=16)
    instruction = RecordDict({CORRECTION: vector_record(correction)})
    with corrected_gradients(model, instruction) as answer:
        fit(model, examples(), scale=0.5, options=options, seed=3, device=device)
    return {**arrays_of(model), "mean gradient": vector_in(answer[GRADIENT])}


@case("evaluation: predictions, a fixed lift", SINGLE)
def evaluation(device: str) -> Numbers:
    model = nn.Sequential(RandomFourier(FEATURES, 16, seed=1), nn.Linear(16, CLASSES))
    found = LiftMemory().lifted(model, examples(), architecture="x", scale=1.0, device=device)
    assert found is not None
    chances = predictions(network(0.3), examples(), scale=0.5, device=device)
    return {"chances": chances, "features": found[1].features}


@case("streams: Adam with its state", SINGLE)
def stream(device: str) -> Numbers:
    model, memory, options = network(), {}, TrainOptions("adam", lr=0.01)
    batches, losses = [examples(16, seed) for seed in range(3)], []
    for seed in (1, 2):
        learned = learn(
            model, batches, scale=1.0, options=options, seed=seed, memory=memory, device=device
        )
        memory = dict(learned.memory)
        losses.append(learned.loss_sum)
    return {**arrays_of(model), **memory, "losses": losses}


# --- cones and sums of nodes --------------------------------------------------------------------


def _cone(device: str, count: int = 96, **options: Any) -> Any:
    samples = blobs(count)
    return build_cone(samples.inputs, samples.labels, CLASSES, device=device, **options)


def _arrays(prefix: str, space: Any) -> Numbers:
    return {f"{prefix} {k}": np.asarray(each) for k, each in space.to_arrays()[0].items()}


@case("cones: full moments, private", EXACT)
def cone_full(device: str) -> Numbers:
    private = PrivateRelease(epsilon=8.0, delta=1e-5, clip=4.0)
    noised = _cone(device, private=private, noise_seed=5, min_count=1)
    return {**_arrays("full", _cone(device, rank="full")), **_arrays("private", noised)}


@case("cones: solved, tuned with a public sample", EXACT)
def solved(device: str) -> Numbers:
    full, public = [_cone("cpu", rank="full")], blobs(24, seed=4)
    low = [_cone("cpu", rank=2, min_count=8), _cone("cpu", 48, rank=2, min_count=8)]
    balanced = ConeOptions(device=device, class_weight="balanced", iterations=40)
    short = ConeOptions(device=device, iterations=60)
    return {
        "full": solve_cones(full, ConeOptions(device=device)).point,
        "low": solve_cones(low, balanced).point,
        "tuned": tune_cones(full, public.inputs, public.labels, short).point,
    }


# --- radii -------------------------------------------------------------------------------------


@case("radii: balls, ellipsoids", SINGLE)
def radii(device: str) -> Numbers:
    samples = blobs(24)
    data = LayerData(*linear_layer(exact_device(device)), samples.inputs, samples.labels)
    return {
        "certified": build_ball(data, 0.7, "certified").radius.value,
        "sampled": build_ball(data, 0.7, "sampled", directions=8, seed=2).radius.value,
        "axes": build_ellipsoid(data, 0.7, "certified").radii,
    }


# --- whole runs ---------------------------------------------------------------------------------


class _Blobs(Task):
    def __init__(self, node: int) -> None:
        self.node = node

    def build_model(self) -> nn.Module:
        return network()

    def train(self, model: nn.Module, *, seed: int, config: Any) -> Report:
        data, options = examples(seed=self.node), TrainOptions("adam", lr=0.01, epochs=2)
        fit(model, data, scale=1.0, options=options, seed=seed)
        return Report(len(data))

    def evaluate(self, model: nn.Module, *, config: Any) -> Report:
        return Report(1)

    def validation_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        data = blobs(seed=self.node)
        return data.inputs, data.labels


def _node_data(context: Any) -> Any:
    data = blobs(96, seed=int(context.node_config["partition-id"]))
    return (data.inputs, data.labels), (data.inputs, data.labels)


def _linear_app(device: str | None, data: Any = _node_data, **options: Any) -> ClientApp:
    app = ClientApp(mods=[good_enough_mod(data, device=device, limits=UNLIMITED, **options)])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        weight, bias = linear_layer()
        arrays = to_record({"weight": weight.numpy(), "bias": bias.numpy()})
        reply = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 96})})
        return Message(reply, reply_to=message)

    return app


def _result(
    strategy: Any, app: ClientApp, model: nn.Module | None = None, num_rounds: int = 1
) -> Numbers:
    torch.manual_seed(0)
    initial = ArrayRecord((model or nn.Linear(FEATURES, CLASSES)).state_dict())
    result = strategy.start(InProcessGrid(app, NODES), initial, num_rounds=num_rounds)
    numbers = {"loss": result.details["loss"]} if "loss" in result.details else {}
    return {**to_numpy(result.arrays), **numbers}


def _task_app(device: str) -> ClientApp:
    return task_client_app(
        lambda c: _Blobs(int(c.node_config["partition-id"])), device=device, limits=UNLIMITED
    )


def _public(model: Callable[[], nn.Module] | None = None) -> Tune:
    data = examples(24, seed=9)
    return Tune(data.features, data.labels, rate=0.01, model=model)


@case("a run: Gems, cones, refined, tuned, verified", SINGLE)
def gems_cones(device: str) -> Numbers:
    space = Cone(rank="full")
    strategy = Gems(space=space, refine=2, tune=_public(), verify=True, device=device)
    return _result(strategy, _linear_app(device), num_rounds=3)


@case("a run: Gems where the nodes' model is built, the nodes choose a head", SINGLE)
def gems_at_home(device: str) -> Numbers:
    app = _linear_app(None, model=lambda: nn.Linear(FEATURES, CLASSES).to(chosen_device(device)))
    return _result(Gems(space=Cone(rank="full"), head="auto", device=device), app)


@case("a run: Gems by sums", SINGLE)
def gems_sums(device: str) -> Numbers:
    space = Cone(sums=True, sketch=2, min_count=2)
    return _result(Gems(space=space, verify=True, device=device), _linear_app(device))


@case("a run: Gems, balls, tuned", SINGLE)
def gems_balls(device: str) -> Numbers:
    strategy = Gems(space=Ball(epsilon=0.6, radius="certified"), tune=_public(), device=device)
    return _result(strategy, _linear_app(device))


@case("a run: PrivateGems", SINGLE)
def gems_private(device: str) -> Numbers:
    strategy = PrivateGems(epsilon=8.0, steps=2, clip=6.0, dp_seeded=True, device=device)
    return _result(strategy, _linear_app(device), num_rounds=3)


# On hidden layers the ridge is 1e-5: where the optimum is that flat, features that differ in their
# last bit end up some 1e-4 apart.
@case("a run: LayerwiseGems", 2e-3)
def gems_layerwise(device: str) -> Numbers:
    head = Gems(space=Cone(rank="full"), tune=_public(network))
    strategy = LayerwiseGems(neurons=Neurons(epsilon=0.5, directions=6), head=head, device=device)
    return _result(strategy, _task_app(device), network(), num_rounds=2)


@case("a run: MergedModels", SINGLE)
def merged_run(device: str) -> Numbers:
    return _result(MergedModels(device=device), _task_app(device), network())


@case("a run: MultiModel, drawn by losses", SINGLE)
def several_models(device: str) -> Numbers:
    app = _linear_app(device, lambda context: {"a": _node_data(context)})
    zeros = {"weight": np.zeros((CLASSES, FEATURES), np.float32), "bias": np.zeros(3, np.float32)}
    initial = to_record(join_models({"a": zeros}))
    result = MultiModel(budget=1.5).start(InProcessGrid(app, NODES), initial, num_rounds=2)
    sizes = [record.train_metrics["step_size/a"] for record in result.history[1:]]
    return {**to_numpy(result.arrays), "sizes": sizes}


@case("a simulation: Gems on digits", SINGLE)
def simulated(device: str) -> Numbers:
    options = ["dataset=digits", "nodes=2", "progress=false", f"backend.device={device}"]
    options += ["strategy=gems", "strategy.space.rank=full", "model=logistic"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(None):
        result = run(compose_config(options), Path(folder) / "run", console=Console(quiet=True))
    return {key: result[key] for key in ("loss", "accuracy")}
