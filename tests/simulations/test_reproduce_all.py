"""``all`` runs what is missing, the shortest first; minutes are those of this machine."""

import io
import json
import multiprocessing
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from simulations.command_line import UsageError
from simulations.reproduce import __main__ as command
from simulations.reproduce import estimates, ledger
from simulations.reproduce.catalogue import CATALOGUE
from simulations.reproduce.entry import Options
from simulations.reproduce.run_missing import in_order, print_status, run_missing

QUIET = Console(quiet=True)


@dataclass
class Toy:
    """An entry that writes the findings of a paper's, or fails."""

    name: str
    minutes: float
    breaks: BaseException | None = None
    failures: int = 0
    seeds: int = 3
    quick_minutes: float | None = None
    in_processes: bool = True
    about: str = "A toy."
    paper: str = "Toys 2026"
    where: str = ""
    log: list = field(default_factory=list)

    def check(self, options):
        if options.dataset:
            raise UsageError(f"{self.name} has no other data")

    def run(self, options, console):
        self.log.append(self.name)
        if self.breaks:
            raise self.breaks
        name = ledger.key(self, options)
        (options.output / name).mkdir(parents=True, exist_ok=True)
        found = {
            "seeds": list(range(options.seeds or self.seeds)),
            "failures": ["run"] * self.failures,
            "made": {"minutes": self.minutes, "jobs": 2},
        }
        (options.output / name / f"{name}.json").write_text(json.dumps(found))
        return self.failures


def go(entries, options, console=QUIET):
    return run_missing(entries, options, console, lambda entry, own: entry.run(own, console))


@pytest.fixture(autouse=True)
def as_quick_as_there(monkeypatch):
    monkeypatch.setattr(estimates, "training_seconds", lambda: estimates.PUBLISHED_SECONDS)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


# --- all ----------------------------------------------------------------------------------------


def test_the_shortest_comes_first_and_what_is_done_is_left_out(tmp_path):
    log = []
    entries = [Toy(name, minutes, log=log) for name, minutes in (("c", 9), ("a", 1), ("b", 4))]
    entries[2].run(Options(tmp_path), QUIET)
    log.clear()
    assert go(entries, Options(tmp_path)) == 0
    assert log == ["a", "c"]
    assert go(entries, Options(tmp_path)) == 0
    assert log == ["a", "c"]


def test_fewer_seeds_than_asked_for_are_not_done(tmp_path):
    entry = Toy("a", 1)
    entry.run(Options(tmp_path, seeds=1), QUIET)
    assert ledger.state(entry, Options(tmp_path, seeds=1)) == ledger.DONE
    assert ledger.state(entry, Options(tmp_path)) == ledger.MISSING
    assert ledger.state(entry, Options(tmp_path, quick=True)) == ledger.MISSING


def test_a_failure_does_not_stop_the_others_and_is_tried_again(tmp_path):
    log = []
    broken = Toy("broken", 1, breaks=RuntimeError("[no] disk"), log=log)
    half = Toy("half", 2, failures=3, log=log)
    entries = [broken, half, Toy("fine", 3, log=log)]
    console = Console(file=io.StringIO(), width=80)
    assert go(entries, Options(tmp_path), console) == 2
    assert log == ["broken", "half", "fine"]
    said = console.file.getvalue()
    assert "RuntimeError: [no] disk" in said
    assert "3 runs failed" in said
    states = [ledger.state(each, Options(tmp_path)) for each in entries]
    assert states == [ledger.FAILED, ledger.FAILED, ledger.DONE]
    broken.breaks, half.failures = None, 0
    assert go(entries, Options(tmp_path)) == 0
    assert log[3:] == ["broken", "half"]


def _until_killed(folder):
    first = Toy("a", 1)
    second = Toy("b", 2)
    second.run = lambda options, console: os.kill(os.getpid(), signal.SIGKILL)
    go([first, second], Options(Path(folder)))


def test_killed_and_started_again_it_goes_on(tmp_path):
    """The first is done, the second was being run: it alone is run again."""
    process = multiprocessing.get_context("fork").Process(target=_until_killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    log = []
    entries = [Toy("a", 1, log=log), Toy("b", 2, log=log)]
    options = Options(tmp_path)
    assert [ledger.state(e, options) for e in entries] == [ledger.DONE, ledger.INTERRUPTED]
    assert go(entries, options) == 0
    assert log == ["b"]


def test_what_another_process_is_at_is_left_to_it(tmp_path):
    entry, options = Toy("a", 1), Options(tmp_path)
    ledger.note(entry, options, ledger.RUNNING)  # by this process, which lives
    assert ledger.state(entry, options) == ledger.RUNNING
    assert in_order([entry], options) == []


def test_a_study_is_done_when_it_ended_and_gets_no_option_that_it_does_not_have(tmp_path):
    study = Toy("s", 1, in_processes=False, seeds=1)
    seen = []
    assert (
        run_missing(
            [study], Options(tmp_path, jobs=2, seeds=3), QUIET, lambda e, own: seen.append(own) or 0
        )
        == 0
    )
    assert (seen[0].jobs, seen[0].seeds) == (None, None)
    assert ledger.state(study, Options(tmp_path)) == ledger.DONE


def test_what_cannot_be_run_as_asked_is_left_out_and_named(tmp_path):
    console = Console(file=io.StringIO(), width=80)
    log = []
    assert go([Toy("a", 1, log=log)], Options(tmp_path, dataset="digits"), console) == 0
    assert not log
    assert "left out" in console.file.getvalue()


def test_the_status_says_what_is_done_what_is_to_come_and_how_long_is_left(tmp_path):
    entries = [Toy("a", 30), Toy("b", 60), Toy("c", 120)]
    entries[0].run(Options(tmp_path), QUIET)
    ledger.note(entries[1], Options(tmp_path), ledger.RUNNING)
    console = Console(file=io.StringIO(), width=80)
    print_status(entries, Options(tmp_path), console)
    rows = dict(
        line.split()[:2]
        for line in console.file.getvalue().splitlines()
        if line[:2] in ("a ", "b ", "c ")
    )
    assert rows == {"a": "done", "b": "running", "c": "to"}
    assert "Left: about 3.0 hours" in console.file.getvalue()


def test_the_command_runs_all_that_is_missing(monkeypatch, tmp_path):
    log = []
    for name in [*CATALOGUE]:
        monkeypatch.delitem(CATALOGUE, name)
    for name, minutes in (("b", 2), ("a", 1)):
        monkeypatch.setitem(CATALOGUE, name, Toy(name, minutes, log=log))
    assert command.main(["all", "--output", str(tmp_path)]) == 0
    assert log == ["a", "b"]
    assert command.main(["all", "--status", "--output", str(tmp_path)]) == 0
    monkeypatch.setitem(CATALOGUE, "s", Toy("s", 3, in_processes=False, log=log))
    assert command.main(["s", "--output", str(tmp_path)]) == 0
    assert command.main(["all", "--output", str(tmp_path)]) == 0
    assert log == ["a", "b", "s"]  # a study that was run by its name is done, too
    monkeypatch.setitem(CATALOGUE, "c", Toy("c", 3, failures=1))
    assert command.main(["all", "--output", str(tmp_path)]) == 1


# --- the estimate -------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2])
def test_a_machine_twice_as_slow_doubles_the_estimate(factor, monkeypatch, tmp_path):
    seconds = factor * estimates.PUBLISHED_SECONDS
    monkeypatch.setattr(estimates, "training_seconds", lambda: seconds)
    estimate = estimates.estimate_here(tmp_path, CATALOGUE.values())
    assert estimate.minutes(Toy("a", 10), Options(tmp_path)) == pytest.approx(10 * factor)
    assert f"× {factor}, this machine's factor (from a short training" in str(estimate)


def test_what_is_finished_here_counts_for_more_than_a_short_training(monkeypatch, tmp_path):
    """Published: 20 minutes for 5 seeds. Here: 12 minutes for one seed, three times as slow."""
    monkeypatch.setattr(estimates, "_made", lambda name: (20.0, 5) if name == "a" else None)
    entry = Toy("a", 1, seeds=5)
    Toy("a", 12).run(Options(tmp_path, seeds=1), QUIET)
    estimate = estimates.estimate_here(tmp_path, [entry, Toy("b", 1)])
    assert estimate.factor == pytest.approx(3)
    assert estimate.minutes(entry, Options(tmp_path)) == pytest.approx(60)
    assert "finished in" in str(estimate)


def test_one_process_takes_twice_as_long_as_two_and_quick_has_minutes_of_its_own(tmp_path):
    estimate = estimates.Estimate(1.0, "")
    entry = Toy("a", 10, quick_minutes=4)
    assert estimate.minutes(entry, Options(tmp_path, jobs=1)) == pytest.approx(20)
    assert estimate.minutes(entry, Options(tmp_path, jobs=8)) == pytest.approx(10)  # two cores
    assert estimate.minutes(entry, Options(tmp_path, seeds=6)) == pytest.approx(20)
    assert estimate.minutes(entry, Options(tmp_path, quick=True, jobs=1)) == pytest.approx(4)
    unknown = Toy("a", 60)  # not measured: the promise that all keep
    assert estimate.minutes(unknown, Options(tmp_path, quick=True, jobs=1)) == pytest.approx(5)
    study = Toy("s", 10, in_processes=False)
    assert estimate.minutes(study, Options(tmp_path)) == pytest.approx(10)


def test_minutes_of_kept_findings_count_for_more_than_those_of_the_catalogue(monkeypatch, tmp_path):
    (tmp_path / "a.json").write_text('{"seeds": [0, 1, 2], "made": {"minutes": 30}}')
    monkeypatch.setattr(estimates, "MEASURED", tmp_path)
    estimates._made.cache_clear()
    try:
        assert estimates.published_minutes(Toy("a", 10, seeds=3)) == 30
        assert estimates.published_minutes(Toy("a", 10, seeds=6)) == 60
        assert estimates.published_minutes(Toy("b", 10)) == 10
    finally:
        estimates._made.cache_clear()


def test_the_timed_training_is_short():
    assert 0 < estimates._train() < 10


@pytest.mark.parametrize(
    ("minutes", "words"),
    [
        (0.3, "less than a minute"),
        (1.2, "about a minute"),
        (25.2, "about 25 minutes"),
        (120, "about 2.0 hours"),
    ],
)
def test_lengths_in_words(minutes, words):
    assert estimates.in_words(minutes) == words
