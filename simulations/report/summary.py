"""Runs to table rows: one method per row, means and standard deviations over its seeds.

The standard deviation is the sample one (division by n − 1): seeds are a sample of the runs that
could have been made. A method with a single value has none. Curves are averaged round by round, at
the mean number of bytes sent by then, over the rounds that all seeds have: a mean over ever fewer
seeds would jump where one drops out.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from simulations.report.runs import Partition, Run, Setting

# Reference runs frame the comparison: they send nothing, and no federated method is expected
# above the one or below the other.
CEILING, FLOOR = "global", "local"
REFERENCES = (CEILING, FLOOR)
# What results call the rule by which all nodes train all models.
FULL = "full"


@dataclass(frozen=True)
class Spread:
    """A mean over `count` values and their sample standard deviation (None for one value)."""

    mean: float
    sd: float | None
    count: int

    def __str__(self) -> str:
        """Write ``0.931 ± 0.004``."""
        return f"{self.mean:.3f}" if self.sd is None else f"{self.mean:.3f} ± {self.sd:.3f}"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return mean and deviation of the values that are known; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    sd = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), sd, len(known))


@dataclass(frozen=True)
class Point:
    """The state after a round: bytes of all rounds so far, both directions; accuracy or rmse."""

    round: int
    total_bytes: float
    score: float
    sd: float = 0.0

    @classmethod
    def mean(cls, points: Sequence["Point"]) -> "Point":
        """Return the mean of several seeds after the same round."""
        score = spread(point.score for point in points)
        assert score is not None
        total_bytes = statistics.fmean(point.total_bytes for point in points)
        return cls(points[0].round, total_bytes, score.mean, score.sd or 0.0)


def run_curve(run: Run) -> tuple[Point, ...]:
    """Return the evaluated rounds of a run; those without evaluation add their bytes alone."""
    points: list[Point] = []
    total_bytes = 0
    for entry in run.history:
        total_bytes += entry.bytes_up + entry.bytes_down
        score = entry.rmse if run.metric == "rmse" else entry.accuracy
        if score is not None:
            points.append(Point(entry.number, total_bytes, score))
    return tuple(points)


@dataclass(frozen=True)
class Method:
    """The runs of one method in one setting: a row of the table."""

    name: str
    strategy: str
    runs: tuple[Run, ...]

    @property
    def is_reference(self) -> bool:
        """Whether it is `local` or `global`, drawn as a line rather than a competitor."""
        return self.strategy in REFERENCES

    @property
    def seeds(self) -> int:
        """How many different seeds there are."""
        return len({run.seed for run in self.runs})

    @property
    def metric(self) -> str:
        """What its runs are judged by: accuracy, or rmse where numbers are predicted."""
        return self.runs[0].metric

    def mean(self, quantity: str) -> Spread | None:
        """Return mean and deviation over runs of an attribute of `Run`, such as ``accuracy``."""
        return spread(getattr(run, quantity) for run in self.runs)

    @property
    def score(self) -> Spread | None:
        """Final value of what its runs are judged by."""
        return self.mean("score")

    @property
    def bytes_up(self) -> float:
        """Mean bytes from nodes to server per run."""
        return statistics.fmean(run.bytes_up for run in self.runs)

    @property
    def bytes_down(self) -> float:
        """Mean bytes from server to nodes per run."""
        return statistics.fmean(run.bytes_down for run in self.runs)

    @property
    def total_bytes(self) -> float:
        """Mean bytes per run, both directions."""
        return self.bytes_up + self.bytes_down

    @property
    def rounds(self) -> tuple[int, int]:
        """Fewest and most rounds of a run; they differ where a stop rule ended runs early."""
        rounds = [run.rounds for run in self.runs]
        return min(rounds), max(rounds)

    @cached_property
    def curves(self) -> tuple[tuple[Point, ...], ...]:
        """Curves of its runs that have two evaluated rounds after the initial model."""
        curves = map(run_curve, self.runs)
        return tuple(curve for curve in curves if sum(point.round > 0 for point in curve) > 1)

    @cached_property
    def mean_curve(self) -> tuple[Point, ...]:
        """The mean over seeds; empty for a method that is a point."""
        by_round = [{point.round: point for point in curve} for curve in self.curves]
        common = sorted(set.intersection(*map(set, by_round))) if by_round else []
        return tuple(Point.mean([points[number] for points in by_round]) for number in common)

    @property
    def end_point(self) -> Point | None:
        """The final state from ``result.json`` alone; None if no run has a score."""
        score = self.score
        if score is None:
            return None
        return Point(self.rounds[1], self.total_bytes, score.mean, score.sd or 0.0)


@dataclass(frozen=True)
class SettingSummary:
    """One setting's methods, in the order of the table: ceiling, best to worst, floor."""

    setting: Setting
    methods: tuple[Method, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs of the setting."""
        return tuple(run for method in self.methods for run in method.runs)

    @property
    def metric(self) -> str:
        """What its runs are judged by."""
        return self.methods[0].metric

    @property
    def division(self) -> tuple[int, Partition] | None:
        """Seed and division of the data that stand for the setting: those of the lowest seed."""
        # `global` pools the data, so its own division, if it wrote one, is not the nodes'.
        candidates = [run for run in self.runs if run.strategy != CEILING] or list(self.runs)
        for run in sorted(candidates, key=lambda run: run.seed):
            if run.division is not None:
                return run.seed, run.division
        return None

    @property
    def models(self) -> list[str]:
        """Names of the models where runs train several, in order."""
        return list(dict.fromkeys(name for run in self.runs for name in run.accuracies))

    def relative(self, method: Method) -> Spread | None:
        """Return mean accuracy of a method's models over that of full participation, by seed.

        So what a seed makes easy or hard does not count; None without such a run.
        """
        full = {run.seed: run.accuracy for run in self.runs if run.sampling == FULL}
        return spread(
            run.accuracy / best
            for run in method.runs
            if run.accuracies and run.accuracy is not None and (best := full.get(run.seed))
        )


def summarise(runs: Sequence[Run]) -> tuple[SettingSummary, ...]:
    """Group runs by setting and method, methods in the order in which a table reads best."""
    settings: dict[Setting, dict[tuple[str, str], list[Run]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run in runs:
        settings[run.setting][run.method, run.strategy].append(run)
    found = []
    for setting, groups in sorted(settings.items()):
        methods = [
            Method(name, strategy, tuple(sorted(members, key=lambda run: run.seed)))
            for (name, strategy), members in groups.items()
        ]
        found.append(SettingSummary(setting, tuple(sorted(methods, key=_reading_order))))
    return tuple(found)


def _reading_order(method: Method) -> tuple[int, float, str]:
    position = {CEILING: 0, FLOOR: 2}.get(method.strategy, 1)
    score, sign = method.score, 1 if method.metric == "rmse" else -1
    return position, math.inf if score is None else sign * score.mean, method.name


def comparability_warnings(settings: Sequence[SettingSummary]) -> tuple[str, ...]:
    """Name rows that look like a fair comparison but are not.

    A setting holds the name of a partition, not its parameters, and a method the name of a
    strategy; two values of a parameter would silently be averaged or set side by side.
    """
    warnings: list[str] = []
    for summary in settings:
        title = summary.setting.title
        for method in summary.methods:
            seeds = [run.seed for run in method.runs]
            if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
                warnings.append(
                    f"{title}: {method.name} has more than one run for seed "
                    f"{', '.join(map(str, repeated))}; all of them are in its mean "
                    "(details.label in result.json tells variants apart)"
                )
        divisions: dict[int, set[Partition]] = defaultdict(set)
        for run in summary.runs:
            if run.division is not None and run.strategy != CEILING:
                divisions[run.seed].add(run.division)
        if unequal := sorted(seed for seed, found in divisions.items() if len(found) > 1):
            warnings.append(
                f"{title}: runs with seed {', '.join(map(str, unequal))} do not share one "
                "division of the data, so their rows cannot be compared"
            )
    return tuple(warnings)


def format_bytes(count: float) -> str:
    """Write bytes with three digits: ``512 B``, ``26.4 KB``, ``1.05 MB``; 1 MB is 10^6 bytes."""
    # Round before choosing the unit, or 999,999 bytes would read "1000 KB".
    rounded = float(f"{count:.3g}")
    if rounded == 0:
        return "0"
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if rounded >= size:
            value = rounded / size
            places = 0 if value >= 100 else 1 if value >= 10 else 2
            return f"{value:,.{places}f} {unit}"
    return f"{rounded:.0f} B"


def tick_bytes(count: float) -> str:
    """Write a byte count as the label of an axis: ``1 MB``, not ``1.00 MB``."""
    return re.sub(r"\.0+(?= )", "", format_bytes(count))
