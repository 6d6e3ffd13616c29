"""What does a byte buy? Accuracy against bytes of a node, all methods on one split.

``python -m simulations.reproduce frontier`` runs them on MNIST by label over five nodes, FedAvg's
family for 200 rounds with rates tuned on validation data (`frontier_tuning`), and draws one
picture. At equal accuracy it says by what factor of bytes ours are ahead of the best of that family
and of models merged once. What is finished is not run again; another data set, split or number
of rounds comes as an option: ``frontier --dataset fashion_mnist partition=dirichlet rounds=100``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.errors import HydraException
from rich.console import Console

from simulations.config import ConfigError, compose_config
from simulations.report.byte_curves import ByteCurve, Lead, curve_of, lead
from simulations.report.figures import save
from simulations.report.frontier_plot import draw_frontier, family_styles, format_share
from simulations.report.pages import caption, document, figure
from simulations.report.runs import Run, read_runs
from simulations.report.summary import format_bytes
from simulations.report.tables import TextTable, html_table, print_table, write_csv
from simulations.reproduce.studies.frontier_methods import (
    CEILINGS,
    FAMILIES,
    FLOWER,
    LAYERS,
    METHODS,
    RIVALS,
    FrontierMethod,
)
from simulations.reproduce.studies.frontier_tuning import SEED, Trial, Tuning
from simulations.run import run as run_one

SETTING = ("dataset=mnist", "partition=labels", "nodes=5")
ROUNDS = 200
# What a candidate of the tuning plays: a share of all rounds, and at least so many.
_TUNING_SHARE = 0.1
_LEAST_TUNING = 5
PICTURE = "frontier.png"


@dataclass(frozen=True)
class Frontier:
    """What the runs gave.

    Parameters
    ----------
    curves : tuple of ByteCurve
        One for each method that could be run.
    ceilings : mapping from str to float
        Accuracies of the pooled optima.
    left_out : mapping from str to str
        Methods that could not be run, and why.
    setting : str
        Data set, split, nodes.
    """

    curves: tuple[ByteCurve, ...]
    ceilings: Mapping[str, float]
    left_out: Mapping[str, str]
    setting: str

    def leads(self) -> list[Lead]:
        """Return for each method that is no rival by what factor of bytes it is ahead."""
        rivals = [curve for curve in self.curves if curve.family in RIVALS]
        return [lead(curve, rivals) for curve in self.curves if curve.family not in RIVALS]


def run(overrides: Sequence[str], output: Path, console: Console) -> Path:
    """Run the study; return the path of its page."""
    rounds, common = _take_rounds(overrides)
    common = [*SETTING, *common]
    tried = max(_LEAST_TUNING, round(_TUNING_SHARE * rounds))
    tuning = Tuning(common, tried, output / "tuning", console)
    found = collect(METHODS, CEILINGS, common, rounds, output / "runs", console, tuning)
    return write_frontier(found, output, console, tuning.trials)


def collect(
    methods: Sequence[FrontierMethod],
    ceilings: Mapping[str, Sequence[str]],
    common: Sequence[str],
    rounds: int,
    folder: Path,
    console: Console,
    tuning: Tuning | None = None,
) -> Frontier:
    """Run methods, or read what they gave before.

    Parameters
    ----------
    methods, ceilings
        What to run; what has options that do not exist, or that do not fit the data, is left out.
    common : sequence of str
        Overrides of all.
    rounds : int
        For those of FedAvg's family.
    folder : Path
        Where runs are kept.
    console : Console
        Where to show progress.
    tuning : Tuning, optional
        Where further options come from.
    """
    curves, levels, left_out = [], {}, {}
    setting = ""
    for method in methods:
        many = (f"rounds={rounds}",) if method.family == FLOWER else ()
        words = (*method.overrides, *common, *many)
        try:
            compose_config(words)
            options = tuning.options_for(method) if tuning else ()
            done = _run((*words, *options), method.name, folder, console)
        except (ConfigError, HydraException) as error:
            left_out[method.name] = str(error).splitlines()[0]
            continue
        setting = f"{done.setting.dataset} · {done.setting.partition} · {done.setting.nodes} nodes"
        curve = curve_of(done, method.name, method.family)
        if curve is not None:
            # Hidden layers alone are no model yet.
            curves.append(curve.at_its_end() if method.family == LAYERS else curve)
    for name, chosen in ceilings.items():
        try:
            done = _run((*chosen, *common), name, folder, console)
        except (ConfigError, HydraException) as error:
            left_out[name] = str(error).splitlines()[0]
            continue
        if done.accuracy is not None:
            levels[name] = done.accuracy
    return Frontier(tuple(curves), levels, left_out, setting)


def write_frontier(
    found: Frontier, output: Path, console: Console, trials: Sequence[Trial] = ()
) -> Path:
    """Print the tables; write picture, CSV files and page; return the page's path."""
    picture = write_picture(found, output)
    write_csv(
        output / "frontier.csv",
        [
            {"method": curve.name, "family": curve.family, **point._asdict()}
            for curve in found.curves
            for point in curve.points
        ],
    )
    tables = {"Accuracy for bytes": _points_table(found), "At equal accuracy": _leads_table(found)}
    if trials:
        tables["Chosen on validation data"] = _trials_table(trials)
        write_csv(
            output / "tuning.csv",
            [
                {"method": t.method, "options": " ".join(t.options), "validation": t.accuracy}
                for t in trials
            ],
        )
    for title, table in tables.items():
        print_table(table, console, title=title)
    for name, reason in found.left_out.items():
        console.print(f"Left out: {name} ({reason})", style="yellow", markup=False, soft_wrap=True)
    page = output / "frontier.html"
    page.write_text(_page(found, picture, tables), encoding="utf-8")
    console.print(f"Picture: {picture}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"Page: {page}", soft_wrap=True, highlight=False, markup=False)
    return page


def write_picture(found: Frontier, output: Path) -> Path:
    """Draw the picture; return its path."""
    output.mkdir(parents=True, exist_ok=True)
    families = [name for name in FAMILIES if any(c.family == name for c in found.curves)]
    styles = family_styles(families, RIVALS)
    path = output / PICTURE
    save(draw_frontier(found.curves, found.ceilings, styles, subtitle=_subtitle(found)), path)
    return path


def _take_rounds(overrides: Sequence[str]) -> tuple[int, list[str]]:
    """Return the rounds of FedAvg's family, and the other options: one round stays one."""
    rounds, others = ROUNDS, []
    for word in overrides:
        key, _, value = word.partition("=")
        if key != "rounds":
            others.append(word)
        elif not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"rounds must be a whole number of at least 1, got {value!r}")
        else:
            rounds = int(value)
    return rounds, others


def _run(words: Sequence[str], name: str, folder: Path, console: Console) -> Run:
    config = compose_config([*words, f"label='{name}'"])
    place = folder / config.run_name()
    run_one(config, place, console)
    [done] = read_runs([place]).runs
    return done


def _subtitle(found: Frontier) -> str:
    return (
        f"{found.setting}; one mark per round, on long curves rounds 1, 2, 5, 10, 20 …; "
        "numbers: last model"
    )


def _points_table(found: Frontier) -> TextTable:
    rows = [
        (
            curve.family,
            curve.name,
            str(curve.last.round),
            format_bytes(curve.last.bytes_up),
            format_share(curve.last.accuracy),
        )
        for family in FAMILIES
        for curve in found.curves
        if curve.family == family
    ]
    rows += [
        ("all raw data", name, "1", "–", format_share(a)) for name, a in found.ceilings.items()
    ]
    headings = ("family", "method", "rounds", "up per node", "accuracy")
    return TextTable.of(headings, rows, names=(0, 1), group_by=0)


def _leads_table(found: Frontier) -> TextTable:
    rows = []
    for each in sorted(found.leads(), key=lambda lead: -lead.curve.last.accuracy):
        last = each.curve.last
        needs = "not reached" if each.rival_bytes is None else format_bytes(each.rival_bytes)
        factor = "–" if each.factor is None else f"{each.factor:.3g}×"
        rows.append(
            (
                f"{each.curve.family}: {each.curve.name}",
                format_share(last.accuracy),
                format_bytes(last.bytes_up),
                needs,
                each.rival or "–",
                factor,
            )
        )
    headings = ("method", "accuracy", "up per node", "best rival needs", "which", "factor")
    return TextTable.of(headings, rows, names=(0, 4))


def _trials_table(trials: Sequence[Trial]) -> TextTable:
    best: dict[str, Trial] = {}
    for trial in trials:
        if trial.method not in best or trial.accuracy > best[trial.method].accuracy:
            best[trial.method] = trial
    rows = [
        (
            method,
            " ".join(trial.options),
            f"{sum(t.method == method for t in trials)}",
            format_share(trial.accuracy),
        )
        for method, trial in best.items()
    ]
    return TextTable.of(("method", "options", "tried", "validation"), rows, names=(0, 1))


def _page(found: Frontier, picture: Path, tables: Mapping[str, TextTable]) -> str:
    parts = [f"<h1>What a byte buys</h1>{caption(found.setting)}"]
    parts.append(f"<section>{figure(picture, 'Accuracy against bytes', 60)}</section>")
    for title, table in tables.items():
        parts.append(f"<section><h2>{title}</h2>{html_table(table)}</section>")
    parts.append(
        caption(
            "Options of FedAvg's family were chosen on the nodes' validation data, with seed "
            f"{SEED}. A factor is the bytes that the cheapest of FedAvg's family and of the models "
            "merged once needs to be as accurate, divided by the method's own."
        )
    )
    return document("What a byte buys", "\n".join(parts))
