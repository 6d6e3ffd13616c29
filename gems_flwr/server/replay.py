"""Whose reply it was, where using the replies of a round fails in a way that nobody foresaw.

Replies are checked one by one as they come in, and limits are meant to keep out whatever cannot be
used together with others (see `gems_flwr.bounds`). If a round fails all the same, its replies lie
on disk, and a resumed run would use them again and fail again. So the round is played once more
from what was kept, without one node after the other, then without any two: where that helps, those
are left out by name, and the run goes on.

Errors that are no reply's doing are raised as they are: those that say so (too few nodes, an
impossible option, a full disk), and those that come whoever is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar

from gems_flwr.errors import GemsError, describe_fault
from gems_flwr.server.exchange import Exchange
from gems_flwr.server.log import log_warning

# All nodes, and all pairs of up to ten; a round is not played again more often than that.
MOST_TRIALS = 64

T = TypeVar("T")


def play_despite_replies(
    play: Callable[[Mapping[int, str]], T], exchange: Callable[[], Exchange]
) -> T:
    """Play a round; if that fails for no known reason, play it without those who make it fail.

    Parameters
    ----------
    play : callable
        Gets nodes that are to be left out, by id, and why; plays the round.
    exchange : callable
        Returns the messages of the round that was played last.
    """
    try:
        return play({})
    except (GemsError, OSError, MemoryError):
        raise
    except Exception as error:
        fault = describe_fault(error)
        first = exchange()
        answered, refused = first.answered_ids, first.refused
        log_warning("round_broke", reason=fault, suspects=len(answered))
        trials = itertools.chain(
            itertools.combinations(answered, 1), itertools.combinations(answered, 2)
        )
        for barred in itertools.islice(trials, MOST_TRIALS):
            reason = f"the round can be played without this reply, and with it fails: {fault}"
            try:
                # Who was refused before stays out: asked again, it might answer something else.
                outcome = play({**refused, **dict.fromkeys(barred, reason)})
            except Exception:  # not these, then, or not these alone
                continue
            for node in barred:
                log_warning("left_out", node=first.nodes.name(node), reason=reason)
            return outcome
        raise
