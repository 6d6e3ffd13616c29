"""Streams: nodes that see a mini-batch at a time and are judged before they learn from it.

- `config`: what a stream is made of, and its ranges.
- `drift`: when the concept changes, and how.
- `source`: which batch a node sees when.
- `learning`: one step per batch, with the loss measured before it.
"""

from simulations.streams.config import DriftConfig, StreamConfig
from simulations.streams.drift import Drift
from simulations.streams.learning import learn
from simulations.streams.source import BatchSource

__all__ = ["BatchSource", "Drift", "DriftConfig", "StreamConfig", "learn"]
