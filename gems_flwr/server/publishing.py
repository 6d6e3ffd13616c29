"""A model at every quorum: published while replies come in, better with each.

`Gems(publish_every=k)` makes a model as soon as `min_nodes` spaces are there, and again with every
k-th one that comes in. Each is what a run with exactly these nodes gives, to the last bit, and so
is the last one, with all nodes in it: spaces count in the order of names, whoever answers first.

Decided here: a model that is published is a model of some nodes, so what takes further exchanges
(an audit, a choice of heads) or hides single nodes (sums: two models in a row would tell the
difference) does not go with it. Time spent on a model is not the nodes' own: their timeout stands
still.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from safetensors.numpy import save_file

from gems_flwr.disk.files import replacing
from gems_flwr.errors import DiskError, OptionError, describe_fault
from gems_flwr.receipts import model_digest
from gems_flwr.server.exchange import Exchange
from gems_flwr.server.log import log_event, log_warning
from gems_flwr.server.settings import Callback
from gems_flwr.typing import Arrays
from gems_flwr.wire.space_replies import NodeSpace

FILE = "published.safetensors"

# Gets the spaces that are there, in order; returns the whole model.
MakeModel = Callable[[dict[str, NodeSpace]], Arrays]


@dataclass
class Publisher:
    """Publishes models, and remembers that it did.

    Parameters
    ----------
    every : int
        After how many further replies; 0 publishes nothing.
    at_least : int
        How many spaces the first model takes.
    folder : path, optional
        Where ``published.safetensors`` goes.
    callbacks : sequence of Callback
        Who hears of models.
    """

    every: int
    at_least: int
    folder: str | Path | None = None
    callbacks: Sequence[Callback] = ()
    _entries: list[dict[str, Any]] = field(default_factory=list, init=False)
    _began: float = field(default_factory=time.perf_counter, init=False)

    def begin(self) -> None:
        """Begin a round."""
        self._entries, self._began = [], time.perf_counter()

    @contextlib.contextmanager
    def listening(
        self, exchange: Exchange, unpack: Callable[[RecordDict], NodeSpace], make: MakeModel
    ) -> Iterator[None]:
        """Publish models of what comes in as long as the context lasts.

        Parameters
        ----------
        exchange : Exchange
            Of the round.
        unpack : callable
            Returns the space in a reply, or raises an error.
        make : callable
            Makes the model; if it raises an error, there is none to publish yet.
        """
        spaces: dict[int, NodeSpace] = {}

        def hear(reply: Message, waiting: int) -> None:
            try:
                spaces[reply.metadata.src_node_id] = unpack(reply.content)
            except Exception:  # judged, and named, when all are in
                return
            # With the last one comes the round's own model.
            if waiting and (len(spaces) - self.at_least) % self.every == 0:
                self._try(exchange, spaces, make)

        exchange.hears = hear if self.every else None
        try:
            yield
        finally:
            exchange.hears = None

    def _try(self, exchange: Exchange, spaces: Mapping[int, NodeSpace], make: MakeModel) -> None:
        there = [node for node in spaces if not exchange.nodes.has_left(node)]
        if len(there) < self.at_least:
            return
        ordered = sorted(there, key=exchange.nodes.position)
        by_name = {exchange.nodes.name(node): spaces[node] for node in ordered}
        try:
            arrays = make(by_name)
        except Exception as error:
            fault = describe_fault(error)
            log_warning("not_published", round=exchange.server_round, reason=fault)
            return
        self.publish(exchange, arrays, list(by_name))

    def publish(self, exchange: Exchange, arrays: Arrays, nodes: Sequence[str]) -> None:
        """Publish a model: to the file, to the log, and to whoever wants to hear of it."""
        if not self.every:
            return
        entry: dict[str, Any] = {
            "round": exchange.server_round,
            "nodes": len(nodes),
            "bytes_up": exchange.grid.total.bytes_up if exchange.grid else 0,
            "seconds": time.perf_counter() - self._began,
            "sha256": model_digest(arrays),
        }
        same = ("nodes", "sha256")
        if self._entries and all(self._entries[-1][key] == entry[key] for key in same):
            return  # what came last cannot be used
        self._entries.append(entry)
        if self.folder is not None:
            try:
                with replacing(Path(self.folder) / FILE, private=True) as temporary:
                    plain = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
                    save_file(plain, temporary)
            except DiskError as error:
                log_warning("not_published", round=exchange.server_round, reason=error)
        log_event("published", **entry)
        for callback in self.callbacks:
            callback.on_model(exchange.server_round, arrays, tuple(nodes))

    def details(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was published so far, as details of the run."""
        if not self.every:
            return {}
        return {"published": [*before.get("published", ()), *self._entries]}


def check_publishing(every: int, *, hidden: bool, asks_more: bool, fraction: float) -> None:
    """Refuse what no model can be published of before all have answered.

    Parameters
    ----------
    every : int
        After how many replies; 0 for never.
    hidden : bool
        Whether nothing but the total of all nodes may be seen.
    asks_more : bool
        Whether it takes further exchanges, or another epsilon, to make a model.
    fraction : float
        Share of the nodes that are asked.

    Raises
    ------
    OptionError
        Says why.
    """
    if every < 0:
        raise OptionError(f"publish_every must be at least 0, got {every}")
    if not every:
        return
    if hidden:
        raise OptionError(
            "publish_every goes without sums: two models in a row would show what one node added"
        )
    if asks_more:
        raise OptionError(
            "publish_every goes with neither audit, head='auto' nor on_empty='retrain', which ask "
            "the nodes again before there is a model"
        )
    if fraction < 1:
        raise OptionError("publish_every asks all nodes, also late ones: fraction_train must be 1")
