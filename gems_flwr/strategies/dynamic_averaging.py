"""Dynamic model averaging: talk only when it pays (Kamp et al. 2018, Algorithms 1 and 2).

Every node checks ‖f − r‖² ≤ Δ for its own model f and a common reference r; only violators send
their models, and the coordinator asks for more until the mean is back in the ball. The decisions
are those of `averaging.balancing`. A quiet round moves some numbers per node and no model.
Beyond the paper, within Definition 2: with ``condition="total"`` nodes send their squared distance
only, and models are asked for when the *mean* distance exceeds Δ.

`PeriodicAveraging` averages every b rounds. With ``b=1`` it is the paper's continuous averaging,
which equals mini-batch SGD on all data (Proposition 3). With a `fraction` below 1 it is what the
paper compares with as FedAvg: only a random part of the nodes is averaged, and the others go on
with their own models. `NoSync` never averages; `Serial` is one learner on the streams of all nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gems_flwr.averaging import (
    Augmentation,
    Balancing,
    BalancingRule,
    Condition,
    LocalReport,
    Synchronisation,
)
from gems_flwr.core.round import Round
from gems_flwr.core.run import RoundOutcome, ServerState, generator
from gems_flwr.errors import OptionError
from gems_flwr.strategies.local_learners import (
    AskForModels,
    LearnerRound,
    LearnerState,
    LocalLearners,
    Replies,
    Tally,
)
from gems_flwr.strategies.loop import RoundLoop
from gems_flwr.strategies.members import join_models
from gems_flwr.typing import Arrays


@dataclass(kw_only=True, eq=False)
class DynamicAveraging(LocalLearners):
    """Average local models when they have drifted too far from a reference.

    Parameters
    ----------
    delta : float, default 0.7
        Threshold Δ above 0: a squared distance over all parameters.
    check_every : int, default 1
        The paper's b: rounds between two checks, at least 1.
    augmentation : {"doubling", "random", "all"}
        How many more models are asked for at a time.
    condition : {"local", "total"}
        ``local`` is the paper's; see the module's docstring.
    **learners
        See `LocalLearners`.

    Examples
    --------
    >>> from gems_flwr import DynamicAveraging
    >>> strategy = DynamicAveraging(delta=0.7, check_every=10)  # of any ClientApp with the mod
    """

    delta: float = 0.7
    check_every: int = 1
    augmentation: Augmentation = "doubling"
    condition: Condition = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._balancing = BalancingRule(
            delta=self.delta,
            augmentation=self.augmentation,
            condition=self.condition,
            robust=self.rule,
        )

    @property
    def period(self) -> int:
        """The paper's b."""
        return self.check_every

    def request(self, server_round: int, nodes: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Ask for the model on violation, or for the squared distance alone."""
        asked: dict[str, Any] = {"measure": True}
        if self.condition == "local" and server_round % self.check_every == 0:
            asked = {"send": "violated", "delta": self.delta}
        return dict.fromkeys(nodes, asked)

    def synchronise(
        self, server_round: int, learners: LearnerState, replies: Replies, ask: AskForModels
    ) -> Synchronisation:
        """Balance violations with as few models as the rule needs."""
        weights = self.rule.fair([self.weight(reply) for reply in replies.values()])
        reports = {
            name: LocalReport(reply.squared_distance or 0.0, weight)
            for (name, reply), weight in zip(replies.items(), weights, strict=True)
        }
        violators = {name: r.arrays for name, r in replies.items() if r.arrays is not None}
        rng = generator(self.seed, "balance", server_round)
        balancing = Balancing.begin(self._balancing, learners.coordinator, reports, violators)
        while names := balancing.query(rng):
            given = ask(names)
            balancing = balancing.receive(given, lost=[n for n in names if n not in given])
        return balancing.finish()


# Gets the round, the model and what was kept; returns model, what to keep, and metrics.
TrainServer = Callable[[int, Arrays, Arrays], tuple[Arrays, Arrays, Mapping[str, float]]]


@dataclass(kw_only=True, eq=False)
class PeriodicAveraging(LocalLearners):
    """Average the local models every b rounds.

    Parameters
    ----------
    b : int, default 1
        Rounds between two averagings, at least 1.
    fraction : float, default 1.0
        Share of the nodes whose models are averaged, in (0, 1]; at least one node.
    **learners
        See `LocalLearners`.

    Examples
    --------
    >>> from gems_flwr import PeriodicAveraging
    >>> strategy = PeriodicAveraging(b=2, fraction=0.5, compress="int8")
    """

    b: int = 1
    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise OptionError(f"fraction must be above 0 and at most 1, got {self.fraction}")

    @property
    def period(self) -> int:
        """The b of the paper."""
        return self.b

    def request(self, server_round: int, nodes: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Ask the chosen nodes for their models, if an averaging is due."""
        if server_round % self.b:
            return {name: {} for name in nodes}
        count = max(1, int(self.fraction * len(nodes) + 1e-9))
        rng = generator(self.seed, "average", server_round)
        chosen = {nodes[i] for i in rng.choice(len(nodes), size=count, replace=False)}
        return {name: {"send": "always"} if name in chosen else {} for name in nodes}

    def synchronise(
        self, server_round: int, learners: LearnerState, replies: Replies, ask: AskForModels
    ) -> Synchronisation:
        """Average the models that came."""
        sent = {name: r.arrays for name, r in replies.items() if r.arrays is not None}
        if not sent:
            return Synchronisation(learners.coordinator)
        weights = [self.weight(replies[name]) for name in sent]
        full = len(sent) == len(replies)
        return Synchronisation.of_models(self.rule, learners.coordinator, sent, weights, full=full)


@dataclass(kw_only=True, eq=False)
class NoSync(LocalLearners):
    """Never average; at the end the models are collected side by side, to be scored.

    Parameters
    ----------
    report_every : int, default 1
        Rounds between two reports of the nodes' losses, at least 1.
    **learners
        See `LocalLearners`; `final_sync` here means to collect all models at the end.

    Examples
    --------
    >>> from gems_flwr import NoSync
    >>> strategy = NoSync(report_every=10)
    """

    report_every: int = 1

    @property
    def period(self) -> int:
        """Messages only carry reports."""
        return self.report_every

    def close(self, current: LearnerRound) -> None:
        """Collect the models, side by side."""
        if self.final_sync:
            current.arrays = join_models(current.all_models())


@dataclass(kw_only=True, eq=False)
class Serial(RoundLoop):
    """Learn from the batches that all nodes see in a round, one after the other.

    No message is sent: it is for simulations, which hand in the streams as `learn`.

    Parameters
    ----------
    learn : callable
        Gets the round, the model and the optimiser's state; returns the new model, the new state
        and the metrics that a node would report.
    **loop
        See `RoundLoop`.

    Examples
    --------
    >>> from gems_flwr import Serial
    >>> strategy = Serial(learn=lambda server_round, model, memory: (model, memory, {}))
    """

    learn: TrainServer

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Train one model at the server."""
        arrays, memory, metrics = self.learn(round.number, state.arrays, state.memory)
        before, tally = (Tally.from_details(state.details) for _ in range(2))
        tally.add_losses({"serial": metrics})
        return RoundOutcome(
            arrays=arrays,
            train_metrics=tally.in_place(before),
            memory=memory,
            details=tally.to_details(),
        )
