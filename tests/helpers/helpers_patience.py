"""Waiting that a busy machine does not turn into a failure."""

from __future__ import annotations

import signal
from contextlib import contextmanager

# Against a hang alone: nothing that works takes as long, however busy the machine is.
HANG_SECONDS = 1800
# Of the processor's time, which does not pass faster because others are busy.
WORK_SECONDS = 60


@contextmanager
def patience(what: str):
    """Fail on an endless loop, and on a hang."""

    def late(signum, frame):
        raise AssertionError(f"no end of {what}")

    signals = (signal.SIGPROF, signal.SIGALRM)
    before = [signal.signal(each, late) for each in signals]
    signal.setitimer(signal.ITIMER_PROF, WORK_SECONDS)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
