"""How much of a test runs when: some in ``make test``, more in ``make test-deep``, all by night."""

from __future__ import annotations

import os

import pytest

# By night there is time for what takes hours: GEMS_FLWR_NIGHTLY=1 make test-deep.
NIGHTLY = os.environ.get("GEMS_FLWR_NIGHTLY") == "1"


def sizes(some: int, many: int) -> pytest.MarkDecorator:
    """Give a test `cases`: some, and in the deep suite many."""
    deep = pytest.param(many, id="many", marks=pytest.mark.deep)
    return pytest.mark.parametrize("cases", [pytest.param(some, id="some"), deep])
