"""A threshold of dynamic averaging from a budget of bytes (an open question of Kamp et al. 2018).

The user says what a run may cost, in bytes of all messages up and down; the threshold is found on
the way. Time is counted in checks, money in full synchronisations (all models up, the average down
to all). What is set aside beforehand: the quiet part of all messages to come, averages that are
still to be delivered, and the last synchronisation. The rest is free to be spent.

Decided here:

- The first threshold is the mean of ‖f − r‖² when the free bytes, spread evenly, would have paid
  for a first synchronisation; at the latest after a twentieth of the run, and then as if squared
  distances went on growing as they did.
- From then on a check lowers log Δ, and a synchronisation raises it, in proportion to the share of
  the checks that are left and of the synchronisations that are left: ``log Δ += c·(moved / S −
  1 / R)``, S synchronisations and R checks being left. Where S / R is the rate that comes
  about the threshold is at rest; otherwise the gap closes like the c-th power of the time left.
  So the controller is slow at first, which lets a run spend on a drift what it needs, and
  certain in the end.
- Cost may fall faster than that: a run that is a synchronisation behind an even pace divides the
  threshold by e in the time of one. It is never quick to raise it.
- Once there is a synchronisation for every check that is left, the threshold is as good as zero.
- When a full synchronisation is no longer affordable, as many models are averaged as are.

Together the last two make the spending end within the price of two models (a single one is not
averaged) of the budget, if squared distances are above zero and prices stay what they are.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

# The power of the time left by which a gap closes. More follows bursts less and falling cost more.
_POWER = 4.0
# The most that one full synchronisation may raise log delta.
_LARGEST_GAIN = 1.0
# Synchronisations that a run may be behind before the threshold falls quickly, how many of them
# are remembered, and by how much log delta then falls in the time of one.
_TOO_FAR_BEHIND, _MOST_BEHIND, _QUICK_GAIN = 1.0, 1.5, 1.0
# The share of a run, in checks, after which the first threshold is set at the latest.
_FIRST_SHARE = 0.05
AS_GOOD_AS_ZERO = 1e-30
_LARGEST = 1e30


@dataclass(frozen=True)
class Sent:
    """Some models that went one way.

    Parameters
    ----------
    models : int
        How many.
    size_bytes : int
        Of all of them, without the rest of their messages.
    """

    models: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class ByteLedger:
    """What a run has cost, and what things cost; a value that is saved with the run.

    Parameters
    ----------
    spent_bytes : int
        All messages so far, up and down.
    checks : int
        How often all nodes were asked to train.
    quiet_bytes : int
        What those messages and their answers had besides models.
    up_bytes, down_bytes : float
        Size of a model in the last messages that had some, the initial one aside; 0 before.
    delta : float
        The threshold that is steered; 0 before the first.
    behind : float
        How many full synchronisations more there would have been of late, were they spread evenly.
    """

    spent_bytes: int = 0
    checks: int = 0
    quiet_bytes: int = 0
    up_bytes: float = 0.0
    down_bytes: float = 0.0
    delta: float = 0.0
    behind: float = 0.0

    def plus(self, spent_bytes: int) -> ByteLedger:
        """Return the ledger after messages that are not the protocol's own."""
        return dataclasses.replace(self, spent_bytes=self.spent_bytes + spent_bytes)

    def after(self, spent_bytes: int, up: Sent, down: Sent, *, is_check: bool) -> ByteLedger:
        """Return the ledger after some messages and their answers.

        Parameters
        ----------
        spent_bytes : int
            All of them, as the run counts them.
        up, down : Sent
            The models in them.
        is_check : bool
            Whether they asked all nodes to train, or only for models.
        """
        changes: dict[str, float] = {"spent_bytes": self.spent_bytes + spent_bytes}
        if up.models:
            changes["up_bytes"] = up.size_bytes / up.models
        if down.models and self.checks:
            changes["down_bytes"] = down.size_bytes / down.models
        if is_check:
            changes["checks"] = self.checks + 1
            quiet = spent_bytes - up.size_bytes - down.size_bytes
            changes["quiet_bytes"] = self.quiet_bytes + quiet
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class BytePlan:
    """What a budget still allows.

    Parameters
    ----------
    ledger : ByteLedger
        What has been spent, and prices; of one check at least.
    budget_bytes : float
        For the whole run.
    nodes : int
        How many take part, at least 1.
    checks_left : int
        Checks to come at which models may be averaged.
    rounds_left : int
        Messages to come that ask all nodes to train; some of them may be no such check.
    owed : int
        Averages that are still to be delivered, counted by receiver.
    final_sync : bool
        Whether the run ends in a full synchronisation.
    model_bytes : float
        Size of a model as long as none has been seen.
    """

    ledger: ByteLedger
    budget_bytes: float
    nodes: int
    checks_left: int
    rounds_left: int
    owed: int
    final_sync: bool
    model_bytes: float

    @property
    def needed_bytes(self) -> int:
        """What a run costs in which nothing is averaged from now on, but at its very end."""
        final = self.nodes * (self._up + self._down) + 2 * self._quiet if self.final_sync else 0
        ahead = self.rounds_left * self._quiet + self.owed * self._down + final
        return math.ceil(self.ledger.spent_bytes + ahead)

    @property
    def models(self) -> int:
        """How many models can be fetched and answered with an average."""
        return int(self._free / self._model)

    @property
    def synchronisations(self) -> float:
        """How many full synchronisations can be paid."""
        return self._free / (self._model * self.nodes)

    @property
    def is_certain(self) -> bool:
        """Whether every check that is left can have a full synchronisation, or the last is here."""
        return self.checks_left <= max(1.0, self.synchronisations)

    @property
    def _free(self) -> float:
        return max(0.0, self.budget_bytes - self.needed_bytes)

    @property
    def _quiet(self) -> float:
        return self.ledger.quiet_bytes / max(1, self.ledger.checks)

    @property
    def _up(self) -> float:
        return self.ledger.up_bytes or self.model_bytes

    @property
    def _down(self) -> float:
        return self.ledger.down_bytes or self._up

    @property
    def _model(self) -> float:
        # A model that is asked for takes a message and an answer beside it.
        return max(1.0, self._up + self._down + self._quiet / self.nodes)


def steered_by_budget(
    ledger: ByteLedger, plan: BytePlan, moved: float, squared_distance: float
) -> tuple[ByteLedger, float]:
    """Return the ledger with the threshold that is steered, and the threshold of the next check.

    The latter is 0 while there is none, and as good as zero where bytes would be left.

    Parameters
    ----------
    ledger : ByteLedger
        As after a check.
    plan : BytePlan
        What is left after it.
    moved : float
        Share of the nodes whose models were averaged at it.
    squared_distance : float
        The nodes' mean ‖f − r‖² at it.
    """
    left = max(plan.synchronisations, 1e-9)
    rate = min(1.0, left / max(1, plan.checks_left))
    delta, behind = ledger.delta, ledger.behind
    if delta:
        behind = min(max(behind + rate - moved, 0.0), _MOST_BEHIND)
        gain = min(_POWER / left, _LARGEST_GAIN)
        if behind > _TOO_FAR_BEHIND and moved < rate:
            gain = max(gain, _QUICK_GAIN)
        delta = delta * math.exp(gain * (moved - rate))
    elif ledger.checks >= min(1 / rate, _FIRST_SHARE * (ledger.checks + plan.checks_left)):
        delta = squared_distance * max(1.0, 1 / rate / ledger.checks)
    if delta:
        delta = min(max(delta, AS_GOOD_AS_ZERO), _LARGEST)
    # Few digits, because it travels as text.
    used = AS_GOOD_AS_ZERO if plan.is_certain else float(f"{delta:.4g}")
    return dataclasses.replace(ledger, delta=delta, behind=behind), used
