"""Data from a random graphical model: the drifting stream of Kamp et al. 2018, Appendix A.3.

After Bshouty and Long, "Linear classifiers are nearly optimal when hidden variables have diverse
effects": a binary class drives hidden binary variables, and each observed variable hangs on one of
them. The paper gives the shape (samples of R^50, two classes) but no numbers. Decided here: hidden
variable k agrees with the class, up to a random sign, with a probability drawn evenly from
[0.6, 0.95]; observed variable j hangs on a random hidden variable, whose value ±1 it shows with a
weight drawn from a standard normal distribution, under normal noise. With 25 hidden variables and
noise of 0.5 a concept can be learned nearly perfectly (linear models are right on 99.3 to 99.7 % of
new samples), so that there are quiet times; fewer hidden variables and more noise make it harder.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gems_flwr.core.run import derive_seed, generator
from simulations.data.examples import Dataset, Examples


@dataclass(frozen=True)
class GraphicalModel:
    """One concept."""

    # Probability with which a hidden variable has the sign of the class.
    agreement: NDArray[np.float64]
    # The hidden variable of each observed one, and how strongly it shows.
    parents: NDArray[np.int64]
    weights: NDArray[np.float64]
    # Standard deviation of what is added to each observed variable.
    noise: float = 0.5

    @classmethod
    def random(
        cls, hidden: int, observed: int, noise: float, rng: np.random.Generator
    ) -> GraphicalModel:
        """Return a random model."""
        agreement = rng.uniform(0.6, 0.95, hidden)
        flipped = rng.random(hidden) < 0.5
        return cls(
            np.where(flipped, 1 - agreement, agreement),
            rng.integers(hidden, size=observed),
            rng.normal(size=observed),
            noise,
        )

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw examples."""
        labels = rng.integers(2, size=count)
        agrees = rng.random((count, len(self.agreement))) < self.agreement
        hidden = np.where(agrees, 1.0, -1.0) * (2 * labels - 1)[:, None]
        noise = rng.normal(size=(count, len(self.parents)))
        features = hidden[:, self.parents] * self.weights + self.noise * noise
        return Examples(features.astype(np.float32), labels)


@dataclass(frozen=True, eq=False)
class GeneratedDataset(Dataset):
    """A data set with an endless source for every concept; its examples are of concept 0."""

    hidden: int
    noise: float
    seed: int

    def draw(self, concept: int, count: int, rng: np.random.Generator) -> Examples:
        """Draw new examples of a concept."""
        observed = self.input_shape[0]
        model = _concept(self.seed, concept, self.hidden, observed, self.noise)
        return model.sample(count, rng)


def graphical(
    *,
    data_dir: str | Path | None = None,
    seed: int,
    public: int = 200,
    examples: int = 20000,
    dimensions: int = 50,
    hidden: int = 25,
    noise: float = 0.5,
) -> GeneratedDataset:
    """Generate a data set; see the module's docstring.

    Parameters
    ----------
    data_dir, seed, public
        See `simulations.data`; no file is read.
    examples : int
        Training examples that are divided among the nodes, and a fifth as many for testing. A
        stream draws new ones instead.
    dimensions : int
        Observed variables, at least 1.
    hidden : int
        Hidden variables, at least 1.
    noise : float
        Standard deviation of the noise on observed variables, at least 0.
    """
    for name, value in (("examples", examples), ("dimensions", dimensions), ("hidden", hidden)):
        if value < 1:
            raise ValueError(f"dataset.{name} must be at least 1, got {value}")
    if not 0 <= noise < float("inf"):
        raise ValueError(f"dataset.noise must be at least 0, got {noise}")
    if not 0 <= public < examples:
        raise ValueError(f"dataset.public must be from 0 to {examples - 1}, got {public}")
    model = _concept(seed, 0, hidden, dimensions, noise)
    rng = generator(seed, "graphical")
    return GeneratedDataset(
        name="graphical",
        classes=2,
        input_shape=(dimensions,),
        scale=1.0,
        train=model.sample(examples - public, rng),
        public=model.sample(public, rng),
        test=model.sample(max(1, examples // 5), rng),
        hidden=hidden,
        noise=noise,
        seed=seed,
    )


@functools.lru_cache(maxsize=16)
def _concept(seed: int, concept: int, hidden: int, observed: int, noise: float) -> GraphicalModel:
    rng = np.random.default_rng(derive_seed(seed, "graphical-model", concept))
    return GraphicalModel.random(hidden, observed, noise, rng)
