"""The metrics of the nodes' own handlers, beside those of a strategy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from gems_flwr.averaging.means import mean_metrics
from gems_flwr.typing import Metrics


class Reported(Protocol):
    """What a handler reported; any reply that carries metrics."""

    @property
    def num_examples(self) -> float:
        """Samples that it trained on; 0 where it reported nothing."""

    @property
    def metrics(self) -> Metrics:
        """Its metrics."""


def mean_reports(
    reports: Iterable[Reported], without: Collection[str] = ()
) -> dict[str, float | list[float]]:
    """Return the mean of what handlers reported, weighted by their examples as in Flower.

    Parameters
    ----------
    reports : iterable of Reported
        One for each node; those of no examples are left out.
    without : collection of str
        Metrics that are told elsewhere.
    """
    told = [report for report in reports if report.num_examples > 0]
    if not told:
        return {}
    kept = [{k: v for k, v in report.metrics.items() if k not in without} for report in told]
    return mean_metrics(kept, [report.num_examples for report in told])


def beside(
    ours: Mapping[str, float], theirs: Metrics, reserved: Collection[str] = ()
) -> dict[str, float | list[int] | list[float]]:
    """Return a strategy's metrics and those of the handlers, each under its own name.

    A handler's metric that is called like one of the strategy's gets the prefix ``client/``.

    Parameters
    ----------
    ours, theirs : mapping from str to float, or list of float
        Metrics of the strategy, and of the handlers.
    reserved : collection of str
        Names that are the strategy's even if it does not tell them this time.

    Examples
    --------
    >>> beside({"models_up": 3}, {"train_loss": 0.5, "models_up": 1})
    {'train_loss': 0.5, 'client/models_up': 1, 'models_up': 3}
    """
    taken = {*ours, *reserved}
    named = {f"client/{key}" if key in taken else key: value for key, value in theirs.items()}
    return {**named, **ours}
