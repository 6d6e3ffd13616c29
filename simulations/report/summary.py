"""Runs to table rows: one method per row, means and standard deviations over its seeds.

The standard deviation is the sample one (division by n − 1): seeds are a sample of the runs that
could have been made. A method with a single value has no standard deviation.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulations.report.runs import Partition, Run, Setting

# Reference runs frame the comparison: nothing is sent, and no federated method is expected
# above the one or below the other.
CEILING = "global"
FLOOR = "local"
REFERENCES = (CEILING, FLOOR)


@dataclass(frozen=True)
class Spread:
    """A mean over `count` values and their sample standard deviation (None for one value)."""

    mean: float
    sd: float | None
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Compute mean and sample standard deviation of the values that are known.

    Parameters
    ----------
    values : Iterable[float | None]
        The values, one per run; None where a run has none.

    Returns
    -------
    Spread | None
        None if no value is known.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    sd = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), sd, len(known))


@dataclass(frozen=True)
class Method:
    """The runs of one method in one setting: a row of the table."""

    name: str
    strategy: str
    runs: tuple[Run, ...]

    @property
    def is_reference(self) -> bool:
        """Whether this is a `local` or `global` run, drawn as a line rather than a competitor."""
        return self.strategy in REFERENCES

    @property
    def seeds(self) -> int:
        """How many different seeds there are."""
        return len({run.seed for run in self.runs})

    @property
    def accuracy(self) -> Spread | None:
        """Final accuracy over runs, 0 to 1."""
        return spread(run.accuracy for run in self.runs)

    @property
    def rmse(self) -> Spread | None:
        """Final root mean squared error over runs, of those that predict numbers."""
        return spread(run.rmse for run in self.runs)

    @property
    def metric(self) -> str:
        """What its runs are judged by: accuracy, or rmse where numbers are predicted."""
        return self.runs[0].metric

    @property
    def score(self) -> Spread | None:
        """Final value of that over runs."""
        return spread(run.score for run in self.runs)

    @property
    def loss(self) -> Spread | None:
        """Final loss over runs."""
        return spread(run.loss for run in self.runs)

    @property
    def seconds(self) -> Spread | None:
        """Wall-clock seconds per run."""
        return spread(run.seconds for run in self.runs)

    @property
    def messages(self) -> Spread | None:
        """Messages per run, both directions."""
        return spread(run.messages for run in self.runs)

    @property
    def bytes_up(self) -> float:
        """Mean bytes from nodes to server per run."""
        return statistics.fmean(run.bytes_up for run in self.runs)

    @property
    def bytes_down(self) -> float:
        """Mean bytes from server to nodes per run."""
        return statistics.fmean(run.bytes_down for run in self.runs)

    @property
    def rounds(self) -> tuple[int, int]:
        """Fewest and most rounds of a run; they differ where a stop rule ended runs early."""
        rounds = [run.rounds for run in self.runs]
        return min(rounds), max(rounds)

    @property
    def nodes_failed(self) -> int:
        """Failed nodes, summed over runs."""
        return sum(run.nodes_failed for run in self.runs)


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


def summarise(runs: Sequence[Run]) -> tuple[SettingSummary, ...]:
    """Group runs by setting and method.

    Parameters
    ----------
    runs : Sequence[Run]
        Finished runs of any number of settings.

    Returns
    -------
    tuple[SettingSummary, ...]
        Sorted by setting; methods in the order in which a table reads best.
    """
    settings: dict[Setting, dict[tuple[str, str], list[Run]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run in runs:
        settings[run.setting][run.method, run.strategy].append(run)
    return tuple(
        SettingSummary(
            setting,
            tuple(
                sorted(
                    (
                        Method(name, strategy, tuple(sorted(members, key=lambda run: run.seed)))
                        for (name, strategy), members in groups.items()
                    ),
                    key=_reading_order,
                )
            ),
        )
        for setting, groups in sorted(settings.items())
    )


def _reading_order(method: Method) -> tuple[int, float, str]:
    position = {CEILING: 0, FLOOR: 2}.get(method.strategy, 1)
    score, sign = method.score, 1 if method.metric == "rmse" else -1
    return position, math.inf if score is None else sign * score.mean, method.name


def comparability_warnings(settings: Sequence[SettingSummary]) -> tuple[str, ...]:
    """Name rows that look like a fair comparison but are not.

    A setting holds the name of a partition, not its parameters, and a method the name of a
    strategy; two values of a parameter would silently be averaged or set side by side.

    Parameters
    ----------
    settings : Sequence[SettingSummary]
        What goes into the tables.

    Returns
    -------
    tuple[str, ...]
        One sentence per doubt.
    """
    warnings: list[str] = []
    for summary in settings:
        title = summary.setting.title
        for method in summary.methods:
            repeated = _repeated([run.seed for run in method.runs])
            if repeated:
                warnings.append(
                    f"{title}: {method.name} has more than one run for seed "
                    f"{', '.join(map(str, repeated))}; all of them are in its mean "
                    "(details.label in result.json tells variants apart)"
                )
        divisions: dict[int, set[Partition]] = defaultdict(set)
        for run in summary.runs:
            if run.division is not None and run.strategy != CEILING:
                divisions[run.seed].add(run.division)
        unequal = sorted(seed for seed, found in divisions.items() if len(found) > 1)
        if unequal:
            warnings.append(
                f"{title}: runs with seed {', '.join(map(str, unequal))} do not share one "
                "division of the data, so their rows cannot be compared"
            )
    return tuple(warnings)


def _repeated(values: Sequence[int]) -> list[int]:
    return sorted({value for value in values if values.count(value) > 1})


def format_bytes(count: float) -> str:
    """Write a byte count with three significant digits and a decimal unit.

    Parameters
    ----------
    count : float
        Bytes, ≥ 0.

    Returns
    -------
    str
        For example ``0``, ``512 B``, ``26.4 KB``, ``1.05 MB``; 1 MB is 10^6 bytes.
    """
    # Round before choosing the unit, or 999,999 bytes would read "1000 KB".
    rounded = float(f"{count:.3g}")
    if rounded == 0:
        return "0"
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if rounded >= size:
            return f"{_three_digits(rounded / size)} {unit}"
    return f"{rounded:.0f} B"


def tick_bytes(count: float) -> str:
    """Write a byte count as the label of an axis: ``1 MB``, not ``1.00 MB``."""
    return re.sub(r"\.0+(?= )", "", format_bytes(count))


def _three_digits(value: float) -> str:
    if value >= 1000:  # beyond the largest unit
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_accuracy(value: Spread | None, runs: int) -> str:
    """Write an accuracy, or an error, as ``mean ± sd``; say so if some runs have none.

    Parameters
    ----------
    value : Spread | None
        The accuracy over the runs that have one.
    runs : int
        How many runs there are in all.

    Returns
    -------
    str
        For example ``0.931 ± 0.004``, ``0.931`` for one run, ``–`` for none.
    """
    if value is None:
        return "–"
    text = f"{value.mean:.3f}" if value.sd is None else f"{value.mean:.3f} ± {value.sd:.3f}"
    return text if value.count == runs else f"{text} ({value.count} of {runs})"
