"""Reading: from run directories to values.

A run directory is recognised by its files. With ``result.json`` it is a finished run; with any
other file that a run writes, but no ``result.json``, it is an unfinished one, which is counted and
named but never part of a mean. A damaged file is named in a warning and skipped; the report goes
on without it.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gems_flwr.errors import GemsError

# Files that tell a run which has begun from an ordinary folder.
_TRACES_OF_A_RUN = ("rounds.jsonl", "partition.json", "config.yaml")


class NoRunsError(GemsError, ValueError):
    """No finished, readable run where the caller pointed."""

    @classmethod
    def explain(cls, paths: Sequence[Path], collection: "Collection") -> "NoRunsError":
        """Say in one sentence where was looked and what was there instead.

        Parameters
        ----------
        paths : Sequence[Path]
            Where was looked.
        collection : Collection
            What `read_runs` found there.

        Returns
        -------
        NoRunsError
            The error to raise.
        """
        places = ", ".join(str(path) for path in paths) or "an empty list of folders"
        found = [f"{len(collection.unfinished)} unfinished"] if collection.unfinished else []
        found += collection.warnings
        extra = f" (found: {'; '.join(found)})" if found else ""
        return cls(f"No finished run (a folder with a readable result.json) in {places}{extra}.")


@dataclass(frozen=True)
class Failure:
    """A node that failed in a round, and why."""

    node: str
    reason: str


@dataclass(frozen=True)
class Round:
    """What the report needs of one line of ``rounds.jsonl``; bytes are of this round alone."""

    number: int
    bytes_up: int
    bytes_down: int
    accuracy: float | None
    failures: tuple[Failure, ...]
    cumulative_loss: float | None = None
    rmse: float | None = None
    # Of runs with several models, by model.
    step_sizes: Mapping[str, float] = field(default_factory=dict)
    variances: Mapping[str, float] = field(default_factory=dict)


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
    full_synchronisations: tuple[int, ...] = ()
    drifts: tuple[int, ...] = ()
    # Of runs with several models only: how pairs were drawn; accuracy by model; rounds in which a
    # pair was drawn and its training examples, by node and model; bytes of the server's memory.
    sampling: str | None = None
    accuracies: Mapping[str, float] = field(default_factory=dict)
    sampled: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    examples: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
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
class UnfinishedRun:
    """A run directory without ``result.json``."""

    name: str
    rounds_done: int

    def describe(self) -> str:
        """Name the run and say how far it came."""
        rounds = "1 round" if self.rounds_done == 1 else f"{self.rounds_done} rounds"
        return f"{self.name} ({rounds} done)"


@dataclass(frozen=True)
class Collection:
    """Everything that was found below some folders."""

    runs: tuple[Run, ...]
    unfinished: tuple[UnfinishedRun, ...]
    warnings: tuple[str, ...]


class _DamagedError(GemsError, ValueError):
    """A file does not hold what it should; the message says what is wrong."""


def read_runs(paths: Sequence[Path]) -> Collection:
    """Read every run below some folders.

    Parameters
    ----------
    paths : Sequence[Path]
        Run directories or folders of run directories. A run that is reachable twice counts once.

    Returns
    -------
    Collection
        Finished runs, unfinished runs, and one warning per thing that could not be read.
    """
    runs: list[Run] = []
    unfinished: list[UnfinishedRun] = []
    warnings: list[str] = []
    seen: set[Path] = set()
    for path in paths:
        if not path.is_dir():
            warnings.append(f"{path}: no such folder")
            continue
        for folder, name, finished in _find_run_folders(path):
            if folder in seen:
                continue
            seen.add(folder)
            if not finished:
                rounds_done = len([r for r in _read_rounds(folder, name, warnings) if r.number])
                unfinished.append(UnfinishedRun(name, rounds_done))
                continue
            try:
                runs.append(_read_run(folder, name, warnings))
            except (OSError, _DamagedError) as error:
                warnings.append(f"{name}/result.json: {error}; run left out")
    return Collection(tuple(runs), tuple(unfinished), tuple(warnings))


def _find_run_folders(path: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield folder, short name and "is finished" of each run at or below a path, in order."""
    root = path.resolve()
    # Reports travel: their names start at the folder that was given, not at the machine's root.
    run_folders: set[Path] = set()
    for current, children, files in os.walk(root):
        # Hidden folders hold tools' own files (Hydra keeps a config.yaml in one), never runs.
        children[:] = sorted(child for child in children if not child.startswith("."))
        folder = Path(current)
        name = (root.name / folder.relative_to(root)).as_posix()
        inside_a_run = any(parent in run_folders for parent in folder.parents)
        if "result.json" in files:
            run_folders.add(folder)
            yield folder, name, True
        elif not inside_a_run and any(trace in files for trace in _TRACES_OF_A_RUN):
            # A run's own subfolders (checkpoints, say) are parts of it, not unfinished runs.
            run_folders.add(folder)
            yield folder, name, False


def _read_run(folder: Path, name: str, warnings: list[str]) -> Run:
    result = _parse_object((folder / "result.json").read_bytes())
    details = result.get("details") or {}
    if not isinstance(details, dict):
        raise _DamagedError(f"'details' should be an object, is {_kind(details)}")
    cumulative_loss = _optional_number(details, "cumulative_loss")
    return Run(
        name=name,
        setting=Setting(
            dataset=_text(result, "dataset"),
            partition=_text(result, "partition"),
            nodes=_count(result, "nodes"),
            model=_text(result, "model"),
        ),
        strategy=_text(result, "strategy"),
        label=_optional_text(details, "label"),
        seed=_count(result, "seed"),
        rounds=_count(result, "rounds"),
        accuracy=_optional_number(result, "accuracy"),
        loss=_optional_number(result, "loss"),
        bytes_up=_count(result, "bytes_up"),
        bytes_down=_count(result, "bytes_down"),
        messages=_count(result, "messages") if result.get("messages") is not None else None,
        seconds=_optional_number(result, "seconds"),
        nodes_failed=_count(result, "nodes_failed") if result.get("nodes_failed") else 0,
        stopped_because=_optional_text(details, "stopped_because"),
        history=_read_rounds(folder, name, warnings),
        division=_read_partition(folder, name, warnings),
        cumulative_loss=math.nan if cumulative_loss is None else cumulative_loss,
        full_synchronisations=_counts(details, "full_synchronisations"),
        drifts=_counts(details, "drifts"),
        sampling=_optional_text(details, "sampling"),
        accuracies=_numbers(details, "accuracies"),
        sampled=_tables(details, "sampled"),
        examples=_tables(details, "examples"),
        server_memory_bytes=_optional_number(details, "server_memory_bytes"),
        metric="rmse" if "rmse" in result else "accuracy",
        rmse=_optional_number(result, "rmse"),
    )


def _read_rounds(folder: Path, name: str, warnings: list[str]) -> tuple[Round, ...]:
    """Read ``rounds.jsonl``, in order of rounds; a damaged line costs only itself."""
    path = folder / "rounds.jsonl"
    if not path.is_file():
        return ()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        warnings.append(f"{name}/rounds.jsonl: {error}; file skipped")
        return ()
    rounds: dict[int, Round] = {}
    for position, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = _parse_round(_parse_object(line))
        except _DamagedError as error:
            warnings.append(f"{name}/rounds.jsonl: line {position}: {error}; line skipped")
            continue
        # A run killed between a round and its checkpoint repeats that round when it is resumed;
        # the later line is the one that the rest of the run was built on.
        rounds[entry.number] = entry
    return tuple(rounds[number] for number in sorted(rounds))


def _parse_round(entry: Mapping[str, Any]) -> Round:
    server_metrics = entry.get("server_metrics") or {}
    train_metrics = entry.get("train_metrics") or {}
    failures = entry.get("failures") or []
    if not isinstance(server_metrics, dict):
        raise _DamagedError(f"'server_metrics' should be an object, is {_kind(server_metrics)}")
    if not isinstance(train_metrics, dict):
        raise _DamagedError(f"'train_metrics' should be an object, is {_kind(train_metrics)}")
    if not isinstance(failures, list) or not all(isinstance(item, dict) for item in failures):
        raise _DamagedError("'failures' should be a list of objects")
    return Round(
        number=_count(entry, "round"),
        bytes_up=_count(entry, "bytes_up"),
        bytes_down=_count(entry, "bytes_down"),
        # Only the server's own evaluation: nodes measure on other data, so mixing the two would
        # put numbers that cannot be compared on one axis.
        accuracy=_optional_number(server_metrics, "accuracy"),
        failures=tuple(
            Failure(str(item.get("node", "?")), str(item.get("reason", "no reason given")))
            for item in failures
        ),
        cumulative_loss=_optional_number(train_metrics, "cumulative_loss"),
        rmse=_optional_number(server_metrics, "rmse"),
        step_sizes=_by_model(train_metrics, "step_size/"),
        variances=_by_model(train_metrics, "variance/"),
    )


def _read_partition(folder: Path, name: str, warnings: list[str]) -> Partition | None:
    path = folder / "partition.json"
    if not path.is_file():
        return None
    try:
        return _parse_partition(_parse_object(path.read_bytes()))
    except (OSError, _DamagedError) as error:
        warnings.append(f"{name}/partition.json: {error}; file skipped")
        return None


def _parse_partition(content: Mapping[str, Any]) -> Partition:
    nodes = content.get("nodes")
    classes = _count(content, "classes")
    if not isinstance(nodes, list) or not nodes:
        raise _DamagedError("'nodes' should be a list of at least one node")
    names: list[str] = []
    counts: list[tuple[int, ...]] = []
    for index, node in enumerate(nodes):
        train = node.get("train") if isinstance(node, dict) else None
        if not isinstance(train, list) or len(train) != classes:
            raise _DamagedError(f"'train' of node {index} should be a list of {classes} counts")
        if not all(_is_count(count) for count in train):
            raise _DamagedError(f"'train' of node {index} holds something that is no count")
        names.append(str(node.get("name", index)))
        counts.append(tuple(train))
    edges = content.get("edges") or []
    if edges and (not isinstance(edges, list) or len(edges) != classes + 1):
        raise _DamagedError(f"'edges' should be a list of {classes + 1} numbers")
    if not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in edges):
        raise _DamagedError("'edges' holds something that is no number")
    return Partition(tuple(names), tuple(counts), tuple(map(float, edges)))


def _parse_object(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a thousand brackets
        raise _DamagedError(f"not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise _DamagedError(f"should be a JSON object, is {_kind(content)}")
    return content


def _text(content: Mapping[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value:
        raise _DamagedError(f"'{key}' should be a text, is {_kind(value)}")
    return _writable(value)


def _writable(text: str) -> str:
    """Return a text as a file can take it: JSON can hold halves of characters."""
    return text.encode(errors="replace").decode()


def _optional_text(content: Mapping[str, Any], key: str) -> str | None:
    return None if content.get(key) in (None, "") else _writable(str(content[key]))


def _count(content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    if not _is_count(value):
        raise _DamagedError(f"'{key}' should be a whole number ≥ 0, is {_kind(value)}")
    return int(value)  # type: ignore[arg-type]


def _counts(content: Mapping[str, Any], key: str) -> tuple[int, ...]:
    values = content.get(key) or []
    if not isinstance(values, list) or not all(_is_count(value) for value in values):
        raise _DamagedError(f"'{key}' should be a list of whole numbers, is {_kind(values)}")
    return tuple(values)


def _by_model(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the finite numbers whose names begin with a prefix, by what follows it."""
    names = [key for key in metrics if key.startswith(prefix)]
    found = {key.removeprefix(prefix): _optional_number(metrics, key) for key in names}
    return {key: value for key, value in found.items() if value is not None}


def _numbers(content: Mapping[str, Any], key: str) -> dict[str, float]:
    values = content.get(key) or {}
    if not isinstance(values, dict):
        raise _DamagedError(f"'{key}' should be an object, is {_kind(values)}")
    found = {str(name): _optional_number(values, name) for name in values}
    return {name: value for name, value in found.items() if value is not None}


def _tables(content: Mapping[str, Any], key: str) -> dict[str, dict[str, float]]:
    values = content.get(key) or {}
    if not isinstance(values, dict):
        raise _DamagedError(f"'{key}' should be an object, is {_kind(values)}")
    return {str(node): _numbers(values, node) for node in values}


def _is_count(value: object) -> bool:
    # bool is an int to Python, but `true` is no count of bytes.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _optional_number(content: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number, or None for null; a diverged run's NaN is no number either."""
    value = content.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _DamagedError(f"'{key}' should be a number or null, is {_kind(value)}")
    # An integer of 400 digits has no float; no run has such a number.
    return float(value) if abs(value) <= sys.float_info.max else None


def _kind(value: object) -> str:
    """Name a wrong value in an error message, cut short."""
    if value is None:
        return "missing"
    text = _writable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 40 else text[:37] + "..."
