"""Reading: from run directories to values.

A run directory is recognised by its files. With ``result.json`` it is a finished run; with another
file that a run writes, but no ``result.json``, it is an unfinished one, which is named and never
part of a mean. A damaged file is named in a warning and skipped; the report goes on without it.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gems_flwr.errors import GemsError

# Files that tell a run which has begun from an ordinary folder.
_TRACES_OF_A_RUN = {"rounds.jsonl", "partition.json", "config.yaml"}


class NoRunsError(GemsError, ValueError):
    """No finished, readable run where the caller pointed."""


@dataclass(frozen=True)
class Round:
    """What the report needs of one line of ``rounds.jsonl``; bytes are of this round alone."""

    number: int
    bytes_up: int
    bytes_down: int
    accuracy: float | None
    # Nodes that failed, with the reasons.
    failures: tuple[tuple[str, str], ...]
    rmse: float | None = None


@dataclass(frozen=True)
class Partition:
    """How the training data are divided: ``train[node][class]`` is a count of examples.

    Where labels are numbers, what is counted is how many are between two neighbours of `edges`.
    """

    names: tuple[str, ...]
    train: tuple[tuple[int, ...], ...]
    edges: tuple[float, ...] = ()


@dataclass(frozen=True, order=True)
class Setting:
    """What runs must share to be compared in one table."""

    dataset: str
    partition: str
    nodes: int
    model: str

    @property
    def title(self) -> str:
        """A heading, such as ``digits · labels · 5 nodes · logistic``."""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.dataset} · {self.partition} · {nodes} · {self.model}"


@dataclass(frozen=True)
class Run:
    """One finished run."""

    name: str
    setting: Setting
    strategy: str
    label: str | None
    seed: int
    rounds: int
    accuracy: float | None
    loss: float | None
    bytes_up: int
    bytes_down: int
    messages: int | None
    seconds: float | None
    nodes_failed: int
    stopped_because: str | None
    history: tuple[Round, ...] = ()
    division: Partition | None = None
    # Of runs on streams only; not a number for others.
    cumulative_loss: float = math.nan
    # Of several models: how pairs were drawn, accuracy by model, the server's memory.
    sampling: str | None = None
    accuracies: Mapping[str, float] = field(default_factory=dict)
    server_memory_bytes: float | None = None
    # What the run is judged by, accuracy or rmse, and its value if it is the latter.
    metric: str = "accuracy"
    rmse: float | None = None

    @property
    def score(self) -> float | None:
        """The final value of what the run is judged by."""
        return self.rmse if self.metric == "rmse" else self.accuracy

    @property
    def method(self) -> str:
        """The name of the table row that this run belongs to."""
        return self.label or self.strategy


@dataclass(frozen=True)
class Collection:
    """Everything below some folders; of an unfinished run its name and how far it came."""

    runs: tuple[Run, ...]
    unfinished: tuple[str, ...]
    warnings: tuple[str, ...]


def read_runs(paths: Sequence[Path]) -> Collection:
    """Read every run below some folders; one that is reachable twice counts once."""
    runs: list[Run] = []
    unfinished: list[str] = []
    warnings: list[str] = []
    seen: set[Path] = set()
    for path in paths:
        if not path.is_dir():
            warnings.append(f"{path}: no such folder")
        for folder, name, is_finished in _find_run_folders(path):
            if folder in seen:
                continue
            seen.add(folder)
            rounds = _read_rounds(folder, name, warnings)
            if not is_finished:
                done = sum(entry.number > 0 for entry in rounds)
                unfinished.append(f"{name} ({done} round{'' if done == 1 else 's'} done)")
                continue
            try:
                result = _parsed((folder / "result.json").read_bytes())
                runs.append(_run(name, result, rounds, _read_partition(folder, name, warnings)))
            except _DAMAGED as error:
                warnings.append(f"{name}/result.json: {error}; run left out")
    return Collection(tuple(runs), tuple(unfinished), tuple(warnings))


def _find_run_folders(path: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield folder, short name and "is finished" of each run at or below a path, in order."""
    root = path.resolve()
    run_folders: set[Path] = set()
    for current, children, files in os.walk(root):
        # Hidden folders hold tools' own files (Hydra keeps a config.yaml in one), never runs.
        children[:] = sorted(child for child in children if not child.startswith("."))
        folder = Path(current)
        # A run's own subfolders (checkpoints, say) are parts of it, not unfinished runs.
        is_inside = any(parent in run_folders for parent in folder.parents)
        if "result.json" in files or (not is_inside and _TRACES_OF_A_RUN & {*files}):
            run_folders.add(folder)
            # Reports travel: names start at the folder that was given, not at the machine's root.
            name = (root.name / folder.relative_to(root)).as_posix()
            yield folder, name, "result.json" in files


def _run(
    name: str, result: dict[str, Any], rounds: tuple[Round, ...], division: Partition | None
) -> Run:
    details = _field(result, "details", dict, {})
    loss = _number(details, "cumulative_loss")
    words = {key: _field(result, key, str) for key in ("dataset", "partition", "model", "strategy")}
    counts = ("nodes", "seed", "rounds", "bytes_up", "bytes_down")
    numbers = {key: _field(result, key, int) for key in counts}
    accuracies = _field(details, "accuracies", dict, {})
    return Run(
        name=name,
        setting=Setting(
            words.pop("dataset"), words.pop("partition"), numbers.pop("nodes"), words.pop("model")
        ),
        **words,
        **numbers,
        label=_field(details, "label", str, None),
        accuracy=_number(result, "accuracy"),
        loss=_number(result, "loss"),
        messages=_field(result, "messages", int, None),
        seconds=_number(result, "seconds"),
        nodes_failed=_field(result, "nodes_failed", int, 0),
        stopped_because=_field(details, "stopped_because", str, None),
        history=rounds,
        division=division,
        cumulative_loss=math.nan if loss is None else loss,
        sampling=_field(details, "sampling", str, None),
        accuracies={k: v for k in accuracies if (v := _number(accuracies, k)) is not None},
        server_memory_bytes=_number(details, "server_memory_bytes"),
        metric="rmse" if "rmse" in result else "accuracy",
        rmse=_number(result, "rmse"),
    )


def _read_rounds(folder: Path, name: str, warnings: list[str]) -> tuple[Round, ...]:
    """Read ``rounds.jsonl``, in order of rounds; a damaged line costs only itself."""
    path, rounds = folder / "rounds.jsonl", dict[int, Round]()
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for position, line in enumerate(lines, start=1):
        try:
            # A run killed between a round and its checkpoint repeats that round when it is resumed;
            # the later line is the one that the rest of the run was built on.
            entry = _round(_parsed(line))
            rounds[entry.number] = entry
        except _DAMAGED as error:
            warnings.append(f"{name}/rounds.jsonl: line {position}: {error}; line skipped")
    return tuple(rounds[number] for number in sorted(rounds))


def _round(entry: dict[str, Any]) -> Round:
    # Only the server's own evaluation: nodes measure on other data, so mixing the two would
    # put numbers that cannot be compared on one axis.
    server = _field(entry, "server_metrics", dict, {})
    failures = _field(entry, "failures", list, [])
    return Round(
        number=_field(entry, "round", int),
        bytes_up=_field(entry, "bytes_up", int),
        bytes_down=_field(entry, "bytes_down", int),
        accuracy=_number(server, "accuracy"),
        failures=tuple((str(each["node"]), str(each["reason"])) for each in failures),
        rmse=_number(server, "rmse"),
    )


def _read_partition(folder: Path, name: str, warnings: list[str]) -> Partition | None:
    path = folder / "partition.json"
    try:
        content = _parsed(path.read_bytes()) if path.is_file() else None
        if content is None:
            return None
        nodes = _field(content, "nodes", list)
        counts = np.array([node["train"] for node in nodes], dtype=int)
        if counts.shape != (len(nodes), content["classes"]) or not counts.size:
            raise ValueError(f"'nodes' should be a list of nodes with {content['classes']} counts")
        names = tuple(str(node.get("name", index)) for index, node in enumerate(nodes))
        edges = tuple(map(float, content.get("edges") or ()))
        if len(edges) not in (0, content["classes"] + 1):
            raise ValueError(f"'edges' should be a list of {content['classes'] + 1} numbers")
        return Partition(names, tuple(map(tuple, counts.tolist())), edges)
    except _DAMAGED as error:
        warnings.append(f"{name}/partition.json: {error}; file skipped")
        return None


# What reading a file that does not hold what it should ends in.
_DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError)
_NEEDED: Any = object()


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a thousand brackets
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError("should be a JSON object")
    return content


def _field(record: dict[str, Any], key: str, kind: Any, default: Any = _NEEDED) -> Any:
    """Return a field of a kind; null is as good as absent."""
    value: Any = record.get(key)
    if value is None and default is not _NEEDED:
        return default
    # Not isinstance: `true` is no count of bytes.
    if type(value) is not kind or (kind is int and value < 0):
        what = "missing" if value is None else f"{json.dumps(value):.40}"
        raise ValueError(f"'{key}' should be {kind.__name__}, is {what}")
    # JSON can hold halves of characters, which no file takes.
    return value.encode(errors="replace").decode() if kind is str else value


def _number(record: dict[str, Any], key: str) -> float | None:
    """Return a finite number, or None for null; a diverged run's NaN is no number either."""
    value = record.get(key)
    return None if value is None or not math.isfinite(value) else float(value)
