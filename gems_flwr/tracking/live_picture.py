"""A run in the terminal, drawn from `live_state`: rounds, nodes, bytes, the score's course.

It fits the terminal that it is drawn in: narrow ones have fewer columns, low ones fewer rounds, and
a thousand nodes take one line as ten do. Names and reasons come from nodes: they are text, never
markup, and are cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.cells import set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from gems_flwr.tracking.live_state import Kind, LiveState, Row

KINDS: tuple[Kind, ...] = ("loss", "score")
_BARS = "▁▂▃▄▅▆▇█"
_LABEL = 10
# For terminals that know no others.
_PLAIN_SIGNS = str.maketrans({"–": "-", "·": "|", "…": "~", "→": ">"})
# Lines of the picture that are not rounds, and the rounds that are always there.
_OTHER_LINES, _FEWEST_ROWS, _MOST_ROWS = 11, 3, 10


class LivePicture:
    """What `rich` draws of a state.

    Parameters
    ----------
    state : LiveState
        The run so far.
    """

    def __init__(self, state: LiveState) -> None:
        self.state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw what there is, as wide and as high as the terminal."""
        plain = options.ascii_only or options.legacy_windows
        parts = self._parts(console.height, options.max_width, plain)
        if not plain:
            yield from parts
            return
        for segment in console.render(Group(*parts), options):
            yield Segment(ascii_text(segment.text), segment.style, segment.control)

    def _parts(self, height: int, width: int, plain: bool) -> Iterator[RenderableType]:
        state = self.state
        yield Text(cut(state.title, width), style="bold")
        yield _progress(state, width)
        rows = max(min(height - _OTHER_LINES, _MOST_ROWS), _FEWEST_ROWS)
        if state.rows:
            yield _table(state, list(state.rows)[-rows:], width)
        if followed := state.followed("score") or state.followed("loss"):
            yield _course(followed, state.series[followed][2], width, plain)
        if state.models:
            each = " · ".join(f"{name} {value:.4f}" for name, value in state.models.items())
            yield Text(cut(f"{'models':<{_LABEL}}{each}", width))
        if state.ended is None:
            yield _nodes(state, width, plain)
        sums = f"{amount(state.bytes_up)} up · {amount(state.bytes_down)} down"
        yield Text(cut(f"{'bytes':<{_LABEL}}{sums}", width))
        if state.trouble:
            number, reasons = state.trouble
            for position, (why, count, node) in enumerate(reasons):
                name = cut(node, 24)
                who = f"node {name}" if count == 1 else f"{count} nodes ({name}, …)"
                label = "left out" if position == 0 else ""
                said = f"{label:<{_LABEL}}round {number}, {who}: {why}"
                yield Text(cut(said, width), style="yellow")


def _progress(state: LiveState, width: int) -> Table:
    total = "?" if state.rounds is None else str(state.rounds)
    if state.ended is not None:
        times = f"{clock(state.elapsed)}, {state.ended}"
    elif state.seconds_left is None:
        times = clock(state.elapsed)
    else:
        times = f"{clock(state.elapsed)}, about {clock(state.seconds_left)} left"
    rounds = f"round {max(state.finished, state.exchange_round)} of {total}"
    bar = max(min(30, width - len(rounds) - len(times) - 4), 4)
    grid = Table.grid(padding=(0, 1))
    for _ in range(3):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    # Rich makes a bar without a total of moving stripes; a run that is over has a full one.
    done = state.finished if state.rounds else 0
    whole = state.rounds or 1
    grid.add_row(
        Text(rounds),
        ProgressBar(total=whole, completed=done, width=bar, complete_style="green"),
        Text(cut(times, width)),
    )
    return grid


def _table(state: LiveState, rows: Sequence[Row], width: int) -> Table:
    columns = {
        "round": [str(row.round) for row in rows],
        "answered": [f"{row.answered}/{row.asked}" for row in rows],
        "left out": [str(row.left_out or "–") for row in rows],
        "up": [amount(row.bytes_up) for row in rows],
        "down": [amount(row.bytes_down) for row in rows],
        "seconds": [duration(row.seconds) for row in rows],
    }
    for kind in KINDS:
        if name := state.followed(kind):
            columns[cut(name, 18)] = [digits(row.numbers.get(name)) for row in rows]
    shown = {name: cells for name, cells in columns.items() if {*cells} != {"–"}}
    # What a narrow terminal can do without, in this order.
    for least in ("seconds", "down", "answered", "up"):
        if sum(max(map(len, (name, *cells))) + 2 for name, cells in shown.items()) > width:
            shown.pop(least, None)
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _course(name: str, values: Sequence[float], width: int, plain: bool) -> Text:
    ends = f"{digits(values[0])} → {digits(values[-1])}" if len(values) > 1 else digits(values[-1])
    label = f"{cut(name, 17):<{_LABEL}} " if len(name) >= _LABEL else f"{name:<{_LABEL}}"
    room = max(min(40, width - len(label) - len(ends) - 2), 0)
    line = "" if plain else sparkline(values, room)
    return Text.assemble(label, (line, "green"), "  " * bool(line), ends)


def _nodes(state: LiveState, width: int, plain: bool) -> Text:
    waiting = max(state.asked - state.answered - state.failed, 0)
    label = f"{'nodes':<{_LABEL}}"
    if not state.asked:
        return Text(f"{label}nobody is asked at the moment", style="dim")
    counts = f"{state.answered} answered · {waiting} waiting"
    counts += f" · {state.failed} failed" if state.failed else ""
    room = max(min(40, width - len(label) - len(counts) - 2), 0)
    marks = "#x." if plain else "●✗·"
    parts = shares((state.answered, state.failed, waiting), room)
    dots = [
        (mark * part, style)
        for mark, part, style in zip(marks, parts, ("green", "red", "dim"), strict=True)
    ]
    return Text.assemble(label, *dots, "  ", counts)


def shares(counts: Sequence[int], room: int) -> list[int]:
    """Return how many signs each count gets: one for each node, or fewer where there is no room.

    Whatever is there keeps a sign: one that failed among a thousand can be seen.
    """
    total = sum(counts)
    if total <= room:
        return list(counts)
    if room < len(counts):
        return [0] * len(counts)
    parts = [max(round(count * room / total), 1) if count else 0 for count in counts]
    parts[parts.index(max(parts))] += room - sum(parts)
    return parts


def sparkline(values: Sequence[float], width: int) -> str:
    """Return numbers as a line of bars; of many, the last in each of `width` equal parts."""
    known = [value for value in values if math.isfinite(value)]
    if not known or width < 1:
        return ""
    if len(known) > width:
        known = [known[(i + 1) * len(known) // width - 1] for i in range(width)]
    low, high = min(known), max(known)
    if high == low:
        return _BARS[3] * len(known)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in known)


def amount(size: float) -> str:
    """Return a number of bytes as a person reads it: three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def duration(seconds: float) -> str:
    """Return the seconds of a round, or a clock's time where they are many."""
    return f"{seconds:.{3 if seconds < 0.1 else 2}f}" if seconds < 1000 else clock(seconds)


def clock(seconds: float) -> str:
    """Return a duration: ``8 s``, ``2:05`` or ``1:02:05``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def digits(value: float | None) -> str:
    """Return a metric in a few digits."""
    if value is None:
        return "–"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"


def cut(text: str, width: int) -> str:
    """Return text that is at most so wide, with a sign where something is missing."""
    if len(text) <= width // 2:
        return text  # the widest characters take two cells
    short = set_cell_size(text, width)
    if short.rstrip() == text.rstrip():
        return text.rstrip()
    return set_cell_size(text, max(width - 1, 0)).rstrip() + "…"


def ascii_text(text: str) -> str:
    """Return text for a terminal or a log that knows ASCII alone."""
    return text.translate(_PLAIN_SIGNS).encode("ascii", "replace").decode()
