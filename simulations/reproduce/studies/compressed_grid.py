"""The runs of the study `compressed_streams`: protocols × compression on streams, and FedAvg.

Decided here: MNIST's streams have 700 rounds, half of what `mnist_100` has, so that three seeds
fit into an evening. On the label-skewed stream protocols are judged by the test loss of the average
with which the last round ends: on its own few labels a learner does best alone, and the more it
hears of the others, the more it loses there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gems_flwr.compression.difference_coding import Form
from simulations.config import ConfigError
from simulations.reproduce.papers.dynamic2018 import READS, TOTAL, alone, dynamic, periodic
from simulations.reproduce.papers.equal_loss import BYTES, LOSS
from simulations.reproduce.papers.spec import Cell

PLAIN: Form = "float32"
FORMS: tuple[Form, ...] = (PLAIN, "int8", "int4")
UP, QUIET, ACCURACY = "MB up", "MB of quiet messages", "accuracy"
# Of the last model, on test data.
FINAL_LOSS = "loss"
# What FedAvg without a stream is judged by.
TEST_LOSS = "test loss over rounds"
LABELS = "fedavg_labels"
_SHORT = ("rounds=700", "evaluate_every=700")
_GENERATED = ("graphical_drift",)
# Without a stream a round is an epoch: where streams are shortened, it is by fewer rounds.
_BATCHES_OF_A_ROUND, _FEWEST = 20, 2


@dataclass(frozen=True)
class Stream:
    """A stream and the settings of the protocols on it.

    Parameters
    ----------
    title : str
        How tables call it.
    experiment : str
        Its config in ``conf/experiment``.
    periods : tuple of int
        Of periodic averaging, b.
    local, total : tuple of float
        Thresholds of dynamic averaging: the paper's condition with balancing, and the total one.
    more : tuple of str
        Further overrides.
    judged_by : str
        The loss that counts, a name of `run_measures`.
    """

    title: str
    experiment: str
    periods: tuple[int, ...]
    local: tuple[float, ...]
    total: tuple[float, ...]
    more: tuple[str, ...] = ()
    judged_by: str = LOSS

    def protocols(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield name and overrides of every protocol."""
        for b in self.periods:
            yield f"b = {b}", periodic(b)
        for delta in self.local:
            yield f"Δ = {delta:g}", dynamic(delta)
        for delta in self.total:
            yield f"total, Δ = {delta:g}", dynamic(delta, **TOTAL)
        yield "FedAvg, C = 0.3", periodic(5, fraction=0.3)


STREAMS = (
    Stream("stationary", "mnist_100", (2, 8, 32), (0.3,), (0.3,), _SHORT),
    Stream("drift", "graphical_drift", (4, 16, 64), (0.1,), (0.03, 0.1)),
    Stream(
        "label-skewed",
        "mnist_skewed",
        (8, 32, 64),
        (1.0,),
        (0.3, 1.0),
        (*_SHORT, "strategy.final_sync=true"),
        FINAL_LOSS,
    ),
)
# Only if asked for: it takes as long as the others together.
FURTHER = (Stream("permuted labels", "mnist_drift", (4, 16, 64), (0.7,), (0.3, 0.7)),)


def judged_by(setting: str) -> str:
    """Return the loss by which protocols on a stream are compared."""
    chosen = {each.title: each.judged_by for each in (*STREAMS, *FURTHER)}
    return chosen.get(setting, LOSS)


def named(protocol: str, form: str) -> str:
    """Return what a protocol is called with compression; without, it keeps its name."""
    return protocol if form == PLAIN else f"{protocol}, {form}"


def split_name(method: str) -> tuple[str, str]:
    """Return protocol and compression of a method that `named` has named."""
    for form in FORMS:
        if form != PLAIN and method.endswith(f", {form}"):
            return method.removesuffix(f", {form}"), form
    return method, PLAIN


def chosen_cells(overrides: Sequence[str]) -> list[Cell]:
    """Return all runs, or those of the streams that ``experiment=mnist_100,…`` names.

    Raises
    ------
    ConfigError
        If it names something else.
    """
    wanted = [name for word in overrides if _key(word) == "experiment" for name in _names(word)]
    own = [word for word in overrides if _key(word) != "experiment"]
    streams = {each.experiment: each for each in (*STREAMS, *FURTHER)}
    if unknown := [name for name in wanted if name not in (*streams, LABELS)]:
        raise ConfigError(
            f"compressed_streams has no '{unknown[0]}': experiment must be of "
            f"{', '.join((*streams, LABELS))}"
        )
    names = wanted or [*(each.experiment for each in STREAMS), LABELS]
    cells: list[Cell] = []
    for name in names:
        cells += _label_cells(own) if name == LABELS else _stream_cells(streams[name], own)
    return cells


def _key(word: str) -> str:
    return word.partition("=")[0]


def _rounds(overrides: Sequence[str]) -> int | None:
    """Return how many rounds a stream is to have, if that is said."""
    said = [word.partition("=")[2] for word in overrides if _key(word) == "rounds"]
    if said and not said[-1].isdecimal():
        raise ConfigError(f"rounds must be a whole number of at least 1, got {said[-1]!r}")
    return int(said[-1]) if said else None


def _names(word: str) -> list[str]:
    return word.partition("=")[2].split(",")


def _stream_cells(stream: Stream, overrides: Sequence[str]) -> list[Cell]:
    words = [f"experiment={stream.experiment}", *stream.more]
    rounds = _rounds(overrides)
    if rounds and "drift" in stream.experiment:
        # However short: with one drift, so that something is seen.
        words.append(f"stream.drift.rounds=[{rounds // 2 + 1}]")
    generated = stream.experiment in _GENERATED
    words += [word for word in overrides if not (generated and _key(word) == "dataset")]
    cells = [
        Cell(
            stream.title,
            named(protocol, form),
            (*options, f"strategy.compress={form}", *words),
            (*READS, FINAL_LOSS, UP, QUIET, ACCURACY),
            group=f"{stream.title} {protocol} {form}",
        )
        for protocol, options in stream.protocols()
        for form in FORMS
    ]
    nosync, _ = alone(stream.title, *words)
    return [*cells, replace(nosync, reads=cells[0].reads, timeline=False)]


def _label_cells(overrides: Sequence[str]) -> list[Cell]:
    rounds = _rounds(overrides)
    words = [word for word in overrides if _key(word) not in ("rounds", "evaluate_every")]
    words += [f"rounds={max(_FEWEST, rounds // _BATCHES_OF_A_ROUND)}"] if rounds else []
    return [
        Cell(
            "FedAvg by label",
            named(model, form),
            (f"experiment={LABELS}", f"model={model}", f"strategy.compress={form}", *words),
            (TEST_LOSS, BYTES, UP, ACCURACY),
            group=f"{model} {form}",
        )
        for model in ("logistic", "mlp")
        for form in FORMS
    ]
