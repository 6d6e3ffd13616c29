"""What the runs of a reproduction gave, beside what the paper says."""

from __future__ import annotations

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
# Beyond this many joint standard deviations a difference wants an explanation.
_NOTABLE = 2.0
# Papers print three digits, or two: what rounding alone can make of a difference.
_ROUNDING = 0.5


@dataclass(frozen=True)
class Published:
    """A number of a paper, with its standard deviation if it gives one."""

    mean: float
    sd: float | None = None
    # What the paper's last digit is worth.
    digit: float = 0.001


@dataclass
class Finding:
    """One quantity of one method in one setting, over seeds.

    Parameters
    ----------
    setting, method, quantity : str
        What was measured; see `simulations.reproduce.papers.spec.Cell`.
    by_seed : list of float or None
        One per seed; None for a target that was not reached, or a run that failed.
    kilobytes : list of float
        What a node sent, one per run that did not fail.
    x : float, optional
        Where it stands on a figure's axis.
    """

    setting: str
    method: str
    quantity: str
    by_seed: list[float | None] = field(default_factory=list)
    kilobytes: list[float] = field(default_factory=list)
    x: float | None = None

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


@dataclass
class Timeline:
    """What happened in a run, round by round, thinned out; loss and MB are sums so far."""

    setting: str
    method: str
    rounds: list[int]
    loss: list[float]
    megabytes: list[float]
    drifts: list[int] = field(default_factory=list)


@dataclass
class Findings:
    """All findings of one reproduction, and how they came about."""

    name: str
    quick: bool
    stand_in: bool
    seeds: list[int]
    findings: list[Finding]
    timelines: list[Timeline] = field(default_factory=list)
    made: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, new: Finding) -> None:
        """Add a finding."""
        self.findings.append(new)

    def of(self, quantity: str) -> list[Finding]:
        """Return the findings of one quantity."""
        return [each for each in self.findings if each.quantity == quantity]

    def get(self, setting: str, method: str, quantity: str) -> Finding | None:
        """Return one finding, if there is a value."""
        for each in self.findings:
            if (each.setting, each.method, each.quantity) == (setting, method, quantity):
                return each if each.values else None
        return None

    def settings(self) -> list[str]:
        """Return the settings in the order of the experiment."""
        return list(dict.fromkeys(each.setting for each in self.findings))

    def methods(self) -> list[str]:
        """Return the methods in the order of the experiment."""
        return list(dict.fromkeys(each.method for each in self.findings))

    def to_json(self) -> str:
        """Return the findings as text."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Findings:
        """Return what `to_json` wrote."""
        content = json.loads(text)
        content["findings"] = [Finding(**each) for each in content["findings"]]
        content["timelines"] = [Timeline(**each) for each in content["timelines"]]
        return cls(**content)


@dataclass(frozen=True)
class Line:
    """A finding beside the published number."""

    finding: Finding
    published: Published | None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        if self.published is None or not self.finding.values:
            return None
        return self.finding.mean - self.published.mean

    @property
    def notable(self) -> bool:
        """Whether the difference is more than twice the joint spread."""
        if self.difference is None or self.published is None:
            return False
        spread = math.hypot(self.finding.sd or 0.0, self.published.sd or 0.0)
        allowed = max(_NOTABLE * spread, _ROUNDING * self.published.digit)
        return abs(self.difference) > allowed


def compare(findings: Findings) -> list[Line]:
    """Set every finding beside the published number, if there is one."""
    known = published(findings.name)
    return [
        Line(each, known.get((each.setting, each.method, each.quantity)))
        for each in findings.findings
    ]


def published(name: str) -> dict[tuple[str, str, str], Published]:
    """Return a reproduction's published numbers by setting, method and quantity."""
    found: dict[tuple[str, str, str], Published] = {}
    for table in _tables().get(name, ()):
        quantity = table.get("quantity", "accuracy")
        for setting, row in table["rows"].items():
            for method, value in zip(table["methods"], row, strict=True):
                if value is not None:
                    found[setting, method, quantity] = _published(value)
    return found


def sources(name: str) -> list[str]:
    """Return where a reproduction's published numbers stand."""
    return [table["source"] for table in _tables().get(name, ())]


@cache
def _tables() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    content: Any = OmegaConf.to_container(OmegaConf.load(PUBLISHED))
    return content  # type: ignore[no-any-return]


def _published(value: Any) -> Published:
    """Read ``0.926 (0.001)``, or a bare number; as text, because digits count."""
    text = str(value)
    mean, _, rest = text.partition("(")
    decimals = len(mean.strip().partition(".")[2])
    sd = float(rest.rstrip(") ")) if rest else None
    return Published(float(mean), sd, 10.0**-decimals)


def merge(parts: Iterable[Finding]) -> list[Finding]:
    """Join the seeds of equal findings, in the order of their first appearance."""
    joined: dict[tuple[str, str, str], Finding] = {}
    for part in parts:
        key = (part.setting, part.method, part.quantity)
        whole = joined.setdefault(key, Finding(*key, x=part.x))
        whole.by_seed += part.by_seed
        whole.kilobytes += part.kilobytes
    return list(joined.values())
