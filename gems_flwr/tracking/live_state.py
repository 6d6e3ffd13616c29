"""What a person who watches a run wants to know, kept as plain values.

Told by the callbacks of a run, read by `live_picture` and by the lines of a log. Keeping it costs
microseconds, whatever the number of nodes: drawing happens elsewhere, and now and then.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gems_flwr.server.log import short
from gems_flwr.server.state import RoundRecord
from gems_flwr.typing import Metrics

Kind = Literal["score", "loss"]
# Words by which a metric is known to be one that a run is followed by, or is not.
_WORDS: dict[Kind, tuple[str, ...]] = {
    "score": ("acc", "rmse", "auc", "f1"),
    "loss": ("loss",),
}
_OTHER_WORDS = ("/", "cumulative", "sum")
# Before others of the same source.
_USUAL = ("accuracy", "rmse", "loss")
# Of one round; a node cannot fill the memory with names.
_MOST_NAMES = 16
# As many rounds as a tall terminal shows.
_MOST_ROWS = 50
# Of the numbers of one name; beyond, every second one is dropped, which no sparkline shows.
_MOST_POINTS = 20_000


@dataclass(frozen=True)
class Row:
    """One round of the table."""

    round: int
    asked: int
    answered: int
    left_out: int
    bytes_up: int
    bytes_down: int
    seconds: float
    numbers: Mapping[str, float]


@dataclass
class LiveState:
    """A run so far.

    Parameters
    ----------
    title : str
        What is running.
    """

    title: str
    rounds: int | None = None
    finished: int = 0
    asked: int = 0
    answered: int = 0
    failed: int = 0
    exchange_round: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    ended: str | None = None
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=_MOST_ROWS))
    # Of each metric, by name: its kind, its place among those of its kind, its values.
    series: dict[str, tuple[Kind, int, list[float]]] = field(default_factory=dict)
    models: dict[str, float] = field(default_factory=dict)
    # Of the newest round in which somebody was left out: reasons, how many nodes, one of them.
    trouble: tuple[int, tuple[tuple[str, int, str], ...]] | None = None
    began: float = field(default_factory=time.monotonic)
    stopped: float | None = None
    _began_after: int = 0

    def start(self, rounds: int, history: Sequence[RoundRecord]) -> None:
        """Begin, with what is known already."""
        self.rounds, self.began = rounds, time.monotonic()
        for record in history:
            self.add(record)
        self._began_after = self.finished

    def exchange(self, number: int, nodes: int) -> None:
        """Begin to wait for so many nodes."""
        self.exchange_round, self.asked, self.answered, self.failed = number, nodes, 0, 0

    def reply(self, usable: bool) -> None:
        """Note that one more has answered."""
        if usable:
            self.answered += 1
        else:
            self.failed += 1

    def add(self, record: RoundRecord) -> None:
        """Note a finished round."""
        self.finished = record.round
        self.bytes_up += record.traffic.bytes_up
        self.bytes_down += record.traffic.bytes_down
        told = _followable(record)
        for name, (kind, place, value) in told.items():
            if name in self.series or len(self.series) < 4 * _MOST_NAMES:
                _extend(self.series.setdefault(name, (kind, place, []))[2], value)
        prefix = "accuracy/"
        models = {k: v for k, v in _numbers(record.server_metrics).items() if k.startswith(prefix)}
        self.models = {short(k[len(prefix) :], 40): v for k, v in models.items()} or self.models
        left_out = len({failure.node for failure in record.failures})
        if record.failures:
            reasons = Counter(short(failure.reason, 100) for failure in record.failures)
            example = {short(f.reason, 100): short(f.node, 40) for f in record.failures}
            usual = reasons.most_common(3)
            self.trouble = record.round, tuple((why, n, example[why]) for why, n in usual)
        if record.round:
            self.rows.append(
                Row(
                    round=record.round,
                    asked=len(record.nodes_asked),
                    answered=len(record.nodes_answered),
                    left_out=left_out,
                    bytes_up=record.traffic.bytes_up,
                    bytes_down=record.traffic.bytes_down,
                    seconds=record.seconds,
                    numbers={name: value for name, (_, _, value) in told.items()},
                )
            )
        self.asked = self.answered = self.failed = 0

    def end(self, reason: str) -> None:
        """Note that the run is over, and why."""
        self.ended, self.stopped = reason, time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds that this process has worked on the run."""
        return (self.stopped or time.monotonic()) - self.began

    @property
    def seconds_left(self) -> float | None:
        """Return how long the other rounds take if they take as long; None if nobody can know."""
        played = self.finished - self._began_after
        if self.rounds is None or played < 1 or self.ended is not None:
            return None
        return self.elapsed / played * max(self.rounds - self.finished, 0)

    def followed(self, kind: Kind) -> str | None:
        """Return the name of the score or loss that the run is followed by; None without any.

        A number that is measured now and then only gives way to one that most rounds have.
        """
        lengths = {
            name: len(values) for name, (is_a, _, values) in self.series.items() if is_a == kind
        }
        usual = [name for name, n in lengths.items() if 2 * n >= max(lengths.values())]
        return min(usual, key=lambda name: self.series[name][1], default=None)


def _followable(record: RoundRecord) -> dict[str, tuple[Kind, int, float]]:
    """Return scores and losses of a round, the server's own before the nodes'."""
    sources = {
        "": record.server_metrics,
        "eval": record.evaluate_metrics,
        "train": record.train_metrics,
    }
    found: dict[str, tuple[Kind, int, float]] = {}
    for place, (source, metrics) in enumerate(sources.items()):
        for name, value in list(_numbers(metrics).items())[:_MOST_NAMES]:
            for kind, words in _WORDS.items():
                if any(word in name for word in words) and not any(w in name for w in _OTHER_WORDS):
                    whole = name if name.startswith((source, "in_place")) else f"{source} {name}"
                    rank = 10 * place + 2 * (name not in _USUAL) + ("balanced" in name)
                    found[short(whole, 40)] = (kind, rank, value)
    return found


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, list)}


def _extend(values: list[float], value: float) -> None:
    if len(values) >= _MOST_POINTS:
        del values[1:-1:2]
    values.append(value)
