"""What the runs of a study gave, what the paper has, and the files that findings are kept in.

Findings of full runs are kept with the code as ``measured/NAME.json.gz``: what a table or a picture
needs, compressed so that the same findings give the same bytes.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

PUBLISHED = Path(__file__).with_name("published.yaml")
MEASURED = Path(__file__).with_name("measured")


@dataclass(frozen=True)
class Published:
    """A number of a paper, its standard deviation if it has one, and what its last digit is."""

    mean: float
    sd: float | None = None
    digit: float = 0.001


@dataclass
class Finding:
    """One quantity of one method in one setting, over seeds; see `study.Cell`.

    `by_seed` has None for a target that was not reached or a run that failed; `kilobytes` is what a
    node sent, one number per run that did not fail.
    """

    setting: str
    method: str
    quantity: str
    by_seed: list[float | None] = field(default_factory=list)
    kilobytes: list[float] = field(default_factory=list)
    x: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Setting, method and quantity."""
        return self.setting, self.method, self.quantity

    @property
    def values(self) -> list[float]:
        """Those that there are."""
        return [value for value in self.by_seed if value is not None]

    @property
    def missing(self) -> int:
        """How many there are not."""
        return len(self.by_seed) - len(self.values)

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds, if there are several."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def pairs(self, other: Finding) -> list[tuple[float, float] | None]:
        """Return values beside another's, seed by seed; None where either has none."""
        both = zip(self.by_seed, other.by_seed, strict=False)
        return [None if a is None or b is None else (a, b) for a, b in both]


@dataclass
class Findings:
    """All findings of one study, and how they came about."""

    name: str
    quick: bool
    stand_in: bool
    seeds: list[int]
    findings: list[Finding]
    made: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def of(self, quantity: str) -> list[Finding]:
        """Return the findings of one quantity."""
        return [each for each in self.findings if each.quantity == quantity]

    def get(self, setting: str, method: str, quantity: str) -> Finding | None:
        """Return one finding, if there is a value."""
        key = (setting, method, quantity)
        return next((each for each in self.findings if each.key == key and each.values), None)

    def settings(self) -> list[str]:
        """Return the settings in the order of the experiment."""
        return list(dict.fromkeys(each.setting for each in self.findings))

    def ratio(
        self, new: tuple[str, str, str], above: Finding | None, below: Finding | None
    ) -> None:
        """Add a finding that divides one by another, seed by seed, if both are there."""
        if above is not None and below is not None:
            pairs = above.pairs(below)
            self.findings.append(
                Finding(*new, [None if p is None or not p[1] else p[0] / p[1] for p in pairs])
            )

    def to_bytes(self) -> bytes:
        """Return the findings as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Findings:
        """Return what `to_bytes` wrote."""
        content = json.loads(data)
        content["findings"] = [Finding(**each) for each in content["findings"]]
        return cls(**content)


def keep(found: Findings, only_kept: Sequence[str] = ()) -> Path:
    """Keep the findings of a full run with the code; return the file.

    Those of the methods in `only_kept` that were there before stay.
    """
    path = MEASURED / f"{found.name}.json.gz"
    before = kept(found.name)
    if before is not None:
        found.findings += [each for each in before.findings if each.method in only_kept]
    path.write_bytes(gzip.compress(found.to_bytes(), mtime=0))
    return path


def kept(name: str) -> Findings | None:
    """Return what is kept of a study; None if nothing is."""
    path = MEASURED / f"{name}.json.gz"
    return Findings.from_bytes(gzip.decompress(path.read_bytes())) if path.exists() else None


def merge(parts: Iterable[Finding]) -> list[Finding]:
    """Join the seeds of equal findings, in the order of their first appearance."""
    joined: dict[tuple[str, str, str], Finding] = {}
    for part in parts:
        whole = joined.setdefault(part.key, Finding(*part.key, x=part.x))
        whole.by_seed += part.by_seed
        whole.kilobytes += part.kilobytes
    return list(joined.values())


def published(name: str) -> dict[tuple[str, str, str], Published]:
    """Return a study's published numbers by setting, method and quantity."""
    found: dict[tuple[str, str, str], Published] = {}
    for table in _tables().get(name, ()):
        quantity = table.get("quantity", "accuracy")
        for setting, row in table["rows"].items():
            for method, value in zip(table["methods"], row, strict=True):
                if value is not None:
                    found[setting, method, quantity] = _published(str(value))
    return found


def sources(name: str) -> list[str]:
    """Return where a study's published numbers stand."""
    return [table["source"] for table in _tables().get(name, ())]


@cache
def _tables() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    content: Any = OmegaConf.to_container(OmegaConf.load(PUBLISHED))
    return content  # type: ignore[no-any-return]


def _published(text: str) -> Published:
    """Read ``0.926 (0.001)``, or a bare number; as text, because digits count."""
    mean, _, rest = text.partition("(")
    decimals = len(mean.strip().partition(".")[2])
    sd = float(rest.rstrip(") ")) if rest else None
    return Published(float(mean), sd, 10.0**-decimals)
