"""What can a hostile node do? Attacks on balls and cones, with and without a defence.

``python -m simulations.reproduce hostile --dataset mnist`` lets one of five and three of ten nodes
lie, the data split at random and by label, over three seeds. The honest nodes' spaces are built
once; hostile ones are made out of them. Every case is written as it is done, and not repeated.

=========  ===============================================  ===================================
attack     on balls                                         on cones
=========  ===============================================  ===================================
far        a centre 10,000 away in a random direction       inputs a thousand times as large
tiny       minus the own model with a radius of nothing     hardly any spread
counts     (a ball has none)                                a million times the samples
flipped    the rows of class c and 9 - c exchanged          labels c called 9 - c
garbage    a random model of the same length                random moments of the same size for
                                                            *every* class
=========  ===============================================  ===================================
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from gems_flwr.intersect.aggregate import Aggregate, aggregate_spaces
from gems_flwr.intersect.audit import audit_nodes
from gems_flwr.intersect.screen_spaces import screen_spaces
from gems_flwr.moments.cone_building import build_cone
from gems_flwr.radii.layer_radius import build_ball
from gems_flwr.radii.quality import Quality
from gems_flwr.runtime.seeding import generator
from gems_flwr.spaces.ball import BallSpace
from gems_flwr.spaces.checks import MAX_WEIGHT
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.covariance import LowRankCovariance, dense
from gems_flwr.spaces.output_layer import flatten_linear, unflatten_linear
from gems_flwr.spaces.radius import Radius
from simulations.config import compose_config
from simulations.experiment.experiment import Experiment
from simulations.experiment.training import torch_threads
from simulations.report.tables import TextTable, print_table
from simulations.reproduce.studies.trained_nodes import TrainedNode, accuracy, trained_nodes

SETTINGS = ((5, 1), (10, 3))
SPLITS = ("iid", "labels")
SEEDS = (0, 1, 2)
ATTACKS = ("none", "far", "tiny", "counts", "flipped", "garbage")
DEFENCES = ("off", "robust", "robust, audit")
EPSILON = 0.4
# Low-rank moments: the audit solves many problems.
RANK = 10

Lie = Callable[[Any, np.random.Generator], Any]


def run(
    overrides: Sequence[str], output: Path, console: Console, seeds: Sequence[int] | None = None
) -> Path:
    """Run the study; return the path of its results."""
    output.mkdir(parents=True, exist_ok=True)
    name = compose_config(["strategy=one_shot_average", *overrides]).names["dataset"]
    path = output / f"hostile-{name}.json"
    done: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    chosen = SEEDS if seeds is None else seeds
    for split in SPLITS:
        for nodes, liars in SETTINGS:
            for seed in chosen:
                wanted = [
                    case for case in _cases(split, nodes, liars, seed) if case.key not in done
                ]
                if not wanted:
                    continue
                options = [f"partition={split}", f"nodes={nodes}", f"seed={seed}"]
                # Eight epochs of the few digits would teach too little.
                epochs = 15 if name.startswith("digits") else 8
                short = [f"train.epochs={epochs}", "train.patience=null"]
                config = compose_config(["strategy=one_shot_average", *short, *options, *overrides])
                with torch_threads(config.backend.threads):
                    honest = _Honest(Experiment(config), console)
                    for case in wanted:
                        done[case.key] = honest.measure(case)
                        path.write_text(json.dumps(done, indent=2))
            columns = [("ball", d) for d in DEFENCES[:2]] + [("cone", d) for d in DEFENCES]
            table = results_table(done, split, nodes, liars, columns, ATTACKS, chosen)
            print_table(table, console, title=f"{liars} of {nodes} nodes lie, {split}")
    console.print(f"Results: {path}")
    return path


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell of the table, for one seed."""

    space: str
    split: str
    nodes: int
    liars: int
    attack: str
    defence: str
    seed: int

    @property
    def key(self) -> str:
        """How the case is called in the results."""
        return "/".join(map(str, dataclasses.astuple(self)))


def _cases(split: str, nodes: int, liars: int, seed: int) -> Iterable[Case]:
    for space in ("ball", "cone"):
        for attack in ATTACKS:
            if space == "ball" and attack == "counts":
                continue
            for defence in DEFENCES:
                # With every class on every node screening has nothing left to do, and where
                # models are averaged the others gain from any node that is left out.
                if "audit" in defence and (split == "iid" or space == "ball"):
                    continue
                yield Case(space, split, nodes, liars, attack, defence, seed)


class _Honest:
    """The honest spaces of one experiment, and what becomes of them under attack."""

    def __init__(self, experiment: Experiment, console: Console) -> None:
        self.classes, seed = experiment.dataset.classes, experiment.config.seed
        self.nodes: list[TrainedNode] = trained_nodes(experiment, console)
        quality = Quality(EPSILON)
        self.spaces: dict[str, list[Any]] = {
            "ball": [
                build_ball(node.layer, quality, "sampled", directions=500, seed=seed)
                for node in self.nodes
            ],
            "cone": [
                build_cone(node.inputs, node.labels, self.classes, rank=RANK, min_count=RANK + 1)
                for node in self.nodes
            ],
        }
        self.test, self.truth = map(
            torch.from_numpy, experiment.output_inputs(experiment.dataset.test)
        )

    def measure(self, case: Case) -> float:
        """Return the test accuracy of what is aggregated."""
        rng = generator(case.seed, "hostile", case.attack)
        spaces = list(self.spaces[case.space])
        liars = range(case.liars) if case.attack != "none" else range(0)
        for index in liars:
            lie = BALL_LIES[case.attack] if case.space == "ball" else CONE_LIES[case.attack]
            spaces[index] = lie(spaces[index], rng)
        named = {str(index): space for index, space in enumerate(spaces)}
        if case.defence != "off":
            kept = screen_spaces(spaces).spaces
            named = {n: s for n, s in zip(named, kept, strict=True) if s is not None}
        on_empty = "least" if case.defence == "off" else "subset"

        def aggregate(names: Sequence[str]) -> Aggregate:
            return aggregate_spaces([named[name] for name in names], on_empty=on_empty)  # type: ignore[arg-type]

        if "audit" not in case.defence:
            return self._accuracy(aggregate(list(named)))
        audit = audit_nodes(list(named), aggregate, lambda found: self._scores(found, liars))
        return self._accuracy(audit.model)

    def _scores(self, found: Aggregate, liars: Sequence[int]) -> dict[str, float]:
        """Return each node's score on its own validation data; liars say it could not be worse."""
        return {
            str(index): 0.0
            if index in liars
            else accuracy(found.point, node.layer.inputs, node.layer.labels, self.classes)
            for index, node in enumerate(self.nodes)
        }

    def _accuracy(self, found: Aggregate) -> float:
        return accuracy(found.point, self.test, self.truth, self.classes)


# --- lies -----------------------------------------------------------------------------------


def random_direction(size: int, length: float, rng: np.random.Generator) -> np.ndarray:
    """Return a vector of a given length in a random direction."""
    v = rng.normal(size=size)
    return np.asarray(length * v / np.linalg.norm(v))


def _far_ball(ball: BallSpace, rng: np.random.Generator) -> BallSpace:
    return BallSpace(ball.center + random_direction(ball.dimension, 1e4, rng), ball.radius)


def _tiny_ball(ball: BallSpace, rng: np.random.Generator) -> BallSpace:
    return BallSpace(-ball.center, Radius(1e-6, "sampled", EPSILON))


def _flipped_ball(ball: BallSpace, rng: np.random.Generator) -> BallSpace:
    """Return the model that training on flipped labels gives: the same with exchanged rows."""
    classes = 10
    weight, bias = unflatten_linear(ball.center, classes, ball.dimension // classes - 1)
    flipped = flatten_linear(weight[::-1], bias[::-1])
    return BallSpace(flipped.astype(np.float32), ball.radius)


def _garbage_ball(ball: BallSpace, rng: np.random.Generator) -> BallSpace:
    length = float(np.linalg.norm(ball.center))
    return BallSpace(random_direction(ball.dimension, length, rng), ball.radius)


def _cone(cone: ClassMomentCone, **changed: Any) -> ClassMomentCone:
    return dataclasses.replace(cone, total_count=0, **changed)


def _low_rank(cone: ClassMomentCone) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    assert isinstance(cone.covariance, LowRankCovariance)
    covariance = cone.covariance
    return dense(cone.means), dense(covariance.factors), dense(covariance.deviations)


def _scaled(cone: ClassMomentCone, mean: float, spread: float) -> ClassMomentCone:
    means, factors, deviations = _low_rank(cone)
    limit = MAX_WEIGHT
    return _cone(
        cone,
        means=np.clip(means * mean, -limit, limit),
        covariance=LowRankCovariance(
            (factors * spread).astype(np.float32), (deviations * spread).astype(np.float32)
        ),
    )


def _garbage_cone(cone: ClassMomentCone, rng: np.random.Generator) -> ClassMomentCone:
    means, factors, deviations = _low_rank(cone)
    pick = rng.integers(len(means), size=cone.num_classes)
    lengths = np.linalg.norm(means[pick], axis=1)
    rows = [random_direction(means.shape[1], length, rng) for length in lengths]
    return _cone(
        cone,
        labels=np.arange(cone.num_classes),
        counts=np.full(cone.num_classes, cone.counts.max()),
        means=np.array(rows, dtype=np.float32),
        covariance=LowRankCovariance(factors[pick], deviations[pick]),
    )


BALL_LIES: dict[str, Lie] = {
    "far": _far_ball,
    "tiny": _tiny_ball,
    "flipped": _flipped_ball,
    "garbage": _garbage_ball,
}
CONE_LIES: dict[str, Lie] = {
    "far": lambda cone, rng: _scaled(cone, 1e3, 1e3),
    "tiny": lambda cone, rng: _scaled(cone, 1, 1e-3),
    "counts": lambda cone, rng: _cone(cone, counts=cone.counts * 10**6),
    "flipped": lambda cone, rng: _cone(cone, labels=cone.num_classes - 1 - cone.labels),
    "garbage": _garbage_cone,
}


# --- the table ------------------------------------------------------------------------------


def results_table(
    done: dict[str, float],
    split: str,
    nodes: int,
    liars: int,
    columns: Sequence[tuple[str, str]],
    attacks: Sequence[str],
    seeds: Sequence[int],
) -> TextTable:
    """Return mean and deviation over seeds by attack, in a column for each method and defence."""
    lines = []
    for attack in attacks:
        cells = []
        for space, defence in columns:
            cases = [Case(space, split, nodes, liars, attack, defence, seed) for seed in seeds]
            values = [done[case.key] for case in cases if case.key in done]
            spread = f" ± {np.std(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.3f}{spread}" if values else "–")
        lines.append((attack, *cells))
    return TextTable.of(("attack", *(f"{space}, {defence}" for space, defence in columns)), lines)
