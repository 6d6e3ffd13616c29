"""SECURITY.md claims nothing that no test or study of this repository shows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = [
    line.split("|")[1:3]
    for line in (ROOT / "SECURITY.md").read_text().splitlines()
    if re.match(r"\| .*tests/", line)
]


def test_every_claim_of_protection_names_what_shows_it():
    text = (ROOT / "SECURITY.md").read_text()
    section = text.partition("## What is protected")[2].partition("## What is not")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    # Each of the tables has a head and a line below it.
    assert len(CLAIMS) == len(rows) - 2 * section.count("| claim |")
    assert len(CLAIMS) >= 15


@pytest.mark.parametrize(("claim", "shown_by"), CLAIMS, ids=[c.strip()[:40] for c, _ in CLAIMS])
def test_what_shows_a_claim_exists(claim, shown_by):
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", shown_by):
        assert (ROOT / path).is_file(), f"{path} is gone: {claim}"
        names = {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
        assert names
        assert not name or name in names, f"{path} has no {name}: {claim}"
