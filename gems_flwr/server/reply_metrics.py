"""The replies of a round as a function for metrics gets them: Flower's own, or a user's.

Such a function gets whole replies and the name of the metric that they are weighted by. Flower
ends the run if nodes do not all report the same metrics, and its own mean if lists are of different
lengths. Here such metrics are left out and the run goes on: one node must not end it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flwr.app import MetricRecord, RecordDict

from gems_flwr.averaging.means import metric_form
from gems_flwr.server.exchange import Answer
from gems_flwr.server.log import log_warning
from gems_flwr.typing import Metrics
from gems_flwr.wire.model_replies import MetricsReply, ModelReply
from gems_flwr.wire.quick_records import records_of

_LIST = "a list"


def comparable_contents(
    answers: Sequence[Answer[ModelReply] | Answer[MetricsReply]],
    weight_key: str,
    *,
    equal_lengths: bool,
) -> list[RecordDict]:
    """Return replies as they came, but for what cannot stand beside the others' metrics.

    Parameters
    ----------
    answers : sequence of Answer
        At least one.
    weight_key : str
        The metric that replies are weighted by. Where the run lets a node count for less than it
        claims, the reply says so.
    equal_lengths : bool
        Whether lists must be of one length, as for a mean.
    """
    left_out = _left_out(answers, equal_lengths)
    contents = []
    for answer in answers:
        content, weight = answer.value.content, answer.value.num_examples
        assert content is not None
        [(name, record)] = records_of(content, MetricRecord).items()
        if left_out or record[weight_key] != weight:
            kept = {key: value for key, value in record.items() if key not in left_out}
            content = RecordDict(dict(content))
            content[name] = MetricRecord({**kept, weight_key: weight})
        contents.append(content)
    return contents


def _left_out(
    answers: Sequence[Answer[ModelReply] | Answer[MetricsReply]], equal_lengths: bool
) -> set[str]:
    """Return the metrics that not all nodes have in one form, and log who differs from most."""
    told = {answer.node: answer.value.metrics for answer in answers}
    left_out, odd = dict[str, None](), dict[str, None]()
    for key in dict.fromkeys(key for metrics in told.values() for key in metrics):
        forms = {node: _form(metrics, key, equal_lengths) for node, metrics in told.items()}
        counts = Counter(forms.values())
        if len(counts) > 1:
            left_out[key] = None
            usual = counts.most_common(1)[0][0]
            odd |= dict.fromkeys(node for node, form in forms.items() if form != usual)
    if left_out:
        log_warning(
            "metrics_left_out",
            metrics=", ".join(left_out),
            nodes=", ".join(odd),
            reason="not all nodes report them in one form",
        )
    return set(left_out)


def _form(metrics: Metrics, key: str, equal_lengths: bool) -> str:
    value = metrics.get(key)
    return _LIST if isinstance(value, list) and not equal_lengths else metric_form(value)
