"""The covariance of some samples by its products alone: never a D x D matrix.

With D = 4,000 features a covariance in double precision is 128 MB, for every class. What
`gems_flwr.moments.low_rank` makes of it, the leading eigenvectors and an inflated diagonal, needs
less: products with a few vectors, the diagonal, and the squares of what is left over.

- Eigenvectors come from a block Krylov method (Musco and Musco 2015): the space of ``Q, S Q, S^2 Q,
  …`` for a random Q of r + 10 columns, orthonormal throughout, with a Rayleigh-Ritz step after each
  product. It ends when ``|S v - lambda v|`` is below `TOLERANCE` times lambda for every
  vector, typically after five to ten passes over the data, or after `MOST_PRODUCTS` where
  eigenvalues are so close that no vector is better than its neighbours.
- The residual is that of the samples without their components along the eigenvectors, so
  ``|R|_F^2`` is the sum of squares of their Gram matrix over n^2, exactly: block by block of
  samples, or of features where there are fewer of those. Nothing large is subtracted from
  anything, so single precision is enough, unless features are of very different widths.

Decided here: at most `KEPT` vectors are kept, or three blocks if that is more; then the method
starts again from the best of them. So memory is the samples, a few chunks of `CHUNK` of them, and D
times as many numbers as vectors are kept, twice. Nothing depends on a random state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gems_flwr.devices import exact_device
from gems_flwr.typing import Float

# Samples, or features, that are worked on at a time.
CHUNK = 1024
OVERSAMPLING = 10
KEPT = 320
TOLERANCE = 1e-5
MOST_PRODUCTS = 60


@dataclasses.dataclass(frozen=True, eq=False)
class SampleCovariance:
    """``sum (x - mean) (x - mean)^T / n`` over some rows of a matrix, divided by units.

    Parameters
    ----------
    inputs : tensor of shape (all, D)
        Samples, on any device.
    rows : int tensor of shape (n,)
        Which of them, at least one.
    units : array of shape (D,), optional
        What each feature is divided by.
    device : torch.device, optional
        Where to compute: chunks of samples go there in every pass. By default where they are.
    """

    inputs: Tensor
    rows: Tensor
    units: Float | None = None
    device: torch.device | None = None

    @property
    def where(self) -> torch.device:
        """Where to compute."""
        return exact_device(self.device or self.inputs.device)

    @functools.cached_property
    def _center(self) -> Tensor:
        total = torch.zeros(self.side, dtype=torch.float64, device=self.where)
        for part in torch.split(self.rows, CHUNK):
            total += self.inputs[part].to(self.where).double().sum(dim=0)
        return total / len(self.rows)

    @functools.cached_property
    def variances(self) -> Float:
        """The diagonal."""
        total = torch.zeros_like(self._center)
        for part in torch.split(self.rows, CHUNK):
            total += ((self.inputs[part].to(self.where).double() - self._center) ** 2).sum(dim=0)
        found = np.asarray((total / len(self.rows)).cpu().numpy())
        return found if self.units is None else found / self.units**2

    @functools.cached_property
    def precision(self) -> torch.dtype:
        """Single, unless some features are so much wider than others that these would drown."""
        spread = self.variances[self.variances > 0]
        wide = len(spread) > 0 and spread.max() > 1e3 * np.median(spread)
        return torch.float64 if wide else torch.float32

    @property
    def side(self) -> int:
        """Number of features."""
        return int(self.inputs.shape[1])

    @property
    def mean(self) -> Float:
        """The mean of the samples, in their own units."""
        return np.asarray(self._center.cpu().numpy())

    def _chunk(self, part: Tensor) -> Tensor:
        """Return some samples, centred and in units."""
        some = self.inputs[part].to(self.where)
        centered = some.to(self.precision) - self._center.to(self.precision)
        return (
            centered if self.units is None else centered / torch.as_tensor(self.units).to(centered)
        )

    def chunks(self) -> Iterator[Tensor]:
        """Yield the centred samples, some at a time."""
        return (self._chunk(part) for part in torch.split(self.rows, CHUNK))

    def times(self, vectors: Tensor) -> Tensor:
        """Return the covariance times some vectors (D, k)."""
        product, cast = torch.zeros_like(vectors), vectors.to(self.precision)
        for chunk in self.chunks():
            product += chunk.T @ (chunk @ cast)
        return product / len(self.rows)

    def leading(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the largest eigenvalues (r,), rising, and their vectors (D, r)."""
        width = min(rank + OVERSAMPLING, self.side)
        source = torch.Generator().manual_seed(0)
        drawn = torch.randn(self.side, width, generator=source, dtype=torch.float64)
        block = torch.linalg.qr(drawn.to(self.where))[0]
        basis, images = block, self.times(block)
        for _ in range(MOST_PRODUCTS):
            projected = basis.T @ images
            values, turned = torch.linalg.eigh((projected + projected.T) / 2)
            best = turned[:, -rank:]
            vectors = basis @ best
            wrong = (images @ best - vectors * values[-rank:]).norm(dim=0)
            # Rounding of the largest eigenvalue is no fault of the smaller ones' vectors.
            rounding = 10 * torch.finfo(self.precision).eps * float(values[-1])
            close = wrong <= (TOLERANCE * values[-rank:]).clamp_min(rounding)
            if basis.shape[1] >= self.side or bool(close.all()):
                break
            if basis.shape[1] > max(KEPT, 3 * width) - width:
                keep = turned[:, -width:]
                basis, images = basis @ keep, images @ keep
                block_image = images - basis * values[-width:]
            else:
                block_image = images[:, -width:]
            fresh = _orthonormal(block_image[:, : self.side - basis.shape[1]], basis)
            basis = torch.cat([basis, fresh], dim=1)
            images = torch.cat([images, self.times(fresh)], dim=1)
        return values[-rank:], vectors

    def residual_squares(self, vectors: Tensor) -> float:
        """Return ``|R|_F^2``, R the covariance without its part along eigenvectors (D, r)."""
        count, cast = len(self.rows), vectors.to(self.precision)
        if count <= self.side:
            return self._squares_by_samples(cast) / count**2
        return self._squares_by_features(cast) / count**2

    def _rest(self, part: Tensor, vectors: Tensor) -> Tensor:
        chunk = self._chunk(part)
        return chunk - (chunk @ vectors) @ vectors.T

    def _squares_by_samples(self, vectors: Tensor) -> float:
        """Return the squares of the Gram matrix, of which half is computed."""
        total, parts = 0.0, torch.split(self.rows, CHUNK)
        for i, first in enumerate(parts):
            one = self._rest(first, vectors)
            for j in range(i, len(parts)):
                other = one if j == i else self._rest(parts[j], vectors)
                total += (1 if j == i else 2) * _squares(one @ other.T)
        return total

    def _squares_by_features(self, vectors: Tensor) -> float:
        """Return the squares of n times the residual, a few rows of its upper half at a time."""
        total = 0.0
        for start in range(0, self.side, CHUNK):
            stop = min(start + CHUNK, self.side)
            rows = vectors.new_zeros(stop - start, self.side - start)
            for part in torch.split(self.rows, CHUNK):
                rest = self._rest(part, vectors)[:, start:]
                rows += rest[:, : stop - start].T @ rest
            total += _squares(rows[:, : stop - start]) + 2 * _squares(rows[:, stop - start :])
        return total


def factor_samples(covariance: SampleCovariance, rank: int) -> tuple[Float, Float, float]:
    """Return the factor (D, r), the residual deviations (D,) and the trace of a covariance.

    The same as `gems_flwr.moments.low_rank.factor` within rounding, signs of columns apart.

    Parameters
    ----------
    covariance : SampleCovariance
        Of at least one sample.
    rank : int
        From 0 to the number of features.
    """
    variances = covariance.variances
    trace = float(variances.sum())
    if rank == 0 or trace <= 0:
        vectors = torch.zeros(covariance.side, 0, dtype=torch.float64)
        vectors, values = vectors.to(covariance.where), torch.zeros(0)
        top = np.zeros((covariance.side, rank))
    else:
        values, vectors = covariance.leading(rank)
        top = (vectors * values.clamp_min(0).sqrt()).cpu().numpy()
    residual = covariance.residual_squares(vectors)
    diagonal = np.maximum(variances - (top**2).sum(axis=1), 0)
    # Below rounding there is no residual to speak of, and nothing to inflate.
    if residual <= 1e-20 * (residual + float((values**2).sum())):
        return top, np.sqrt(diagonal), trace
    squared = max(float((diagonal**2).sum()), 1e-300)
    return top, np.sqrt(diagonal * max(1.0, residual / squared)), trace


def _orthonormal(block: Tensor, basis: Tensor) -> Tensor:
    """Return an orthonormal basis of a block's part outside another; twice is enough (Kahan)."""
    for _ in range(2):
        block = torch.linalg.qr(block - basis @ (basis.T @ block))[0]
    return block


def _squares(matrix: Tensor) -> float:
    return float((matrix.double() ** 2).sum() if matrix.numel() else 0.0)
