"""The run's log: one line per event, as ``key=value`` pairs that a person and a program can read.

``event=reply round=3 node=hospital-2 what=train bytes=31744 seconds=4.1``. The lines go to a child
of Flower's logger, so they appear where an operator already looks. Around them stand Flower's own.

Flower logs whatever a ServerApp raises with its traceback. Errors of ours say who or what is at
fault and what to do, so of those one line is kept; the level DEBUG (``FLWR_LOG_LEVEL``) shows all.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gems_flwr.bounds import MAX_REASON_CHARACTERS
from gems_flwr.errors import GemsError

if TYPE_CHECKING:
    from gems_flwr.core.run import RunResult

logger = logging.getLogger("flwr.gems")


class _OneLine(logging.Filter):
    """Says an error of ours in the log line itself, instead of a traceback below it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, GemsError) and not logger.isEnabledFor(logging.DEBUG):
            record.msg, record.args = "%s: %s", (record.getMessage(), error)
            record.exc_info = None
        return True


# Of Flower's own logger, through which it reports a ServerApp that failed.
logging.getLogger("flwr").addFilter(_OneLine("one-line-errors"))


def log_event(event: str, /, **fields: object) -> None:
    """Log an event and what belongs to it; text with blanks or quotes is quoted as in JSON."""
    if is_heard():
        logger.info("%s", _line(event, fields))


def log_text(*lines: str) -> None:
    """Log lines for people; what nodes have written, names as well, steers no terminal."""
    for line in lines:
        logger.info("%s", "\t".join(map(readable, line.split("\t"))))


def is_heard() -> bool:
    """Whether anybody reads what is logged: most simulations are quiet."""
    return logger.isEnabledFor(logging.INFO)


def log_warning(event: str, /, **fields: object) -> None:
    """Log an event that an operator should look at."""
    logger.warning("%s", _line(event, fields))


def readable(text: str, most: int = MAX_REASON_CHARACTERS) -> str:
    """Return what a node wrote as text that a log can take: cut, and without control characters."""
    cut = "".join(c if c.isprintable() or c == "\n" else "?" for c in text[:most])
    return cut + (f" … ({len(text):,} characters)" if len(text) > len(cut) else "")


def short(text: str, most: int = 300) -> str:
    """Return what a node wrote in one line that is not long: of a traceback what it ends with."""
    lines = [" ".join(line.split()) for line in readable(text).splitlines() if line.strip()]
    joined = " ".join(lines)
    if lines and (len(joined) > most or "Traceback" in joined):
        joined = lines[-1]
    return joined if len(joined) <= most else f"{joined[:most]} …"


def _line(event: str, fields: Mapping[str, object]) -> str:
    pairs = {"event": event, **fields}
    return " ".join(f"{_text(key)}={_text(value)}" for key, value in pairs.items())


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = readable(str(value))
    # Names and reasons come from nodes: quoted, they cannot forge a second pair or a second line.
    plain = text.isprintable() and not any(sign in text for sign in ' "=')
    return text if plain and text else json.dumps(text, ensure_ascii=False)


# --- what a person reads at the end -------------------------------------------------------------

# Most lines about single nodes; a federation of thousands has rounds.jsonl.
_MOST_NODES = 10
_VERDICTS = {
    "feasible": "yes",
    "incomplete": "yes, but for some classes no node sent anything",
    "empty": "no model is, which is proved; this one violates the spaces least",
    "undecided": "not decided; of the models found this one violates the spaces least",
}


def result_lines(result: RunResult) -> list[str]:
    """Return what a result says beyond Flower's own: cost, who was left out, scores."""
    rounds = [record for record in result.history if record.round]
    traffic = result.traffic
    sizes = f"{traffic.bytes_up:,} bytes up, {traffic.bytes_down:,} bytes down"
    lines = [f"Rounds: {len(rounds)}, {sizes}, ended because {result.stopped_because}"]
    times = Counter(failure.node for _, failure in result.failures)
    by_round = {f.node: f"{times[f.node]} ×: {f.reason}" for _, f in result.failures}
    why = {**result.details.get("left_out", {}), **by_round}
    left_out = [f"\tnode {node}, {short(str(reason))}" for node, reason in why.items()]
    lines += [f"Left out: {len(left_out) or 'none'}", *left_out[:_MOST_NODES]]
    if len(left_out) > _MOST_NODES:
        lines.append(f"\tand {len(left_out) - _MOST_NODES} more")
    if status := result.details.get("status"):
        lines.append(f"Good enough for every node: {_VERDICTS.get(status, status)}")
    if (bound := result.details.get("loss_bound")) is not None:
        loss = result.details["loss"]
        lines.append(f"Loss: {loss:.6g}, at most {bound:.3g} above that of the pooled optimum")
    if scores := result.details.get("node_scores"):
        each = ", ".join(f"{node}: {score:.4f}" for node, score in [*scores.items()][:_MOST_NODES])
        mean = sum(scores.values()) / len(scores)
        lines.append(f"Node scores: mean {mean:.4f} of {len(scores)}; {each}")
    return lines
