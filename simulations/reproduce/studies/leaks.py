"""What do class moments give away? Rebuilt samples, and who is among them.

Two attackers at the server (`gems_flwr.tools.leaks`) get what a node sends of one class, for
several numbers of samples and several forms: full moments, a fixed rank, the automatic form, and
with noise for differential privacy. Samples of one node are rebuilt, members of several nodes told
from others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from simulations.report.plotting import COLOURS, add_grid, legend_below, new_figure, write_heading
from simulations.reproduce.findings import Finding, Findings
from simulations.reproduce.study import OURS, Study

if TYPE_CHECKING:
    from gems_flwr.spaces.cone import ClassMomentCone
    from gems_flwr.typing import Float
    from simulations.experiment.experiment import Experiment

SIZES = (8, 32, 64, 256)
FULL, FIXED, AUTOMATIC, PRIVATE = "full moments", "rank 20", "automatic", "full, ε = 10"
FORMS: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rank": "full", "min_count": 2},
    FIXED: {"rank": 20},
    AUTOMATIC: {},
    PRIVATE: {"rank": "full"},
}
REBUILT, STRANGERS, AUC = "share rebuilt", "share near a stranger", "AUC of members"
# A sample counts as rebuilt if a guess is so near, per feature, in units of the features' range.
NEAR = 0.1
# Nodes on which members are told from others, and the largest number of the attacker's own samples.
NODES, KNOWN = 4, 2500
ITERATIONS = 3000


def measure(
    overrides: Sequence[str], seed: int, folder: Path, console: Console
) -> Iterator[Finding]:
    """Yield what both attackers reach."""
    from simulations.config import ConfigError, compose_config
    from simulations.experiment.experiment import Experiment

    samples = _widest_class(Experiment(compose_config([*overrides, f"seed={seed}"])))
    known, rest = samples[: min(KNOWN, len(samples) // 2)], samples[len(samples) // 2 :]
    sizes = [size for size in SIZES if NODES * size + size <= len(rest) and 2 * size < len(known)]
    if not sizes:
        raise ConfigError(
            "the widest class has too few samples to attack: dataset=mnist has enough"
        )
    cases = [(size, form) for size in sizes for form in FORMS]
    is_quiet = not console.is_terminal
    for size, form in track(cases, "attacking", console=console, transient=True, disable=is_quiet):
        nodes = [rest[k * size : (k + 1) * size] for k in range(NODES)]
        values = _attack(form, known, nodes, rest[NODES * size :])
        for quantity, value in values.items():
            yield Finding(f"{size} samples", form, quantity, [value], x=float(size))


def _widest_class(experiment: Experiment) -> Float:
    """Return the samples of the class that differ most, in an order by the seed.

    Of a narrow class (the digit 1) any stranger's sample is near everybody's.
    """
    from gems_flwr.core import generator

    pool = experiment.dataset.train
    inputs, labels = experiment.tensors(pool)
    table = inputs.reshape(len(inputs), -1).double().numpy()
    classes = [table[labels.numpy() == label] for label in range(experiment.dataset.classes)]
    widest = max(classes, key=lambda samples: float(samples.var(axis=0).sum()))
    return np.asarray(generator(experiment.config.seed, "leaks").permutation(widest))


def send(samples: Float, form: str) -> ClassMomentCone | None:
    """Return what a node with these samples of one class sends; None if it is nothing."""
    import torch

    from gems_flwr.core import derive_seed
    from gems_flwr.errors import SpaceError
    from gems_flwr.spaces.cone import PrivateRelease, build_cone

    options = dict(FORMS[form])
    if form == PRIVATE:
        clip = float(np.median(np.linalg.norm(samples, axis=1)))
        # Repeatable, and another for every node.
        digest = hashlib.blake2b(samples.tobytes()).hexdigest()
        options |= {"private": PrivateRelease(10.0, 1e-5, clip, (0,))}
        options |= {"noise_seed": derive_seed(0, "leaks", digest)}
    inputs = torch.from_numpy(samples).float()
    try:
        return build_cone(inputs, torch.zeros(len(samples)), 2, **options)
    except SpaceError:
        return None


def _attack(
    form: str, known: Float, nodes: Sequence[Float], others: Float
) -> dict[str, float | None]:
    """Return what both attackers reach; nothing is rebuilt where nothing was sent."""
    from gems_flwr.spaces.cone import mean_values
    from gems_flwr.tools import leaks

    def release(samples: Float) -> tuple[Float, Float] | None:
        cone = send(samples, form)
        return None if cone is None else (mean_values(cone)[0], cone.covariance.dense_matrix(0))

    low, high = float(known.min()), float(known.max())

    def near(guesses: Float) -> float:
        return float((leaks.nearest_distances(guesses, nodes[0]) <= NEAR * (high - low)).mean())

    values: dict[str, float | None] = {REBUILT: 0.0, STRANGERS: near(known), AUC: None}
    cone = send(nodes[0], form)
    if cone is not None:
        sent = (mean_values(cone)[0], leaks.sent_directions(cone, 0), len(nodes[0]))
        values[REBUILT] = near(leaks.rebuild_table(*sent, low, high, iterations=ITERATIONS))
    # Half of the other samples are the attacker's own while the other half is tried.
    others, found = np.concatenate([known, others]), []
    for samples in nodes:
        made = release(samples)
        tried = made and leaks.attack_membership(samples, others, made, release)
        found += [tried.auc.value] if tried else []
    if len(found) == len(nodes):
        values[AUC] = float(np.mean(found))
    return values


def draw(found: Findings) -> Figure:
    """Draw both attacks against the number of samples."""
    figure = new_figure(3.8, 8.4)
    for axes, quantity, below in zip(
        figure.subplots(1, 2), (REBUILT, AUC), (-0.03, 0.45), strict=True
    ):
        for form, colour in zip(FORMS, (1, 3, 2, 0), strict=True):
            own = [each for each in found.of(quantity) if each.method == form and each.values]
            axes.plot(
                [each.x for each in own],
                [each.mean for each in own],
                **{"marker": "o", "color": COLOURS[colour], "label": form},
            )
        sizes = sorted({each.x or 0 for each in found.of(REBUILT)})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.set_ylim(below, 1.03)
        axes.set_xlabel("samples of the class")
        axes.set_ylabel(quantity)
        write_heading(axes, "", "one class, by the form of its moments")
        add_grid(axes)
    legend_below(figure, 4)
    return figure


STUDY = Study(
    name="leaks",
    paper=OURS,
    where="",
    about="What do class moments give away? Rebuilt samples, and who is among them.",
    measure=measure,
    draw=draw,
    seeds=1,
    minutes=2,
)
