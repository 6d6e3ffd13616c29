"""A run as flat names and numbers: what every tracker is told, and nothing else.

Names have at most one level that is ours: the server's own metrics keep their names (``accuracy``,
``accuracy/task-1``), those of the nodes are below ``evaluate/`` and ``train/``, what a round cost
is below ``round/``, and sums over all rounds so far are below ``total/``.

A tracker may be a cloud service, and a federation may not want its members in one. So by default
there are totals and counts alone: no node's name, no text that a node wrote, no list with one entry
for each node. With `nodes` there is one series for each of them below ``node/``.

Names of metrics come from nodes, too, and trackers refuse what they do not like in one, with all
that came with it. So names are made of letters, digits and ``_ - . /`` here, and are not long.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gems_flwr.runtime.metered_grid import Traffic
from gems_flwr.server.state import RoundRecord, RunResult
from gems_flwr.typing import Metrics

Plain = str | int | float | bool
# MLflow takes 250 characters, and its files may have endings of their own.
_MOST_CHARACTERS = 200
# Of each kind; a node cannot fill a tracker with names.
_MOST_METRICS = 200
# Texts among a strategy's details that say something of the whole run, and of no node.
_TEXTS = ("status", "space", "method", "head", "sampling")
# Settings that are about this process, not about the run.
_NOT_OF_THE_RUN = ("checkpoint_dir", "resume", "keep_replies", "callbacks", "stop_rules")


@dataclass(frozen=True)
class Totals:
    """Sums over the rounds so far."""

    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    seconds: float = 0.0
    failures: int = 0

    def after(self, record: RoundRecord) -> Totals:
        """Return the sums with one more round."""
        return Totals(
            self.traffic + record.traffic,
            self.seconds + record.seconds,
            self.failures + len(record.failures),
        )

    def numbers(self) -> dict[str, float]:
        """Return them by name."""
        traffic = self.traffic
        return {
            "total/bytes_up": traffic.bytes_up,
            "total/bytes_down": traffic.bytes_down,
            "total/bytes": traffic.bytes_up + traffic.bytes_down,
            "total/messages": traffic.messages_up + traffic.messages_down,
            "total/seconds": self.seconds,
            "total/failures": self.failures,
        }


def totals_of(history: Sequence[RoundRecord]) -> Totals:
    """Return the sums over some rounds."""
    totals = Totals()
    for record in history:
        totals = totals.after(record)
    return totals


def round_numbers(record: RoundRecord, totals: Totals, *, nodes: bool = False) -> dict[str, float]:
    """Return all that a tracker is told of a round.

    Parameters
    ----------
    record : RoundRecord
        The round.
    totals : Totals
        The sums up to this round, itself included.
    nodes : bool, default False
        Whether single nodes are told of: 1 for one that was asked and whose reply was used, else 0.
    """
    numbers: dict[str, float] = {}
    if record.round:
        numbers |= {
            "round/seconds": record.seconds,
            "round/nodes_asked": len(record.nodes_asked),
            "round/nodes_answered": len(record.nodes_answered),
            "round/failures": len(record.failures),
            "round/bytes_up": record.traffic.bytes_up,
            "round/bytes_down": record.traffic.bytes_down,
        }
        numbers |= totals.numbers()
        if nodes:
            failed = {failure.node for failure in record.failures}
            used = {*record.nodes_answered} - failed
            for node in dict.fromkeys((*record.nodes_asked, *record.nodes_answered)):
                numbers[tidy_name(f"node/{node}/used")] = float(node in used)
    metrics = {
        **_named(record.server_metrics, "server"),
        **_named(record.evaluate_metrics, "evaluate", always=True),
        **_named(record.train_metrics, "train", always=True),
    }
    return {**metrics, **numbers}


def result_values(result: RunResult, *, nodes: bool = False) -> dict[str, Plain]:
    """Return what is said of a whole run when it has ended.

    Parameters
    ----------
    result : RunResult
        What came of it.
    nodes : bool, default False
        Whether single nodes are told of: scores, and who was left out.
    """
    totals = totals_of(result.history).numbers()
    values: dict[str, Plain] = {
        "stopped_because": result.stopped_because,
        "rounds": result.history[-1].round if result.history else 0,
        "nodes_failed": len({failure.node for _, failure in result.failures}),
        **{name.removeprefix("total/"): value for name, value in totals.items()},
    }
    for name, value in result.details.items():
        is_text = isinstance(value, str)
        if isinstance(value, bool | int | float) or (is_text and name in _TEXTS):
            values.setdefault(tidy_name(name), value)
        elif isinstance(value, Mapping) and (single := _numbers(value)):
            if name == "node_scores":
                values |= {
                    "node_scores/mean": sum(single.values()) / len(single),
                    "node_scores/lowest": min(single.values()),
                    "node_scores/highest": max(single.values()),
                    "node_scores/nodes": len(single),
                }
            if nodes:
                values |= {tidy_name(f"node/{node}/{name}"): v for node, v in single.items()}
    if nodes:
        for node in sorted({failure.node for _, failure in result.failures}):
            times = sum(failure.node == node for _, failure in result.failures)
            values[tidy_name(f"node/{node}/failures")] = times
    return values


def setting_values(settings: Mapping[str, object]) -> dict[str, Plain]:
    """Return a strategy's options that are a number, a word or a group of such.

    Lists and mappings are left out: where a strategy takes one, its entries are nodes or data.

    Parameters
    ----------
    settings : mapping from str to object
        As `Callback.on_setup` has them.
    """
    values: dict[str, Plain] = {}
    for name, value in settings.items():
        if name in _NOT_OF_THE_RUN or name.startswith("_"):
            continue
        if isinstance(value, str | bool | int | float):
            values[tidy_name(name)] = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            options = {
                field.name: getattr(value, field.name) for field in dataclasses.fields(value)
            }
            inner = {"": type(value).__name__, **setting_values(options)}
            values |= {tidy_name(f"{name}.{k}" if k else name): v for k, v in inner.items()}
    return values


def flat_values(config: Mapping[str, object], prefix: str = "") -> dict[str, Plain]:
    """Return nested options as one level with dotted names; lists become text, null is left out.

    Parameters
    ----------
    config : mapping from str to object
        Such as a run config.
    prefix : str
        What stands before every name.
    """
    values: dict[str, Plain] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            values |= flat_values(value, f"{name}.")
        elif value is not None:
            values[tidy_name(name)] = (
                value if isinstance(value, str | bool | int | float) else str(value)
            )
    return values


def tidy_name(name: str) -> str:
    """Return a name that every tracker takes: letters, digits, ``_ - . /``, and not too many."""
    plain = re.sub(r"[^A-Za-z0-9_\-./]", "_", name)
    parts = [part for part in plain.split("/") if part.strip(".")]
    return "/".join(parts)[:_MOST_CHARACTERS].rstrip("/") or "_"


def _named(metrics: Metrics, group: str, *, always: bool = False) -> dict[str, float]:
    """Return single numbers by tidy names; below the group, or where a name is one of ours."""
    named = {}
    for name, value in sorted(_numbers(metrics).items())[:_MOST_METRICS]:
        tidy = tidy_name(name)
        ours = tidy.split("/")[0] in ("round", "total", "node", "evaluate", "train")
        named[tidy_name(f"{group}/{tidy}") if always or ours else tidy] = value
    return named


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
