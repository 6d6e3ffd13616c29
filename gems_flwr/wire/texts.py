"""JSON that somebody else wrote."""

from __future__ import annotations

import json
from typing import Any

from gems_flwr.bounds import MAX_JSON_CHARACTERS
from gems_flwr.errors import BadReplyError
from gems_flwr.spaces.errors import shown


def read_json(text: object, key: str) -> dict[str, Any]:
    """Return the JSON object in a text of a reply.

    Parameters
    ----------
    text : object
        What the reply has under the key.
    key : str
        Name to blame in the error.

    Raises
    ------
    BadReplyError
        If it is no text, too long, no JSON, or no object.
    """
    if not isinstance(text, str) or len(text) > MAX_JSON_CHARACTERS:
        raise BadReplyError(f"'{key}' must hold a JSON text of at most {MAX_JSON_CHARACTERS:,}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        raise BadReplyError(f"'{key}' holds no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadReplyError(f"'{key}' must hold a JSON object, got {shown(value)}")
    return value
