"""The slides of 2025: several models on the same nodes (their Table I), and why numbers differ.

The slides do not say how nodes train, nor how long. Their author's public code does
(github.com/haoran-zh/mmfl-Dec): 150 rounds of five local epochs, the whole share as one batch, a
rate of 0.01, 90 to 150 examples of a task on a rich client and a tenth of that on the others. That
is the setting which is set beside the slides' numbers. At ten times the rate the rules without
importance fall behind within some thirty rounds; the settings after it take one thing away each.
"""

from __future__ import annotations

from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.papers.multi_model_claims import draw
from simulations.reproduce.papers.multi_model_measures import (
    DRAWS,
    LATE_ACCURACY,
    RESIDUAL,
    ROUNDS,
    SHORT,
    STEP_NOISE,
    VARIANCE,
    accuracy_after,
)
from simulations.reproduce.papers.multi_model_names import (
    AS_PUBLISHED,
    LARGE_STEPS,
    RULES,
    UNIT_STEPS,
    WARM,
    relative,
)
from simulations.reproduce.papers.spec import Cell, Reproduction, Scope

NAME = "slides_multi_model"
_READS = (
    "accuracy",
    LATE_ACCURACY,
    *map(accuracy_after, ROUNDS),
    DRAWS,
    STEP_NOISE,
    VARIANCE,
    RESIDUAL,
)
# As long as this experiment was before; what is isolated shows by then.
_LARGE = ("train.lr=0.1", f"rounds={SHORT}")
# All pairs train; whether they are worth it is asked at the author's rate alone.
_COSTLY = ("stale", "gvr")
_UNIT = {"random": "UnitSteps", "scaffold": "UnitScaffold", "fedvarp": "UnitFedVarp"}
_RULES_MODULE = "simulations.reproduce.papers.multi_model_rules"


def _cells(scope: Scope) -> list[Cell]:
    cells = [_cell(scope, AS_PUBLISHED, rule) for rule in RULES]
    cells += [_cell(scope, LARGE_STEPS, rule, *_LARGE) for rule in RULES if rule not in _COSTLY]
    for rule in ("mifa", "fedvarp", "random"):
        cells.append(_cell(scope, WARM, rule, *_LARGE, "strategy.warm_start=true"))
    for rule, variant in _UNIT.items():
        chosen = f"strategy.sampling={{_target_: {_RULES_MODULE}.{variant}}}"
        cells.append(_cell(scope, UNIT_STEPS, rule, *_LARGE, chosen, f"label={rule}_unit"))
    return cells


def _cell(scope: Scope, setting: str, rule: str, *changes: str) -> Cell:
    words = ["experiment=multi_model_slides", "backend=silent", *changes]
    if not any(word.startswith("strategy.sampling=") for word in words):
        words.append(f"strategy.sampling={rule}")
    if scope.stand_in:
        # So few that every node needs all that it can get of them.
        tasks = ", ".join(f"{{name: digits-{number}}}" for number in (1, 2, 3))
        words += [f"dataset={scope.dataset('fashion_mnist')}", "nodes=24", "strategy.budget=4"]
        words.append(f"multi_model.tasks=[{tasks}]")
    # They share no training, so that each can go to a process of its own.
    return Cell(setting, rule, tuple(words), _READS, group=f"{setting}, {rule}")


def _relate(found: Findings) -> None:
    """Add every accuracy relative to full participation in the same round, seed by seed."""
    for each in list(found.findings):
        if "accuracy" not in each.quantity:
            continue
        reference = AS_PUBLISHED if each.setting == AS_PUBLISHED else LARGE_STEPS
        full = found.get(reference, "full", each.quantity)
        if full is None:
            continue
        shares = [
            None if ours is None or best is None else ours / best
            for ours, best in zip(each.by_seed, full.by_seed, strict=False)
        ]
        found.add(Finding(each.setting, each.method, relative(each.quantity), shares))


REPRODUCTIONS = (
    Reproduction(
        name=NAME,
        paper="Slides 2025",
        where="Table I and its figure: several models",
        about=(
            "Three Fashion-MNIST models on 120 nodes, 12 of 348 client-model pairs a round: their "
            "accuracy relative to full participation."
        ),
        cells=_cells,
        draw=draw,
        seeds=3,
        minutes=6,
        quick_minutes=1.0,
        quick=(f"rounds={SHORT}",),
        derive=_relate,
        scaled=(
            "A 784-32-10 network instead of a CNN; training as in the author's public code, about "
            "which the slides say nothing. Not run: the column of five tasks, because Shakespeare "
            "and EMNIST are not at hand, and a ResNet for CIFAR-10 on 120 clients does not fit two "
            "cores. What the slides' ± counts is not said; full participation has one too."
        ),
    ),
)
