"""The run's log: one line per event, as ``key=value`` pairs that a person and a program can read.

``event=reply round=3 node=hospital-2 what=train bytes=31744 seconds=4.1``. The lines go to a child
of Flower's logger, so they appear where an operator already looks. Around them stand the lines that
a Flower user knows: what was started, round by round, and the result at the end.

Flower logs whatever a ServerApp raises with its traceback. Errors of ours say who or what is at
fault and what to do, so of those one line is kept; the level DEBUG (``FLWR_LOG_LEVEL``) shows all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from gems_flwr.bounds import MAX_REASON_CHARACTERS
from gems_flwr.errors import GemsError

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
    """Log lines for people."""
    for line in lines:
        logger.info("%s", line)


def is_heard() -> bool:
    """Whether anybody reads what is logged: most simulations are quiet."""
    return logger.isEnabledFor(logging.INFO)


def log_warning(event: str, /, **fields: object) -> None:
    """Log an event that an operator should look at."""
    logger.warning("%s", _line(event, fields))


def without_clashes(
    fields: Mapping[str, object], metrics: Mapping[str, object]
) -> dict[str, object]:
    """Return fields and metrics together; a metric that is called like a field gets a prefix.

    Metrics have the names that nodes give them; none may pass for a field of ours.
    """
    taken = {"event", *fields}
    return {**fields, **{f"metric.{k}" if k in taken else k: v for k, v in metrics.items()}}


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
