"""The slides of 2025: several models on the same nodes (their Table I).

The slides do not say how nodes train, nor how long. Their author's public code does
(github.com/haoran-zh/mmfl-Dec): 150 rounds of five local epochs, the whole share as one batch, a
rate of 0.01, 90 to 150 examples of a task on a rich client and a tenth of that on the others. That
is the setting which is set beside the slides' numbers. At ten times the rate the rules without
importance fall behind within some thirty rounds.
"""

from __future__ import annotations

from functools import partial

from simulations.reproduce.findings import Findings
from simulations.reproduce.measures import LATE_ACCURACY, ROUNDS, accuracy_after
from simulations.reproduce.pictures import draw_methods
from simulations.reproduce.study import Cell, Scope, Study

# The slides' Table I, best first.
RULES = ("full", "stale", "gvr", "lvr", "mifa", "scaffold", "fedvarp", "random")
AS_PUBLISHED, LARGE_STEPS = "3 tasks", "3 tasks, rate 0.1"
SHORT = "rounds=30"
# All pairs train; whether they are worth it is asked at the author's rate alone.
_COSTLY = ("stale", "gvr")
RELATIVE = "accuracy relative to full participation"


def _cells(scope: Scope) -> list[Cell]:
    cells = [_cell(scope, AS_PUBLISHED, rule) for rule in RULES]
    large = [rule for rule in RULES if rule not in _COSTLY]
    return cells + [_cell(scope, LARGE_STEPS, rule, "train.lr=0.1", SHORT) for rule in large]


def _cell(scope: Scope, setting: str, rule: str, *changes: str) -> Cell:
    words = [*changes, f"strategy.sampling={rule}"]
    if scope.stand_in:
        # So few that every node needs all that it can get of them.
        tasks = ", ".join(f"{{name: digits-{number}}}" for number in (1, 2, 3))
        words += [*scope.data("fashion_mnist"), "nodes=24", "strategy.budget=4"]
        words.append(f"multi_model.tasks=[{tasks}]")
    reads = ("accuracy", LATE_ACCURACY, *map(accuracy_after, ROUNDS))
    # They share no training, so that each can go to a process of its own.
    return Cell(setting, rule, tuple(words), reads)


def relate(found: Findings) -> None:
    """Add every accuracy relative to full participation in the same round, seed by seed."""
    for each in list(found.findings):
        full = found.get(each.setting, "full", each.quantity)
        name = each.quantity.replace("accuracy", RELATIVE)
        found.ratio((each.setting, each.method, name), each, full)


STUDIES = (
    Study(
        name="slides_multi_model",
        experiment="multi_model_slides",
        paper="Slides 2025",
        where="Table I: several models",
        about=(
            "Three Fashion-MNIST models on 120 nodes, 12 of 348 client-model pairs a round: their "
            "accuracy relative to full participation."
        ),
        cells=_cells,
        draw=partial(draw_methods, quantities=(RELATIVE,)),
        seeds=3,
        minutes=31,
        quick=(SHORT,),
        derive=relate,
        shown=("accuracy", RELATIVE),
        differs=(
            "A 784-32-10 network instead of a CNN; training as in the author's public code, about "
            "which the slides say nothing. Not run: the column of five tasks, because Shakespeare "
            "and EMNIST are not at hand, and a ResNet for CIFAR-10 on 120 clients does not fit two "
            "cores. What the slides' ± counts is not said; full participation has one too."
        ),
    ),
)
