"""SECURITY.md claims nothing that no test or study of this repository shows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "SECURITY.md").read_text()
PROTECTED = TEXT.partition("## What is protected")[2].partition("## What is not")[0]
CLAIMS = [item.partition("*Shown by*") for item in re.split(r"\n- ", PROTECTED)[1:]]


def test_every_claim_of_protection_names_what_shows_it():
    assert len(CLAIMS) >= 15
    assert [claim for claim, _, shown_by in CLAIMS if "`tests/" not in shown_by] == []


@pytest.mark.parametrize("item", CLAIMS, ids=[claim.strip()[:40] for claim, _, _ in CLAIMS])
def test_what_shows_a_claim_exists(item):
    claim, _, shown_by = item
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", shown_by):
        assert (ROOT / path).is_file(), f"{path} is gone: {claim}"
        names = {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
        assert names
        assert not name or name in names, f"{path} has no {name}: {claim}"
