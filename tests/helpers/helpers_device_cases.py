"""Computations that must come to the same on every device: each gets a device, returns arrays.

``tests/device`` compares them with the CPU, and ``make gpu-check`` prints a table of them. Sizes
are small and shapes few, because xla compiles a program for each shape.

Every case says how far a device may be off, relative to the largest number of an array: ``EXACT``
where double precision is kept throughout, ``SINGLE`` where float32 is trained or searched with,
whose rounding grows with steps, and whole runs, which send float32.
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

from gems_flwr.client.good_enough_mod import good_enough_mod
from gems_flwr.client.gradients import corrected_gradients
from gems_flwr.client.limits import UNLIMITED
from gems_flwr.client.multi_model_mod import multi_model_mod
from gems_flwr.client.several_data import cross_entropy_loss
from gems_flwr.client.statistics_mod import statistics_mod
from gems_flwr.client.task import Report, Task
from gems_flwr.client.task_app import task_client_app
from gems_flwr.devices import chosen_device, exact_device
from gems_flwr.intersect.cone_objective import ConeOptions
from gems_flwr.intersect.cones import solve_cones
from gems_flwr.intersect.head_moments import HeadMoments
from gems_flwr.intersect.moment_heads import HeadOptions, linear_head
from gems_flwr.intersect.private_steps import Spread
from gems_flwr.intersect.tuning import fine_tune_linear, fine_tune_network, tune_cones
from gems_flwr.model_merging.measure import measure_statistics
from gems_flwr.model_merging.merge_models import merge_models
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.moments.cone_streaming import Components, stream_cone
from gems_flwr.moments.loss_sums import loss_sums, losses_along
from gems_flwr.moments.moment_sums import covariance_sums, mean_sums, sketch_sums
from gems_flwr.moments.private_release import PrivateRelease
from gems_flwr.moments.small_means import SampledClasses
from gems_flwr.networks.hidden import read_neuron_inputs
from gems_flwr.networks.random_fourier import RandomFourier
from gems_flwr.neuron_merging.merge_neurons import merge_neurons
from gems_flwr.radii.layer_data import LayerData
from gems_flwr.radii.layer_radius import build_ball, build_ellipsoid
from gems_flwr.radii.neuron_data import NeuronData
from gems_flwr.radii.neuron_radii import build_neuron_balls
from gems_flwr.radii.quality import Quality
from gems_flwr.runtime.inprocess_grid import InProcessGrid
from gems_flwr.samples import Samples
from gems_flwr.spaces.space_files import space_to_arrays
from gems_flwr.strategies.gems import Gems
from gems_flwr.strategies.layerwise_gems import LayerwiseGems
from gems_flwr.strategies.merged_models import MergedModels
from gems_flwr.strategies.one_shot_average import OneShotAverage
from gems_flwr.strategies.private_gems import PrivateGems
from gems_flwr.wire.records import to_numpy, to_record
from gems_flwr.wire.requests import Neurons
from gems_flwr.wire.space_requests import Ball, Cone
from simulations.config import compose_config
from simulations.data.examples import Examples
from simulations.experiment.fixed_lift import LiftMemory
from simulations.experiment.training import TrainOptions, fit, predictions
from simulations.run import run
from simulations.streams.learning import learn

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


def blobs(count: int = 48, seed: int = 0, features: int = FEATURES) -> Samples:
    """Return samples of three clouds that overlap a little."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(7).normal(size=(CLASSES, features)) * 1.5
    labels = np.arange(count) % CLASSES
    inputs = centers[labels] + rng.normal(size=(count, features))
    return Samples(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels))


def examples(count: int = 48) -> Examples:
    samples = blobs(count)
    return Examples(samples.inputs.numpy(), samples.labels.numpy())


def network(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
    )


def hidden(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def arrays_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: each.detach().cpu().numpy().copy() for name, each in model.state_dict().items()}


def linear_layer(device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer that is right about most samples: Fisher's direction of the clouds."""
    samples = blobs()
    means = torch.stack([samples.inputs[samples.labels == c].mean(0) for c in range(CLASSES)])
    return means.to(device), (-0.5 * (means**2).sum(1)).to(device)


# --- training, evaluation, streams --------------------------------------------------------------


def _trained(device: str, options: TrainOptions, mu: float = 0.0) -> Numbers:
    model = network(dropout=0.3)
    told = fit(model, examples(), scale=0.5, options=options, seed=3, device=device, proximal_mu=mu)
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    return {**arrays_of(model), "told": list(told.values())}


@case("training: Adam, dropout", SINGLE)
def training_adam(device: str) -> Numbers:
    return _trained(device, TrainOptions("adam", lr=0.01, batch_size=16, epochs=3))


@case("training: SGD with momentum, FedProx", SINGLE)
def training_sgd(device: str) -> Numbers:
    return _trained(device, TrainOptions("sgd", lr=0.05, momentum=0.5, batch_size=16), mu=0.1)


@case("training: RMSprop, weight decay", SINGLE)
def training_rmsprop(device: str) -> Numbers:
    return _trained(device, TrainOptions("rmsprop", lr=0.01, batch_size=16, weight_decay=1e-2))


@case("training: SCAFFOLD's corrections", SINGLE)
def training_scaffold(device: str) -> Numbers:
    model = network()
    size = sum(each.numel() for each in model.parameters())
    correction = np.linspace(-0.5, 0.5, size).astype(np.float32)
    options = TrainOptions("sgd", lr=0.05, batch_size=16)
    with corrected_gradients(model, correction) as gradients:
        fit(model, examples(), scale=0.5, options=options, seed=3, device=device)
    assert gradients is not None
    return {**arrays_of(model), "mean gradient": gradients.mean()}


@case("evaluation: predictions", SINGLE)
def evaluation(device: str) -> Numbers:
    return {"chances": predictions(network(0.3), examples(), scale=0.5, device=device)}


@case("evaluation: a fixed lift", SINGLE)
def lifted(device: str) -> Numbers:
    model = nn.Sequential(RandomFourier(FEATURES, 16, seed=1), nn.Linear(16, CLASSES))
    found = LiftMemory().lifted(
        model, examples(), architecture="x", scale=1.0, threads=1, device=device
    )
    assert found is not None
    return {"features": found[1].features}


@case("streams: Adam with its state", SINGLE)
def stream(device: str) -> Numbers:
    model, data, memory = network(dropout=0.3), examples(), {}
    batches = [(data.features[i : i + 16], data.labels[i : i + 16]) for i in (0, 16, 32)]
    options = TrainOptions("adam", lr=0.01)
    told: list[float] = []
    for seed in (1, 2):
        _, metrics, memory = learn(
            model, batches, scale=1.0, options=options, seed=seed, memory=memory, device=device
        )
        told += metrics.values()
    return {**arrays_of(model), **memory, "told": told}


# --- cones --------------------------------------------------------------------------------------


def _cone(device: str, count: int = 96, **options: Any) -> Any:
    samples = blobs(count)
    return build_cone(samples.inputs, samples.labels, CLASSES, device=device, **options)


def _arrays(space: Any) -> Numbers:
    return {name: np.asarray(each) for name, each in space_to_arrays(space)[0].items()}


@case("cones: full moments", EXACT)
def cone_full(device: str) -> Numbers:
    return _arrays(_cone(device, rank="full"))


@case("cones: rank 2 of clusters", SINGLE)
def cone_clusters(device: str) -> Numbers:
    return _arrays(_cone(device, rank=2, clusters=2, min_count=8, int8=False))


@case("cones: as many directions as samples allow", SINGLE)
def cone_auto(device: str) -> Numbers:
    return _arrays(_cone(device, rank="auto"))


@case("cones: private", EXACT)
def cone_private(device: str) -> Numbers:
    private = PrivateRelease(epsilon=8.0, delta=1e-5, clip=4.0)
    return _arrays(_cone(device, private=private, noise_seed=5, min_count=1))


@case("cones: streamed eigenvectors", SINGLE)
def cone_streamed(device: str) -> Numbers:
    samples, where = blobs(96, features=20), exact_device(device)
    components = Components.of(samples.labels)
    cone = stream_cone(samples.inputs, components, CLASSES, rank=2, int8=False, device=where)
    shown = SampledClasses(samples.inputs, components.rows, where)
    frame = shown.frame(np.array([True, True, False]))
    # Signs of eigenvectors are anybody's.
    dense = [cone.covariance.dense_matrix(c) for c in range(CLASSES)]
    return {"dense": np.stack(dense), "frame": np.abs(frame.leading(2))}


@case("cones: solved, full moments", EXACT)
def solved_full(device: str) -> Numbers:
    return {"point": solve_cones([_cone("cpu", rank="full")], ConeOptions(device=device)).point}


@case("cones: solved, low rank, balanced", EXACT)
def solved_low(device: str) -> Numbers:
    cones = [_cone("cpu", rank=2, min_count=8), _cone("cpu", 48, rank=2, min_count=8)]
    options = ConeOptions(device=device, class_weight="balanced", iterations=40)
    return {"point": solve_cones(cones, options).point}


@case("cones: tuned with a public sample", EXACT)
def tuned_cone(device: str) -> Numbers:
    public = blobs(24, seed=4)
    cones, options = [_cone("cpu", rank="full")], ConeOptions(device=device, iterations=60)
    return {"point": tune_cones(cones, public.inputs, public.labels, options).point}


@case("heads: ridge, lda, nearest mean", EXACT)
def heads(device: str) -> Numbers:
    moments = HeadMoments.of([_cone("cpu", rank="full")])
    found = {}
    for name in ("ridge", "lda", "nearest_mean"):
        found[f"{name} weight"], found[f"{name} bias"] = linear_head(
            moments, HeadOptions(name, device=device)
        )
    return found


# --- sums of nodes ------------------------------------------------------------------------------


@case("refinement: loss, gradient, curvature", EXACT)
def refinement_sums(device: str) -> Numbers:
    rng, samples = np.random.default_rng(0), blobs()
    layer, scale = rng.normal(size=(CLASSES, FEATURES + 1)), np.full(FEATURES, 1.5)
    weights, points = np.array([1.0, 2.0, 0.5]), np.array([[0.0, 0.0], [0.5, -1.0]])
    sums = loss_sums(samples, layer, scale, weights, device=device)
    along = losses_along(
        samples, layer, rng.normal(size=(2, *layer.shape)), points, scale, weights, device
    )
    told = [sums.loss, sums.weight, sums.fewest]
    return {"told": told, "gradient": sums.gradient, "curvature": sums.curvature, "along": along}


@case("sums: means, sketch, covariances", EXACT)
def moment_summands(device: str) -> Numbers:
    rng, samples = np.random.default_rng(0), blobs()
    center, scale = rng.normal(size=FEATURES), np.full(FEATURES, 2.0)
    columns = rng.normal(size=(FEATURES, 2))
    return {
        **{f"mean {k}": v for k, v in mean_sums(samples, CLASSES, device).items()},
        **sketch_sums(samples, center, scale, columns, device),
        **covariance_sums(samples, CLASSES, center, scale, columns.T.copy(), device),
    }


@case("private steps: the spread", EXACT)
def private_spread(device: str) -> Numbers:
    rng = np.random.default_rng(0)
    corner = rng.integers(-50, 50, size=FEATURES * (FEATURES - 1) // 2).astype(float)
    spread = Spread.of(np.full(FEATURES, 400.0), corner, 100.0, device)
    rows = rng.normal(size=(CLASSES, FEATURES + 1))
    return {"values": spread.values, "solved": spread.solve(rows, 0.1)}


# --- radii and neurons --------------------------------------------------------------------------


def _radius(device: str, method: str, measure: str) -> float:
    samples = blobs(24)
    weight, bias = linear_layer(exact_device(device))
    data = LayerData(weight, bias, samples.inputs, samples.labels)
    quality = Quality(0.7 if measure == "accuracy" else 1.0, measure)
    options = {} if method in ("worst", "certified") else {"directions": 8, "seed": 2}
    return build_ball(data, quality, method, **options).radius.value


@case("radii: sampled, worst, certified by accuracy", SINGLE)
def radii_accuracy(device: str) -> Numbers:
    return {m: _radius(device, m, "accuracy") for m in ("sampled", "worst", "certified")}


@case("radii: sampled, worst, certified by loss", SINGLE)
def radii_loss(device: str) -> Numbers:
    return {m: _radius(device, m, "loss") for m in ("sampled", "worst", "certified")}


@case("radii: the papers' searches", SINGLE)
def radii_searched(device: str) -> Numbers:
    return {m: _radius(device, m, "accuracy") for m in ("bisection", "growing")}


@case("radii: ellipsoid", SINGLE)
def radii_ellipsoid(device: str) -> Numbers:
    samples = blobs(24)
    data = LayerData(*linear_layer(exact_device(device)), samples.inputs, samples.labels)
    space = build_ellipsoid(data, Quality(0.7), "worst")
    return {"center": space.center, "radii": space.radii}


def _neurons(device: str, method: str, outgoing: bool = False, seed: int = 0) -> Any:
    model, where = hidden(seed), exact_device(device)
    inputs = read_neuron_inputs(
        model, arrays_of(model), 0, (blobs().inputs, blobs().labels), max_rows=32, seed=1,
        device=device,
    )  # fmt: skip
    arrays = {k: torch.from_numpy(v).to(where) for k, v in arrays_of(hidden(seed)).items()}
    feeds = arrays["2.weight"].T.contiguous()
    data = NeuronData(
        weight=arrays["0.weight"],
        bias=arrays["0.bias"],
        inputs=inputs.rows,
        activation=inputs.activation,
        outgoing=feeds if outgoing else None,
    )
    directions = 3 if method in ("bisection", "growing") else 6
    return build_neuron_balls(
        data, 0.2, method, directions=directions, seed=1, measure="relative", max_radius=20.0,
        outgoing_norms=feeds.norm(dim=1),
    )  # fmt: skip


@case("neurons: balls of all kinds", SINGLE)
def neuron_balls(device: str) -> Numbers:
    found = {m: _neurons(device, m) for m in ("sampled", "worst", "certified", "bisection")}
    joint = _neurons(device, "sampled", outgoing=True)
    told = {f"{m} radii": b.radii for m, b in found.items()}
    return {**told, "importance": joint.importance, "with outgoing weights": joint.radii}


@case("neurons: merged", EXACT)
def merged_neurons(device: str) -> Numbers:
    layers = [_neurons("cpu", "sampled", seed=seed) for seed in range(3)]
    found = {}
    for budget in ("drop", "cluster"):
        merged = merge_neurons(
            layers, "kmeans", clusters=6, max_neurons=5, budget=budget, seed=0, device=device
        )
        found[budget] = merged.weights
    return found


# --- merging, tuning ----------------------------------------------------------------------------


def _merged(device: str, method: str, labels: str = "exact") -> Numbers:
    models = [arrays_of(hidden(seed)) for seed in range(2)]
    statistics = []
    for node, arrays in enumerate(models):
        data = (blobs(seed=node).inputs, blobs(seed=node).labels)
        statistics.append(
            measure_statistics(method, labels, arrays, data, model=hidden(), seed=1, device=device)
        )
    merged = merge_models(method, models, statistics, [1.0, 2.0], device=device).arrays
    told = {f"{w} {k}": a for w, kinds in statistics[0].items() for k, a in kinds.items()}
    return {**merged, **told}


@case("merging: RegMean", SINGLE)
def merged_regmean(device: str) -> Numbers:
    return _merged(device, "regmean")


@case("merging: Fisher, drawn labels", SINGLE)
def merged_fisher(device: str) -> Numbers:
    return _merged(device, "fisher", "sampled")


@case("merging: K-FAC", SINGLE)
def merged_kfac(device: str) -> Numbers:
    return _merged(device, "kfac")


@case("tuning: last layer, whole network", SINGLE)
def tuned(device: str) -> Numbers:
    public, model = blobs(), hidden()
    start = np.zeros(CLASSES * (FEATURES + 1))
    point = fine_tune_linear(
        start, public.inputs, public.labels, CLASSES, epochs=2, batch=16, rate=0.01, device=device
    )
    fine_tune_network(
        model, public.inputs, public.labels, epochs=2, batch=16, rate=0.01, device=device
    )
    return {"point": point, **arrays_of(model)}


@case("several models: a node's loss", SINGLE)
def several_models(device: str) -> Numbers:
    def data(_: Any) -> dict[str, Any]:
        return {"a": ((blobs().inputs, blobs().labels), None)}

    record = to_record(arrays_of(hidden()))
    assert multi_model_mod(data, model={"a": hidden}, device=device)
    ours = cross_entropy_loss(data, {"a": hidden}, device)(None, "a", record)  # type: ignore[arg-type]
    of_task = _Blobs(0).loss(hidden().to(chosen_device(device)))
    return {"losses": [ours, of_task]}


# --- whole runs ---------------------------------------------------------------------------------


class _Blobs(Task):
    def __init__(self, node: int) -> None:
        self.node = node

    def build_model(self) -> nn.Module:
        return hidden()

    def train(self, model: nn.Module, *, seed: int, config: Any) -> Report:
        data = blobs(seed=self.node)
        shares = Examples(data.inputs.numpy(), data.labels.numpy())
        fit(model, shares, scale=1.0, options=TrainOptions("adam", lr=0.01, epochs=2), seed=seed)
        return Report(len(data))

    def evaluate(self, model: nn.Module, *, config: Any) -> Report:
        return Report(1)

    def validation_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        data = blobs(seed=self.node)
        return data.inputs, data.labels


def _node_data(context: Any) -> Any:
    data = blobs(96, seed=int(context.node_config["partition-id"]))
    return (data.inputs, data.labels), (data.inputs, data.labels)


def _linear_app(device: str | None, **options: Any) -> ClientApp:
    app = ClientApp(mods=[good_enough_mod(_node_data, device=device, **options)])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        weight, bias = linear_layer()
        arrays = to_record({"weight": weight.numpy(), "bias": bias.numpy()})
        reply = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 96})})
        return Message(reply, reply_to=message)

    return app


def _start() -> ArrayRecord:
    torch.manual_seed(0)
    return ArrayRecord(nn.Linear(FEATURES, CLASSES).state_dict())


def _of(result: Any, *details: str) -> Numbers:
    return {**to_numpy(result.arrays), **{key: result.details[key] for key in details}}


def _public() -> tuple[np.ndarray, np.ndarray]:
    data = blobs(24, seed=9)
    return data.inputs.numpy(), data.labels.numpy()


@case("a run: Gems, cones, refined, tuned, verified", SINGLE)
def gems_cones(device: str) -> Numbers:
    strategy = Gems(
        space=Cone(rank="full"), refine=2, tune=24, public=_public(), verify=True, device=device
    )
    result = strategy.start(InProcessGrid(_linear_app(device), NODES), _start(), num_rounds=3)
    scores = list(result.details["node_scores"].values())
    return {**_of(result, "loss"), "scores": scores}


@case("a run: Gems, the nodes choose a head", SINGLE)
def gems_heads(device: str) -> Numbers:
    strategy = Gems(space=Cone(rank="full"), head="auto", device=device)
    return _of(strategy.start(InProcessGrid(_linear_app(device), NODES), _start()))


@case("a run: Gems where the nodes' model is built", SINGLE)
def gems_at_home(device: str) -> Numbers:
    app = _linear_app(None, model=lambda: nn.Linear(FEATURES, CLASSES).to(chosen_device(device)))
    strategy = Gems(refine=1, verify=True, device=device)
    return _of(strategy.start(InProcessGrid(app, NODES), _start(), num_rounds=2))


@case("a run: Gems by sums", SINGLE)
def gems_sums(device: str) -> Numbers:
    strategy = Gems(space=Cone(sums=True, sketch=2, min_count=2), verify=True, device=device)
    return _of(
        strategy.start(InProcessGrid(_linear_app(device, limits=UNLIMITED), NODES), _start())
    )


@case("a run: Gems, balls, tuned", SINGLE)
def gems_balls(device: str) -> Numbers:
    space = Ball(epsilon=0.6, radius="worst")
    strategy = Gems(space=space, tune=24, public=_public(), tune_rate=0.01, device=device)
    return _of(strategy.start(InProcessGrid(_linear_app(device), NODES), _start()))


@case("a run: PrivateGems", SINGLE)
def gems_private(device: str) -> Numbers:
    strategy = PrivateGems(epsilon=8.0, steps=2, clip=6.0, dp_seeded=True, device=device)
    return _of(
        strategy.start(
            InProcessGrid(_linear_app(device, limits=UNLIMITED), NODES), _start(), num_rounds=3
        )
    )


# On hidden layers the ridge is 1e-5: where the optimum is that flat, features that differ in their
# last bit end up some 1e-4 apart.
@case("a run: LayerwiseGems", 2e-3)
def gems_layerwise(device: str) -> Numbers:
    app = task_client_app(lambda c: _Blobs(int(c.node_config["partition-id"])), device=device)
    strategy = LayerwiseGems(
        neurons=Neurons(epsilon=0.5, radius="sampled", directions=6),
        head=Cone(rank="full"),
        tune=24,
        public_data=_public(),
        build_model=hidden,
        device=device,
    )
    start = ArrayRecord(hidden().state_dict())
    return _of(strategy.start(InProcessGrid(app, NODES), start, num_rounds=2))


@case("a run: OneShotAverage, tuned", SINGLE)
def tuned_average(device: str) -> Numbers:
    app = task_client_app(lambda c: _Blobs(int(c.node_config["partition-id"])), device=device)
    strategy = OneShotAverage(
        tune=24, tune_layers="all", public_data=_public(), build_model=hidden, device=device
    )
    return _of(strategy.start(InProcessGrid(app, NODES), ArrayRecord(hidden().state_dict())))


@case("a run: MergedModels", SINGLE)
def merged_run(device: str) -> Numbers:
    app = ClientApp(mods=[statistics_mod(_node_data, limits=UNLIMITED, device=device)])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        node = int(context.node_config["partition-id"])
        arrays = {k: v + np.float32(0.1 * node) for k, v in to_numpy(
            message.content["arrays"]).items()}  # fmt: skip
        metrics = MetricRecord({"num-examples": 96})
        content = RecordDict({"arrays": to_record(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    strategy = MergedModels(method="regmean", device=device)
    return _of(strategy.start(InProcessGrid(app, NODES), _start()))


def _simulated(device: str, *overrides: str) -> Numbers:
    options = ["dataset=digits", "nodes=2", "progress=false", f"backend.device={device}"]
    config = compose_config([*options, *overrides])
    quiet = Console(quiet=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(None):
        result = run(config, Path(folder) / "run", console=quiet)
    return {key: result[key] for key in ("loss", "accuracy")}


@case("a simulation: Gems on digits", SINGLE)
def simulated_gems(device: str) -> Numbers:
    return _simulated(device, "strategy=gems", "strategy.space.rank=full", "model=logistic")


@case("a simulation: FedAvg on digits", SINGLE)
def simulated_average(device: str) -> Numbers:
    options = ["strategy=fedavg", "rounds=1", "model=logistic", "train.batch_size=256"]
    return _simulated(device, *options)
