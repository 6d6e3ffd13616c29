"""Every claim of SECURITY.md names tests or a study of this repository."""

import re
import stat
from pathlib import Path

import pytest
from helpers_gems import linear_app, run
from helpers_learners import StopAfter

from gems_flwr import Gems
from gems_flwr.node.limits import UNLIMITED

ROOT = Path(__file__).resolve().parents[2]


def test_every_claim_of_protection_names_tests_that_exist():
    text = (ROOT / "SECURITY.md").read_text()
    protected = text.partition("## What is protected")[2].partition("## What is not")[0]
    claims = re.split(r"\n- ", protected)[1:]
    assert len(claims) >= 15
    for claim in claims:
        shown_by = re.findall(r"`(tests/[\w/.]+)`", claim.partition("*Shown by*")[2])
        assert shown_by, claim
        assert [path for path in shown_by if not (ROOT / path).exists()] == []


def test_what_nodes_sent_is_for_the_owner_alone(tmp_path):
    """Of a run that stopped after the spaces: its checkpoint, and the folder of spaces."""
    app = linear_app(limits=UNLIMITED)
    with pytest.raises(KeyboardInterrupt):
        run(Gems(checkpoint_dir=tmp_path, callbacks=[StopAfter(1)], refine=2), app)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    assert modes["spaces"] == 0o700
    assert modes["checkpoint.safetensors"] == 0o600
    assert [stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "spaces").iterdir()] == [0o600] * 2
