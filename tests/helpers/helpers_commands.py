"""Commands of the simulations, called in this process."""

import contextlib
import logging
import sys

import simulations.run


def run_command(tmp_path, monkeypatch, capsys):
    """Return ``python -m simulations.run`` as a function that returns its status and its words."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["simulations.run", *words])
        with same_logging():
            status = simulations.run.main()
        return status, capsys.readouterr().err

    return call


@contextlib.contextmanager
def same_logging():
    """Undo what Hydra does to the loggers of a process that has other things to do afterwards."""
    names = [None, *logging.root.manager.loggerDict]
    loggers = [logging.getLogger(name) for name in names]
    before = [(each.disabled, each.level, each.propagate, each.handlers[:]) for each in loggers]
    try:
        yield
    finally:
        for each, (disabled, level, propagate, handlers) in zip(loggers, before, strict=True):
            each.disabled, each.propagate, each.handlers = disabled, propagate, handlers
            each.setLevel(level)
