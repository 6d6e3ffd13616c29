"""No node ends a run: every strategy, with one or two of five nodes that send anything.

Each case is a whole run, with or without files, on a grid that knows its nodes or not. Whatever the
hostile nodes send, the run ends as it should: nobody honest is lost, a refused node is named with a
reason, everything is finite. And where nothing that they sent was used, the result is that of the
honest nodes alone, bit for bit. Some hundred cases in ``make test``, some thousand in
``make test-deep``, and 20,000 with ``GEMS_FLWR_NIGHTLY=1``.
"""

import functools
import logging
import shutil

import numpy as np
import pytest
from helpers_battery import Played, check, lie_of
from helpers_grids import Nameless
from helpers_learners import StopAfter
from helpers_lies import some_lie
from helpers_patience import patience
from helpers_scenarios import MASKED, NODES, SCENARIOS
from helpers_sizes import NIGHTLY, sizes

from conftest import record_equal
from gems_flwr import InProcessGrid

ALL = SCENARIOS | MASKED
CASES = 20_000 // len(SCENARIOS) + 1 if NIGHTLY else 60


@pytest.fixture(autouse=True)
def silence():
    """Lines by the thousand would only fill the memory."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@functools.cache
def alone(name, partitions):
    return Played(name, dict.fromkeys(partitions))


def play(name, case, folder):
    """Play one case: who lies, how, and in which surroundings follows from its number."""
    rng = np.random.default_rng([case, *name.encode()])
    partitions = (1, 3) if rng.random() < 0.3 else (1,)
    seeds = rng.integers(2**31, size=len(partitions))
    lies = {p: lie_of(some_lie, seed) for p, seed in zip(partitions, seeds, strict=True)}
    named = bool(rng.random() < 0.6)
    folder = folder / str(case) if rng.random() < 0.4 else None
    played = Played(name, lies, folder=folder, named=named)
    check(played, alone(name, partitions) if named else None)
    if folder is None:
        return
    assert not (folder / "inbox").exists()
    scenario = played.scenario
    resumed = scenario.strategy(folder).start(
        played.grid, scenario.initial(), num_rounds=scenario.rounds, resume=True
    )
    assert resumed.history == played.result.history


@sizes(8, CASES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_node_ends_a_run(name, tmp_path, cases):
    position = list(SCENARIOS).index(name)
    failed = []
    for case in range(position, cases * len(SCENARIOS), len(SCENARIOS)):
        try:
            with patience(f"{name}, case {case}"):
                play(name, case, tmp_path)
        except Exception as error:
            failed.append(f"case {case}: {type(error).__name__}: {str(error)[:300]}")
        shutil.rmtree(tmp_path / str(case), ignore_errors=True)
    if failed:
        pytest.fail(f"{len(failed)} cases of '{name}':\n" + "\n".join(failed[:20]))


class Backwards(InProcessGrid):
    """Replies come in another order than the messages went out."""

    def collect(self, message_ids, *, timeout):
        yield from list(super().collect(message_ids, timeout=timeout))[::-1]


def outcome(result):
    """Return what a run has found, but for how long it took."""
    return {**result.details, "intersection_seconds": None}, [
        (record.round, record.nodes_answered, record.train_metrics, record.evaluate_metrics)
        for record in result.history
    ]


@pytest.mark.parametrize("name", ALL)
def test_a_run_killed_after_any_round_goes_on_to_the_last_bit_whoever_replies_first(name, tmp_path):
    """The nodes of the killed run go on with what they keep; those of the unbroken one are new.

    Nor does it matter whether the grid knows their names, or they say them only when asked.
    """
    scenario = ALL[name]

    def play(folder, grid, resume=False, **options):
        strategy = scenario.strategy(tmp_path / folder, **options)
        start, rounds = scenario.initial(), scenario.rounds
        return strategy.start(grid, start, num_rounds=rounds, resume=resume)

    whole = play("whole", Backwards(scenario.app(), NODES))
    for after in range(1, whole.history[-1].round):
        grid = InProcessGrid(scenario.app(), NODES)
        with pytest.raises(KeyboardInterrupt):
            play(str(after), grid, callbacks=[StopAfter(after)])
        resumed = play(str(after), grid, resume=True)
        assert record_equal(resumed.arrays, whole.arrays)
        assert outcome(resumed) == outcome(whole)
    assert record_equal(play("unknown", Nameless(scenario.app(), NODES)).arrays, whole.arrays)
