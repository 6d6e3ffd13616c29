"""What a node gives away, decided on the node.

What an answer would disclose is held against a node's limits before it is computed
(`NodeLimits.allow`), and what depends on the result once more before it leaves. A question beyond
them is refused with a reply that names the limit, and nothing is spent or sent. The limits are an
argument of `good_enough_mod`, or come from the node's ``--node-config``, where whoever runs the
node sets them without touching the app::

    --node-config "require-dp=true dp-budget=3.0 privacy-ledger='/srv/spent.json'"

The privacy spent, adaptive answers, and what the node answers on (its first layers below the head,
its groups) are kept where neither a message nor a restart can undo it: in the node's state in
Flower, which is that of one run, and in a file, the ledger. Of two numbers the larger counts. It is
written before a release leaves the node: a crash in between spends too much, never too little.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

from flwr.app import ConfigRecord, Context, Message

from gems_flwr.bounds import MAX_ENTRIES
from gems_flwr.core.disk import write_atomically
from gems_flwr.core.question import Disclosure, DisclosureKind, Group
from gems_flwr.core.records import EVALUATE
from gems_flwr.errors import CheckpointError, OptionError, RefusedError, check_options
from gems_flwr.spaces.cone import (
    MEAN_COUNT,
    MIN_COUNT,
    NUMBERS_PER_SAMPLE,
    MeanRule,
    allowed_rank,
    is_rank,
    may_send_full,
    spent_epsilon,
)

# Masks that hide a node also from a server that plays others.
SIGNED = "ask with secure=SecureSum(), for which a real node has trusted-keys"
CHOSEN = "of contents that it chooses (gradients, sums, groups, scores, layers below the head)"
# In the node's state in Flower; in it the sum of squared mu of all Gaussian releases, from which
# any (epsilon, delta) follows.
LEDGER, SQUARED_MU = "ledger", "squared_mu"


@dataclasses.dataclass(frozen=True)
class NodeLimits:
    """What a node answers at most.

    Parameters
    ----------
    min_count : int, default 2
        Classes with fewer samples are never sent, at least 2. A request for a smaller number is
        refused; one that leaves it open gets this one.
    largest_rank : "auto", "full" or int, default "auto"
        Most directions of a class's covariance: no more than the number of its samples allows
        (see `gems_flwr.spaces.cone.build`); any number, full moments and sums included; or a
        fixed number. Requests with noise for differential privacy are not limited by it, nor by
        `min_count`. With ``"full"``, sums have every class from `min_count` samples.
    require_dp : bool, default False
        Whether only differentially private moments and scores leave the node.
    dp_budget : float or None, default 10.0
        Epsilon of all private releases together, above 0, at `dp_delta`; past it the node refuses.
        Without one a server that asks often enough averages the noise out. None is for
        simulations.
    dp_delta : float, default 1e-5
        Delta of the budget, in (0, 1).
    ledger : path, optional
        A file of the node's own in which the privacy spent is kept over runs and restarts. By
        default one for the node's name in the folder ``GEMS_FLWR_HOME``, or ``~/.gems-flwr``.
    allow_scores : bool or int, default 100
        How many models the node judges by its own data in all its runs, without masks or noise;
        true for any number. Radii and a handler's evaluation are not counted.
    share_gradients : bool, default True
        Whether the node sends loss and gradient of a model on its training data
        (`Gems(refine=…)`), as sums over no fewer samples than class moments need. Without masks
        only as often as `adaptive_answers` says.
    adaptive_answers : int or None, default 0
        How many questions of a content that the server chooses (gradients and losses, two a round;
        other layers below the head, or groups, than the first) the node answers without masks
        about each class, in all its runs; None for any number.
    share_examples, seeded_noise : bool, default False
        Whether the node hands out its raw data (the pooled reference), and draws private noise
        from the run's seed. For simulations only, where all data is on one machine anyway.
    min_mean_count : int, default 8
        Fewest samples of a class whose mean is sent alone, at least 2: one that is too small for a
        covariance. Under a `largest_rank` of ``"auto"`` a mean of few samples is sent in part
        (see `gems_flwr.spaces.cone.means`), else as it is.
    honest_nodes : int, default 1
        How many nodes, this one included, are sure to add noise that the server does not know to
        every masked sum that this node takes part in (see `gems_flwr.secure.shared_noise`): so
        much noise the ledger counts. No more than `least_nodes` less those who may collude.
    least_nodes : int, default 3
        Fewest nodes of the neighbourhood, this one included, in a masked sum; at least 3.
    least_threshold : float, default 2/3
        Part of the nodes that it takes to open a masked sum, at least; above a half, to 1.
    only_sums : bool, default False
        Whether everything but masked sums (`SecureSum`) is refused.
    keep_inputs : int, default 512
        Megabytes of inputs of the output layer that are kept from one message to the next, in
        memory for all nodes of a process; 0 for none. No answer depends on it.
    inputs_folder : path, optional
        The owner's own folder where as many are kept, for nodes whose messages are answered by a
        process each. By default none are on disk.

    Examples
    --------
    >>> from gems_flwr import NodeLimits
    >>> NodeLimits.of_node({"largest-rank": 20, "name": "north"}).largest_rank
    20
    """

    min_count: int = 2
    largest_rank: int | Literal["auto", "full"] = "auto"
    require_dp: bool = False
    dp_budget: float | None = 10.0
    dp_delta: float = 1e-5
    ledger: str | Path | None = None
    allow_scores: bool | int = 100
    share_gradients: bool = True
    adaptive_answers: int | None = 0
    share_examples: bool = False
    seeded_noise: bool = False
    min_mean_count: int = MEAN_COUNT
    honest_nodes: int = 1
    least_nodes: int = 3
    least_threshold: float = 2 / 3
    only_sums: bool = False
    keep_inputs: int = 512
    inputs_folder: str | Path | None = None

    def __post_init__(self) -> None:
        budget, answers = self.dp_budget, self.adaptive_answers
        rules = {
            "min_count": (self.min_count >= 2, "at least 2"),
            "min_mean_count": (self.min_mean_count >= 2, "at least 2"),
            "largest_rank": (is_rank(self.largest_rank), "'auto', 'full' or a number from 1"),
            "dp_budget": (budget is None or budget > 0, "above 0, or none"),
            "adaptive_answers": (answers is None or answers >= 0, "at least 0, or none"),
            "allow_scores": (self.allow_scores >= 0, "true, false or a number"),
            "dp_delta": (0 < self.dp_delta < 1, "in (0, 1)"),
            "honest_nodes": (self.honest_nodes >= 1, "at least 1"),
            "least_nodes": (self.least_nodes >= 3, "at least 3"),
            "keep_inputs": (self.keep_inputs >= 0, "at least 0"),
            "least_threshold": (0.5 < self.least_threshold <= 1, "above 0.5 and at most 1"),
        }
        if not all(holds for holds, _ in rules.values()):
            check_options(self, rules)

    @classmethod
    def of_node(cls, config: Mapping[str, Any]) -> NodeLimits:
        """Return the limits in a node's ``--node-config``; defaults where it says nothing."""
        given: dict[str, Any] = {}
        keys = {name: name.replace("_", "-") for name in _NODE_KEYS} | {"ledger": "privacy-ledger"}
        for unknown in config.keys() - set(keys.values()):
            # A misspelt limit would be none.
            if near := difflib.get_close_matches(unknown.replace("_", "-"), keys.values(), 1, 0.9):
                raise OptionError(f"node-config {unknown}: there is no such limit, write {near[0]}")
        for name, kinds in _NODE_KEYS.items():
            key = keys[name]
            if key not in config:
                continue
            value = config[key]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                allowed = " or ".join(kind.__name__ for kind in kinds)
                raise OptionError(f"node-config {key}: expected {allowed}, got {value!r}")
            given[name] = value
        return cls(**given)

    @property
    def rank_cap(self) -> int | None:
        """The most directions that ``rank="auto"`` may come to, if that is a fixed number."""
        return self.largest_rank if isinstance(self.largest_rank, int) else None

    @property
    def mean_rule(self) -> MeanRule:
        """How the means of classes that are too small for a covariance are shown."""
        least = max(self.min_count, self.min_mean_count)
        return MeanRule(least, exact=self.largest_rank != "auto")

    def least_for_sums(self, asked: int | None, *, masked: bool = False) -> int:
        """Return how many samples of a class there must be for it to be in a sum.

        Under masks few hide among those of others; whether there are enough depends on the total.
        """
        if self.largest_rank == "full":
            return self.min_count
        if masked:
            return asked or self.min_count
        return max(asked or 0, MIN_COUNT, self.min_count)

    def noise_shares(self, masked_with: int) -> int:
        """Return how many shares of the noise in a masked sum hide this node's data."""
        return min(self.honest_nodes, masked_with or self.honest_nodes)

    # --- the check ----------------------------------------------------------------------------

    def allow(self, disclosure: Disclosure) -> None:
        """Refuse an answer that would disclose more than these limits allow."""
        kind = disclosure.kind
        if kind == "nothing":
            return
        if kind not in get_args(DisclosureKind):
            raise RefusedError("allow", f"a {kind}, for which it has no rule")
        if disclosure.entries > MAX_ENTRIES:
            what = f"matrices of {disclosure.entries:,} numbers for one answer"
            raise RefusedError("entries", f"{what}, it builds {MAX_ENTRIES:,}; fewer features")
        if self.only_sums and not disclosure.masked_with:
            raise RefusedError("only_sums", "this node answers with masked sums alone")
        if kind == "examples" and not self.share_examples:
            raise RefusedError("share_examples", "raw data stays here; only simulations share it")
        # A curve of radii is one of scores.
        if kind in ("score", "radius") and not self.allow_scores:
            raise RefusedError("allow_scores", "this node reports no accuracy of a model")
        if kind == "loss" and not self.share_gradients:
            raise RefusedError("share_gradients", "this node sends no loss or gradient")
        if disclosure.squared_mu is not None:
            self._allow_noise(disclosure)
        elif self.require_dp:
            raise RefusedError("require_dp", f"a {kind} without noise; ask with dp_epsilon")
        elif kind == "moments":
            self._allow_moments(disclosure)
        elif kind == "second moments":
            self._allow_second_moments(disclosure)
        if not disclosure.masked_with:
            self.count_adaptive({}, disclosure)

    def count_adaptive(self, given: Mapping[str, int], disclosure: Disclosure) -> dict[str, int]:
        """Return how many adaptive answers each group has got with this one, or refuse it.

        `given` has those so far, by the group's name; while groups are not known the most count.
        """
        (limit, most), more = self.most(disclosure), disclosure.adaptive + disclosure.planned
        so_far = {group.name: given.get(group.name, 0) for group in disclosure.groups}
        so_far = so_far or {"a class": max(given.values(), default=0)}
        for name, count in so_far.items():
            if more and most is not None and count + more > most:
                why = f"it is {most}, and the server wants {more} of {name} beside the {count} that"
                why += f" it got, {CHOSEN}: {SIGNED}, or the node's owner sets "
                raise RefusedError(limit, f"{why}{limit.replace('_', '-')}={count + more}")
        return {name: count + disclosure.adaptive for name, count in so_far.items()}

    def most(self, disclosure: Disclosure) -> tuple[str, int | None]:
        """Return the limit that counts such answers, and how many it allows; None for any."""
        if disclosure.kind != "score":
            return "adaptive_answers", self.adaptive_answers
        return "allow_scores", None if self.allow_scores is True else int(self.allow_scores)

    def allow_handler(self, message: Message) -> None:
        """Refuse to pass an ordinary message to the app's own handler where limits forbid that."""
        scores = message.metadata.message_type.startswith(EVALUATE)
        self.allow(Disclosure("score" if scores else "model"))

    def _allow_noise(self, disclosure: Disclosure) -> None:
        if self.seeded_noise:
            return
        if disclosure.is_seeded:
            why = "noise from a known seed can be subtracted; ask without dp_seeded"
            raise RefusedError("seeded_noise", why)
        if disclosure.is_shared_noise and not disclosure.masked_with:
            why = "a share of the noise protects no one without masks; ask with secure=SecureSum()"
            raise RefusedError("honest_nodes", why)

    def _allow_moments(self, disclosure: Disclosure) -> None:
        asked = disclosure.least_asked
        if asked is not None and asked < self.min_count:
            raise RefusedError("min_count", f"it is {self.min_count}, the server asks for {asked}")
        least = self.mean_rule.least
        for group in disclosure.groups:
            if group.samples and group.directions is None:  # a mean alone
                if group.samples < least:
                    why = f"it is {least}, a mean of {group.samples} samples was to go"
                    raise RefusedError("min_mean_count", why)
            elif group.samples and self.largest_rank != "full":
                self._allow_directions(group, group.directions or 0, disclosure)

    def _allow_directions(self, group: Group, directions: int, disclosure: Disclosure) -> None:
        """Refuse an exact mean, or directions, of too few samples."""
        count, features = group.samples, disclosure.features
        masked = disclosure.masked_with > 0
        whose = " on all nodes" if masked else ""
        enough = MIN_COUNT if masked else features / NUMBERS_PER_SAMPLE
        if group.has_mean and count < enough and self.largest_rank == "auto":
            raise RefusedError(
                "largest_rank",
                f"an exact mean of {features} features, {group.name} has {count} samples{whose}; "
                + ("leave it out" if masked else f"{SIGNED}, or for rank='auto' without sums"),
            )
        most = allowed_rank(count, features) if self.rank_cap is None else self.rank_cap
        whole = may_send_full(count, features) and self.largest_rank == "auto"
        if directions > most and not (whole and not masked):
            instead = "a smaller sketch, or a larger min_count" if masked else "rank='auto'"
            raise RefusedError(
                "largest_rank",
                f"{group.name} has {count} samples of {features} features{whose}, of which it "
                f"shows at most {most} directions, not {directions}: ask for {instead}",
            )

    def _allow_second_moments(self, disclosure: Disclosure) -> None:
        """Refuse the second moments of all inputs of a layer where samples are too few."""
        features = disclosure.features
        for group in disclosure.groups if self.largest_rank != "full" else ():
            if self.largest_rank != "auto" or not may_send_full(group.samples, features):
                what = f"the second moments of {features} inputs of {group.samples} samples"
                raise RefusedError("largest_rank", f"{what}; merge by fisher, or ask for cones")

    def ledger_of(self, node: str) -> Path | None:
        """Return where the privacy that a node spends is kept; None in a simulation."""
        if self.ledger is not None:
            return Path(self.ledger).expanduser()
        if self.dp_budget is None:
            return None
        home = os.environ.get("GEMS_FLWR_HOME") or "~/.gems-flwr"
        digest = hashlib.blake2b(node.encode(), digest_size=8).hexdigest()
        return Path(home).expanduser() / f"privacy-{quote(node, safe='')[:100]}-{digest}.json"


UNLIMITED = NodeLimits(
    largest_rank="full",
    allow_scores=True,
    dp_budget=None,
    adaptive_answers=None,
    share_examples=True,
    seeded_noise=True,
)
"""For simulations: all that the papers' experiments ask for."""

# Fields that a node's config sets, and the kinds of their values: those of the defaults.
_KINDS: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (float, int)}
_NODE_KEYS = {
    field.name: _KINDS.get(type(field.default), (str,))
    for field in dataclasses.fields(NodeLimits)
    if field.name not in ("share_examples", "seeded_noise")
} | {"largest_rank": (int, str), "allow_scores": (bool, int)}


# --- the ledger -------------------------------------------------------------------------------


def spend(squared_mu: float, limits: NodeLimits, context: Context, node: str) -> float:
    """Note a release that is about to be made, and return the epsilon spent with it.

    A release beyond the budget is refused, and not noted; so is any where the ledger cannot be
    read, since it is not known what was spent.
    """
    with ledger(limits.ledger_of(node), context) as entries:
        before = float(entries.get(SQUARED_MU, 0.0))
        total = before + squared_mu
        epsilon = spent_epsilon(total, limits.dp_delta)
        if limits.dp_budget is not None and epsilon > limits.dp_budget * (1 + 1e-9) + 1e-6:
            spent = spent_epsilon(before, limits.dp_delta)
            raise RefusedError(
                "dp_budget",
                f"epsilon {spent:.4g} of {limits.dp_budget:g} is spent at delta "
                f"{limits.dp_delta:g}, and this release would make it {epsilon:.4g}"
                " (in a simulation, give the mod limits=UNLIMITED)",
            )
        entries[SQUARED_MU] = total
    return epsilon


@contextlib.contextmanager
def ledger(path: Path | None, context: Context) -> Iterator[dict[str, Any]]:
    """Give what a node has noted, numbers and texts; what is changed is kept, unless by an error.

    One process of a node at a time reads and writes its file.
    """
    if path is None:
        lock: Any = contextlib.nullcontext()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("w")
    with lock as held:
        if path is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        record = context.state.get(LEDGER)
        here = dict(record) if isinstance(record, ConfigRecord) else {}
        there = {} if path is None else _in_file(path)
        larger = {k: max(v, there.get(k, v)) for k, v in here.items() if not isinstance(v, str)}
        entries: dict[str, Any] = {**here, **there, **larger}
        before = dict(entries)
        yield entries
        if entries != before:
            if path is not None:
                write_atomically(path, json.dumps({SQUARED_MU: 0.0, **entries}).encode())
            context.state[LEDGER] = ConfigRecord(entries)


def _in_file(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        entries = dict(json.loads(path.read_text()))
        numbers = [v for v in (entries[SQUARED_MU], *entries.values()) if not isinstance(v, str)]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"its numbers are {numbers}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the privacy ledger {path} cannot be read ({error}), so what was spent is not known: "
            "put a copy back, or remove it if nothing was ever released"
        ) from error
    return entries
