"""Accuracy, or error, over the course of a run: by round, and by the bytes sent so far.

Seeds are averaged round by round: the mean score after round r, at the mean number of bytes
sent by then. A stop rule ends seeds at different rounds; the mean covers only the rounds that
every seed has, because a mean over ever fewer seeds would jump where one drops out. So that what
seeds did beyond is not lost, their own curves are kept as `singles` in that case.
"""

from dataclasses import dataclass

from simulations.report.runs import Run
from simulations.report.summary import Method, spread


@dataclass(frozen=True)
class Point:
    """The state after a round: bytes are the sum over all rounds so far, both directions.

    The score is what the run is judged by: accuracy, or rmse.
    """

    round: int
    total_bytes: float
    score: float
    sd: float = 0.0


@dataclass(frozen=True)
class MethodCurve:
    """A method's mean curve and, if a seed ran on beyond it, the curve of each seed."""

    mean: tuple[Point, ...]
    singles: tuple[tuple[Point, ...], ...]


def run_curve(run: Run) -> tuple[Point, ...]:
    """Return the evaluated rounds of a run with their cumulative bytes.

    Parameters
    ----------
    run : Run
        A run; rounds without a server evaluation add their bytes but no point.

    Returns
    -------
    tuple[Point, ...]
        In order of rounds; round 0, the initial model, included if it was evaluated.
    """
    points: list[Point] = []
    total_bytes = 0
    for entry in run.history:
        total_bytes += entry.bytes_up + entry.bytes_down
        score = entry.rmse if run.metric == "rmse" else entry.accuracy
        if score is not None:
            points.append(Point(entry.number, total_bytes, score))
    return tuple(points)


def method_curve(method: Method) -> MethodCurve | None:
    """Average the curves of a method's runs.

    Parameters
    ----------
    method : Method
        The runs to average.

    Returns
    -------
    MethodCurve | None
        None if no run has two evaluated rounds after the initial model: such a method is a point.
    """
    curves = [run_curve(run) for run in method.runs]
    curves = [curve for curve in curves if sum(point.round > 0 for point in curve) > 1]
    if not curves:
        return None
    by_round = [{point.round: point for point in curve} for curve in curves]
    common = sorted(set.intersection(*(set(points) for points in by_round)))
    mean = tuple(_mean_point([points[number] for points in by_round]) for number in common)
    last = common[-1] if common else -1
    runs_beyond = any(curve[-1].round > last for curve in curves)
    return MethodCurve(mean, tuple(curves) if runs_beyond else ())


def end_point(method: Method) -> Point | None:
    """Return a method's final state from ``result.json`` alone.

    Parameters
    ----------
    method : Method
        A method that is drawn as one point.

    Returns
    -------
    Point | None
        None if no run has a score.
    """
    score = method.score
    if score is None:
        return None
    total_bytes = method.bytes_up + method.bytes_down
    return Point(method.rounds[1], total_bytes, score.mean, score.sd or 0.0)


def _mean_point(points: list[Point]) -> Point:
    score = spread(point.score for point in points)
    total_bytes = spread(point.total_bytes for point in points)
    assert score is not None
    assert total_bytes is not None
    return Point(points[0].round, total_bytes.mean, score.mean, score.sd or 0.0)
