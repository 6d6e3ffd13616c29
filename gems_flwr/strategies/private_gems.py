"""A linear layer under differential privacy of the sum (see `gems_flwr.secure.shared_noise`).

Nodes add their shares of the noise to secure sums, so the federation pays for privacy once, and
not every node for itself. With that little noise it is worth asking more than once: in the first
round for class counts, class sums and one common second moment, which make a first layer, then in
every round for one clipped gradient, along which the layer moves. Losses or class covariances would
need ten times the noise. The sums and the steps are those of `gems_flwr.spaces.cone.private_steps`.

Decided here: what may be spent is divided beforehand, `MEANS_PART` and `SPREAD_PART` for the two
sums of the first round, the rest evenly over the gradients. A node counts the shares of noise that
it believes in, not those that the server promises: its own is always there, and
`NodeLimits.honest_nodes` says how many it is sure of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from gems_flwr.carriers import KnownLayers
from gems_flwr.core.log import log_event
from gems_flwr.core.question import Disclosure, SumQuestion
from gems_flwr.core.round import Carrier, Round
from gems_flwr.core.run import RoundOutcome, ServerState
from gems_flwr.core.sums import Total, summand_record
from gems_flwr.devices import check_device
from gems_flwr.errors import ModelError, OptionError, RefusedError, check_options
from gems_flwr.secure import shared_noise, shares_needed
from gems_flwr.secure.fixed_point import Layout, Section, Words, whole_section
from gems_flwr.spaces import find_output_layer, flatten_linear
from gems_flwr.spaces.cone import countable, private_steps, spent_epsilon
from gems_flwr.spaces.cone.private_steps import LONGEST, NoisyMeans, PrivateState, Spread
from gems_flwr.strategies.averaging import checkpoint_faults
from gems_flwr.strategies.loop import RoundLoop
from gems_flwr.typing import Arrays, Float

if TYPE_CHECKING:
    from gems_flwr.node import Node

PrivateStage = Literal["means", "spread", "gradient"]

MEANS_PART, SPREAD_PART = 0.03, 0.1
# The count of samples has more room than it should need: too many are noticed by it.
_SPARE = 2**12
_PREFIX = "private-"


@dataclass(frozen=True)
class PrivateSum(SumQuestion):
    """A sum over nodes to which every node adds its share of the noise."""

    kind: ClassVar[str] = "private-sum"
    is_about_output_layer: ClassVar[bool] = True
    array_fields: ClassVar[tuple[str, ...]] = ("center",)

    # What is summed.
    stage: PrivateStage = "means"
    # Deviation of each node's noise over the sensitivity of the sum.
    noise: float = 1.0
    # Length to which inputs are shortened, and a sample's gradient in units of that.
    clip: float = 1.0
    longest: float = 1.0
    # Whether noise is to come from the run's seed, which protects no one. For simulations.
    dp_seeded: bool = False
    # What is taken from inputs, from the spread on (D,).
    center: NDArray | None = None

    def __post_init__(self) -> None:
        stages = list(get_args(PrivateStage))
        rules = {"stage": (self.stage in stages, f"one of {stages}")}
        for name in ("noise", "clip", "longest"):
            rules[name] = (0 < getattr(self, name) < math.inf, "above 0")
        self.check(rules)
        row = np.zeros(0) if self.center is None else np.asarray(self.center)
        if row.ndim != 1 or not np.isfinite(row).all():
            raise ModelError(f"a center of shape {row.shape} that is not finite numbers in a row")

    @property
    def sensitivity(self) -> int:
        """By how much one sample changes the sum at most, in length."""
        spread = private_steps.SPREAD**2
        longest = {"means": private_steps.MEANS, "spread": spread}
        return longest.get(self.stage, private_steps.GRADIENT)

    def shapes(self, classes: int, features: int) -> dict[str, tuple[int, ...]]:
        """Return the arrays of a summand and their shapes."""
        if self.stage == "means":
            return {"sums": (classes, features), "counts": (classes,), "squares": (1,)}
        if self.stage == "spread":
            return {"diagonal": (features,), "corner": (features * (features - 1) // 2,)}
        return {"gradient": (classes, features + 1)}

    def deviation(self, array: str) -> float:
        """Return the deviation of a node's noise in one array, in whole numbers."""
        # Both halves of a symmetric matrix count, and only one is sent.
        return self.noise * self.sensitivity / (math.sqrt(2) if array == "corner" else 1.0)

    def sections(self, classes: int, features: int, nodes: int, examples: int) -> Sequence[Section]:
        """Return the sections of a summand, with room for the noise of all nodes.

        At most `nodes` add to it, which have at most `examples` samples together.
        """
        shapes = self.shapes(classes, features)
        numbers = sum(math.prod(shape) for shape in shapes.values())
        sections = []
        for name, shape in shapes.items():
            noise = shared_noise.tail(max(1, numbers), self.deviation(name) * math.sqrt(nodes))
            most: float = examples * self.sensitivity * (_SPARE if name == "counts" else 1)
            # A single pixel's square is at most the squared length, a product half of that.
            most = most / 2 if name == "corner" else most
            sections.append(whole_section(name, shape, most + noise, nodes))
        return sections

    def discloses(self, node: Node) -> Disclosure:
        """Return that it is a share of a noisy sum, which masks have to hide."""
        return Disclosure(
            "loss" if self.stage == "gradient" else "moments",
            squared_mu=shared_noise.squared_mu_of(
                self.noise, node.limits.noise_shares(node.masked_with)
            ),
            is_seeded=self.dp_seeded,
            is_shared_noise=True,
            masked_with=node.masked_with,
            entries=0 if self.center is None else self.center.size**2,
        )

    def answer(self, node: Node) -> RecordDict:
        """Return the node's whole numbers and its share of the noise, once that is accounted for.

        The one place where noise is added: before the sum is packed and masked.
        """
        layer, layout = node.output_layer(), node.layout
        shapes = self.shapes(layer.num_classes, layer.features)
        asked = {} if layout is None else {s.name: s.shape for s in layout.sections}
        if layout is None or asked != shapes:
            raise ModelError(f"the server wants {asked} for a sum of {shapes}")
        values, honest = self.summand(node), node.limits.noise_shares(node.masked_with)
        squared_mu = shared_noise.squared_mu_of(self.noise, honest)
        # Noise that is too small on its grid is not what the ledger takes it for.
        share = min(self.deviation(name) for name in shapes)
        part = shared_noise.EPSILON_PART * max(
            spent_epsilon(squared_mu, node.limits.dp_delta), shared_noise.EPSILON_PART
        )
        if (
            share < shared_noise.SMALLEST_SHARE
            or shared_noise.epsilon_cost(layout.size, share, honest) > part
        ):
            reason = f"noise of {share:.3g} steps of the grid counts for none"
            raise RefusedError("dp_budget", reason)
        node.spend(squared_mu)
        flat = np.concatenate([values[section.name].ravel() for section in layout.sections])
        # What is too large wraps: that costs digits, never privacy.
        words = layout.reduced(flat.astype(np.int64).view(np.uint64))
        noise = self.noise_words(layout, node.seed("sum", self.stage) if self.dp_seeded else None)
        return summand_record(layout.pack(layout.add([words, noise])))

    def summand(self, node: Node) -> dict[str, Any]:
        """Return the node's sums of whole numbers."""
        layer = node.output_layer()
        # A refusal would tell of single samples.
        samples = countable(node.inputs("train"), layer.num_classes)
        labels = samples.labels.long().cpu().numpy()
        inputs = samples.inputs.detach().cpu().double().numpy()
        if self.stage == "means":
            return private_steps.whole_mean_sums(inputs, labels, layer.num_classes, self.clip)
        if self.center is None or len(self.center) != layer.features:
            wanted = f"{layer.features} numbers"
            raise ModelError(f"the server wants inputs centred, and sent no {wanted}")
        center = self.center.astype(np.float64)
        if self.stage == "spread":
            return private_steps.spread_sums(inputs, center, self.clip)
        rows = layer.scaled_in(node.model, np.ones(layer.features))
        about = (rows[:, :-1], rows[:, -1], center, self.clip, self.longest)
        return private_steps.gradient_sums(inputs, labels, *about)

    def noise_words(self, layout: Layout, seed: int | None = None) -> Words:
        """Return a node's share of the noise, as elements of the rings.

        A `seed` is for simulations: whoever knows it can subtract the noise.
        """
        seeds: list[int | None] = [None] * len(layout.sections)
        if seed is not None:
            seeds = np.random.SeedSequence(seed).generate_state(len(seeds), np.uint64).tolist()
        parts = [
            shared_noise.discrete_gaussian(section.size, self.deviation(section.name), own)
            for section, own in zip(layout.sections, seeds, strict=True)
        ]
        return layout.reduced(np.concatenate(parts).view(np.uint64))


@dataclass(kw_only=True, eq=False)
class PrivateGems(RoundLoop):
    """Learn a linear output layer from sums that are private as a whole.

    Parameters
    ----------
    epsilon : float, default 1.0
        Privacy loss of the whole run for one sample more or less on any node, above 0.
    delta : float, default 1e-5
        Chance of a larger loss, in (0, 1).
    steps : int, default 16
        Rounds after the first, with a gradient each; at least 1.
    clip : float, default 10.0
        Length that inputs of the output layer rarely exceed, above 0; longer ones are shortened. It
        must not be taken from the data. The run finds the clip of centred inputs itself.
    colluders : int, default 0
        Nodes that may give away their share of the noise, or add none, without harm to the others.
    examples : int, default 131072
        Most samples that all nodes have together, at least 1: how large sums can become.
    dp_seeded : bool, default False
        Whether noise comes from the run's seed, which protects no one. For simulations.
    layer : str, optional
        Name of the linear output layer, where it is not the last matrix of the model.
    device : str, default "cpu"
        Where the server computes; see `gems_flwr.good_enough_mod`.
    **loop
        See `RoundLoop`. Nodes answer with `secure=SecureSum()` alone, as a share of the noise does
        not protect a summand that can be seen. The noise is made for as many nodes as its threshold
        demands in every sum.

    Examples
    --------
    >>> from gems_flwr import PrivateGems, SecureSum
    >>> PrivateGems(epsilon=1.0, steps=8, colluders=2, secure=SecureSum()).noise(10).honest
    5
    """

    needs_classes: ClassVar[bool] = True
    mod_needed: ClassVar[str] = "good_enough_mod(data, model=Net)"
    sums_replies: ClassVar[bool] = True

    epsilon: float = 1.0
    delta: float = 1e-5
    steps: int = 16
    clip: float = 10.0
    colluders: int = 0
    examples: int = 2**17
    dp_seeded: bool = False
    layer: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)
        rules = {
            "steps": (self.steps >= 1, "at least 1"),
            "clip": (0 < self.clip < float("inf"), "above 0"),
            "examples": (1 <= self.examples <= 2**30, "from 1 to 2^30"),
            "colluders": (self.colluders >= 0, "at least 0"),
        }
        check_options(self, rules)
        shared_noise.SharedNoise(self.epsilon, self.delta, nodes=1)

    @property
    def rounds_needed(self) -> int:  # type: ignore[override]
        """One for the moments, and one for each gradient."""
        return 1 + self.steps

    def noise(self, nodes: int) -> shared_noise.SharedNoise:
        """Return the noise of sums over so many nodes; an OptionError if too little counts."""
        fewest = nodes
        if self.secure is not None:
            fewest = min(nodes, shares_needed(self.secure.threshold, nodes))
        return shared_noise.SharedNoise(self.epsilon, self.delta, nodes, self.colluders, fewest)

    def carriers(self) -> Sequence[Carrier]:
        """Return the carrier that sends no node what it has below the output layer."""
        return (KnownLayers(),)

    def play_round(self, round: Round, state: ServerState) -> RoundOutcome:
        """Ask for moments in the first round, for a gradient in every other."""
        layer = round.layer = find_output_layer(state.arrays, self.layer)
        round.inbox = None  # what single nodes add is never written
        nodes = round.sample(self.fraction_train)
        noise = self.noise(len(nodes))
        each = (1 - MEANS_PART - SPREAD_PART) / self.steps

        def ask(part: float, stage: PrivateStage, clip: float, **more: Any) -> Total:
            """Return a total with the noise of a release that gets a part of what may be spent."""
            share, model = noise.share(part), more.pop("model", None)
            question = PrivateSum(stage, share, clip, dp_seeded=self.dp_seeded, **more)
            shape = layer.num_classes, layer.features
            sections = question.sections(*shape, noise.nodes, self.examples)
            numbers = sum(section.size for section in sections)
            least = min(question.deviation(section.name) for section in sections)
            noise.check_cost(
                (2 + self.steps) * shared_noise.epsilon_cost(numbers, least, noise.honest)
            )
            at_least = max(round.min_nodes, noise.least_in_sum)
            return round.total(question, sections, nodes, model=model, at_least=at_least)

        def model_with(values: Float, reached: PrivateState) -> dict[str, NDArray]:
            """Return the model with a layer of centred inputs put back to inputs as they are."""
            return layer.replace_in(state.arrays, flatten_linear(*reached.plain(values)))

        if round.number == 1:
            sums = ask(MEANS_PART, "means", self.clip).values
            squares = float(sums["squares"][0])
            means = NoisyMeans.of(sums["sums"], sums["counts"], squares, self.clip)
            if means.total > self.examples:
                raise OptionError(
                    f"examples must be above {means.total:.0f}, as many as the nodes seem to have: "
                    f"sums of more than {self.examples} would wrap"
                )
            log_event("private_means", examples=f"{means.total:.0f}", clip=means.clip)
            center = means.center.astype(np.float32)
            total = ask(SPREAD_PART, "spread", means.clip, center=center)
            corner = total.values["corner"]
            spread = Spread.of(total.values["diagonal"], corner, means.total, self.device)
            # That of the gradients to come, if as many nodes take part in them.
            deviation = noise.share(each) * math.sqrt(len(total.nodes))
            reached = PrivateState.first(means, spread, deviation / means.total)
        else:
            before = _read_state(state.memory)
            # The gradient is wanted where the momentum leads.
            about = {"center": before.center.astype(np.float32), "longest": LONGEST}
            ahead = model_with(before.ahead, before)
            total = ask(each, "gradient", before.clip, model=ahead, **about)
            reached = before.stepped(total.values["gradient"])
        return RoundOutcome(
            arrays=model_with(reached.layer, reached),
            details={"privacy": self._promise(noise), "nodes": list(total.nodes)},
            memory={_PREFIX + name: np.asarray(value) for name, value in vars(reached).items()},
        )

    def _promise(self, noise: shared_noise.SharedNoise) -> dict[str, Any]:
        """Return what holds for the run as a whole, and what more colluders would leave of it."""
        others = range(max(1, noise.honest - 2), noise.honest)
        left = {str(noise.least_in_sum - h): noise.epsilon_left(h) for h in reversed(others)}
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "nodes": noise.nodes,
            "fewest": noise.least_in_sum,
            "colluders": self.colluders,
            "epsilon_with_colluders": left,
        }


def _read_state(memory: Arrays) -> PrivateState:
    """Return the state that a checkpoint keeps; a CheckpointError if it is not there."""
    names = [field.name for field in dataclasses.fields(PrivateState)]
    with checkpoint_faults("the private run"):
        parts: dict[str, Any] = {name: np.asarray(memory[_PREFIX + name]) for name in names}
    numbers = {name: float(part) for name, part in parts.items() if not part.ndim}
    return PrivateState(**{**parts, **numbers})
