"""The models of finished runs behind the wheel: L_dd and its parts, for each of them.

Kamp et al. 2018, A.4: "All the resulting models as well as baseline models were loaded to the
simulator and driven with a constant speed." The longest time and the highest frequency of crossings
are those of all models of one seed, so all of its runs are looked at together.

Which model a run results in: of protocols that synchronise, the average at their end
(``final_sync``); of the serial learner, its own. A run that keeps a model on every node (nosync)
results in none, and there is no reason to take one of them: the first three learners drive, and the
run has the mean of their losses.

What a model does on a track is kept beside its run, in a file that goes by the model's own bytes:
driving takes longer than training.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gems_flwr.disk.files import write_atomically

if TYPE_CHECKING:
    from simulations.driving.driving_loss import Drive

LEARNERS = 3
L_DD, TIME_LOST, CROSSINGS, ON_LINE = "L_dd", "time lost", "crossings", "time on the line"
LAPS = "laps"
_VERSION = 1


@dataclass(frozen=True)
class Roads:
    """Where models drive: how many tracks that nobody trained on, and how many laps of each.

    With `noise` the steering of all models is disturbed alike, by up to this share of full lock, as
    in recordings; the paper has none.
    """

    tracks: int = 3
    laps: int = 2
    seed: int = 0
    noise: float = 0.0

    @property
    def file_name(self) -> str:
        """What is known of a run's models on these roads."""
        disturbed = f"-noise-{self.noise:g}" if self.noise else ""
        return f"drives-{self.tracks}-{self.laps}-{self.seed}{disturbed}.json"


def drive_runs(
    runs: Sequence[tuple[str, Path]], roads: Roads, jobs: int = 1
) -> dict[str, dict[str, float]]:
    """Let the models of runs drive, and compare them.

    Parameters
    ----------
    runs : sequence of (name, folder)
        Finished runs on ``dataset=driving``, by names of their own.
    roads : Roads
        See there.
    jobs : int
        Processes side by side, at least 1.

    Returns
    -------
    dict
        By name: `L_DD` and its parts `TIME_LOST`, `CROSSINGS` and `ON_LINE`, each from 0 to 1, and
        `LAPS`, driven on all tracks together.

    Raises
    ------
    ConfigError
        If the simulator is not installed, or a run has no model that steers.
    """
    from simulations.driving.driving_loss import driving_losses
    from simulations.driving.simulator import require_simulator

    require_simulator()
    folders = [folder for _, folder in runs]
    if jobs <= 1 or len(folders) == 1:
        driven = [drive_run(folder, roads) for folder in folders]
    else:
        # Not before: the list of experiments needs neither Flower nor Torch.
        from simulations.reproduce.papers.runner import begin_worker

        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=begin_worker) as pool:
            driven = list(pool.map(drive_run, folders, [roads] * len(folders)))
    drives = {
        (name, learner): [_drive(record) for record in records]
        for (name, _), learners in zip(runs, driven, strict=True)
        for learner, records in learners.items()
    }
    losses = driving_losses({_key(pair): each for pair, each in drives.items()})
    found = {}
    for (name, _), learners in zip(runs, driven, strict=True):
        own = [losses[_key((name, learner))] for learner in learners]
        found[name] = {
            L_DD: fmean(loss.total for loss in own),
            TIME_LOST: fmean(loss.time_lost for loss in own),
            CROSSINGS: fmean(loss.crossings for loss in own),
            ON_LINE: fmean(loss.on_line for loss in own),
            LAPS: fmean(sum(r["laps"] for r in records) for records in learners.values()),
        }
    return found


def drive_run(folder: Path, roads: Roads) -> dict[str, list[dict[str, Any]]]:
    """Return what a run's models did on every track, by learner; from a file if it is known."""
    import torch

    from simulations.driving.closed_loop import by_image, drive_track
    from simulations.driving.drive_command import DriveOptions
    from simulations.driving.recording import unseen_track_seed
    from simulations.driving.wheel_models import MODEL_FILE, load_models, steering

    digest = hashlib.blake2b((folder / MODEL_FILE).read_bytes(), digest_size=8).hexdigest()
    about = {"version": _VERSION, "model": digest, **asdict(roads)}
    if not roads.noise:
        del about["noise"]
    file = folder / roads.file_name
    known = json.loads(file.read_text()) if file.is_file() else {}
    if known.get("about") == about:
        driven: dict[str, list[dict[str, Any]]] = known["learners"]
        return driven
    torch.set_num_threads(1)
    driven = {}
    for learner, model in list(load_models(folder).items())[:LEARNERS]:
        driven[learner] = []
        for track in range(roads.tracks):
            seed = unseen_track_seed(roads.seed, track)
            gusts = DriveOptions(seed=roads.seed, noise=roads.noise).gusts(track)
            driver = by_image(steering(model))
            journey = drive_track(driver, seed, laps=roads.laps, noise=gusts)
            record = {"ending": journey.ending, "laps": journey.laps, **asdict(journey.drive())}
            driven[learner].append(record)
    write_atomically(file, json.dumps({"about": about, "learners": driven}, indent=1).encode())
    return driven


def _drive(record: Mapping[str, Any]) -> Drive:
    from simulations.driving.driving_loss import Drive

    return Drive(
        on_road_seconds=record["on_road_seconds"],
        crossings=record["crossings"],
        on_line_seconds=record["on_line_seconds"],
        is_finished=record["is_finished"],
    )


def _key(pair: tuple[str, str]) -> str:
    return "\t".join(pair)
