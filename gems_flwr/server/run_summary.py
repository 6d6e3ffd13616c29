"""What a person reads at the beginning and at the end of a run, laid out as Flower does it.

Programs read the ``event=`` lines of `gems_flwr.server.log`, `rounds.jsonl` and the result.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord

from gems_flwr.server.log import short
from gems_flwr.typing import Arrays
from gems_flwr.wire.requests import JsonRequest

if TYPE_CHECKING:
    from gems_flwr.server.state import RunResult, ServerState

# Of what all strategies share these are always worth a line, others where they are set.
_ALWAYS = ("min_nodes", "fraction_train", "fraction_evaluate", "seed")
# Most lines about single nodes; a federation of thousands has rounds.jsonl.
_MOST_NODES = 10


def start_lines(
    strategy: str,
    rounds: int,
    state: ServerState,
    train_config: ConfigRecord | None,
    evaluate_config: ConfigRecord | None,
) -> list[str]:
    """Return what is said when a run begins; the strategy's settings follow.

    Parameters
    ----------
    strategy : str
        Name of the strategy.
    rounds : int
        How many are to be played in all.
    state : ServerState
        What the run begins with, or goes on from.
    train_config, evaluate_config : ConfigRecord, optional
        What is sent along with messages.
    """
    done = f", {state.round} of them done" if state.round else ""
    return [
        f"Starting {strategy} strategy:",
        f"\t├── Number of rounds: {rounds}{done}",
        f"\t├── ArrayRecord ({_megabytes(state.arrays):.2f} MB)",
        f"\t├── ConfigRecord (train): {_config(train_config)}",
        f"\t├── ConfigRecord (evaluate): {_config(evaluate_config)}",
    ]


def settings_lines(settings: Mapping[str, Any], shared: Mapping[str, Any]) -> list[str]:
    """Return a strategy's settings as a tree.

    Parameters
    ----------
    settings : mapping from str to object
        All options by name; those that are not set are not told.
    shared : mapping from str to object
        The defaults of those that every strategy has; of them only what is set otherwise is told,
        and what decides about nodes.
    """
    given = {name: value for name, value in settings.items() if not is_unset(value)}
    own = {name: value for name, value in given.items() if name not in shared}
    common = {
        name: value
        for name, value in given.items()
        if name in shared and (name in _ALWAYS or value != shared[name])
    }
    lines = ["\t├──> Settings:", *_branches(own, "\t│\t")] if own else []
    return [*lines, "\t└──> Rounds and nodes:", *_branches(common, "\t\t")]


def end_lines(result: RunResult, seconds: float) -> list[str]:
    """Return what is said when a run has ended.

    Parameters
    ----------
    result : RunResult
        What came of it.
    seconds : float
        How long it took.
    """
    return [
        "",
        f"Strategy execution finished in {seconds:.2f}s",
        "",
        "Final results:",
        "",
        *(f"\t{line}" for line in str(result).splitlines()),
        "",
    ]


def result_lines(result: RunResult) -> list[str]:
    """Return what a result says beyond Flower's own: cost, who was left out, scores."""
    rounds = [record for record in result.history if record.round]
    exchanges = Counter(what for record in rounds for what in record.exchanges)
    traffic = result.traffic
    lines = [
        f"Rounds: {len(rounds)}, {traffic.bytes_up:,} bytes up, {traffic.bytes_down:,} bytes down, "
        f"ended because {result.stopped_because}",
    ]
    if exchanges:
        each = ", ".join(f"{what}{_times(count)}" for what, count in exchanges.items())
        # A resumed run does not know what those before it were for.
        before = sum(bool(r.traffic.messages_down and not r.exchanges) for r in rounds)
        since = f" after round {before}" if before else ""
        lines.append(f"Exchanges{since}: {exchanges.total()} ({each})")
    lines += _left_out(result)
    if (bound := result.details.get("loss_bound")) is not None:
        loss = result.details["loss"]
        lines.append(f"Loss: {loss:.6g}, at most {bound:.3g} above that of the pooled optimum")
    if scores := result.details.get("node_scores"):
        lines.append(f"Node scores: {_scores(scores)}")
    return lines


def who_was_left_out(result: RunResult) -> dict[str, str]:
    """Return who did not contribute, and to how many rounds; the last reason of each."""
    times = Counter(failure.node for _, failure in result.failures)
    reasons = {failure.node: failure.reason for _, failure in result.failures}
    told = {node: f"{_of_rounds(times[node])}: {reasons[node]}" for node in times}
    if isinstance(by_strategy := result.details.get("left_out"), Mapping):
        told |= {node: str(reason) for node, reason in by_strategy.items() if node not in told}
    return told


def _left_out(result: RunResult) -> list[str]:
    if not (told := who_was_left_out(result)):
        return ["Left out: nobody"]
    lines = [f"\tnode {node}, {short(why)}" for node, why in told.items()][:_MOST_NODES]
    more = len(told) - len(lines)
    return [f"Left out: {len(told)}", *lines, *([f"\tand {more} more"] if more else [])]


def _scores(scores: Mapping[str, float]) -> str:
    if len(scores) <= _MOST_NODES:
        return ", ".join(f"{node}: {score:.4f}" for node, score in scores.items())
    values = list(scores.values())
    lowest = min(scores, key=lambda node: scores[node])
    return (
        f"mean {sum(values) / len(values):.4f} of {len(values)}, lowest {scores[lowest]:.4f} "
        f"(node {lowest}), highest {max(values):.4f}"
    )


def _times(count: int) -> str:
    return f" × {count}" if count > 1 else ""


def _of_rounds(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _branches(values: Mapping[str, Any], indent: str) -> list[str]:
    last = len(values) - 1
    return [
        f"{indent}{'└' if number == last else '├'}── {name}: {shown_option(value)}"
        for number, (name, value) in enumerate(values.items())
    ]


def is_unset(value: Any) -> bool:
    """Return whether an option says nothing."""
    return value is None or (isinstance(value, Sequence | Mapping) and not len(value))


def shown_option(value: Any) -> str:
    """Return an option as a person reads it: arrays and functions by what they are."""
    if isinstance(value, str | int | float | Path | JsonRequest):
        return str(value)
    if isinstance(value, Mapping):
        return reprlib.repr(dict(value))
    if isinstance(value, Sequence):
        return f"[{', '.join(shown_option(each) for each in value[:4])}{', …' * (len(value) > 4)}]"
    if hasattr(value, "shape"):
        return f"array {tuple(value.shape)}"
    return getattr(value, "__name__", type(value).__name__)


def _config(config: ConfigRecord | None) -> str:
    if not config:
        return "(empty!)"
    shown = (f"'{k}': {'<bytes>' if isinstance(v, bytes) else v}" for k, v in config.items())
    return f"{{{', '.join(shown)}}}"


def _megabytes(arrays: Arrays) -> float:
    return sum(array.nbytes for array in arrays.values()) / 1024**2
