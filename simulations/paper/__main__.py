"""``python -m simulations.paper [NAME … | all | results] [quick=true] [seeds=5] [dataset=digits]``.

Without a name it lists every experiment of the papers. With names it runs them (finished runs are
not repeated), prints the published numbers beside ours and writes a CSV file, a picture and an
HTML page. ``results`` writes docs/results.md from the results files of full runs.
Further options: jobs=2 (processes), data_dir=…, output=runs/paper, publish=true (copy the results
of a full run to docs/results), commands=true (print the runs as commands instead of running them).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from rich.console import Console
from rich.table import Table

from gems_flwr.errors import GemsError
from simulations.config import ConfigError, explain
from simulations.paper import results, show
from simulations.paper.catalogue import CATALOGUE
from simulations.paper.runner import Options, interrupted, reproduce
from simulations.paper.spec import Reproduction, Scope
from simulations.report.figures import save

DOCS = Path(__file__).resolve().parents[2] / "docs"
_KEYS = ("quick", "seeds", "dataset", "jobs", "data_dir", "output", "publish", "commands")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    console = Console()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if any(word in ("-h", "--help") for word in words):
        console.print(__doc__ or "", markup=False)
        return 0
    names = [word for word in words if "=" not in word]
    try:
        said = _said([word for word in words if "=" in word])
        options = _options(said)
        chosen = _chosen(names)
        if not names:
            console.print(_list())
            return 0
        if said.get("commands") == "true":
            _print_commands(chosen, options, console)
            return 0
        failed = 0
        for reproduction in chosen:
            failed += _one(reproduction, options, said.get("publish") == "true", console)
        if names == ["results"] or said.get("publish") == "true":
            console.print(f"Written: {results.write_results(DOCS)}")
    except (HydraException, GemsError, OSError) as error:
        console.print(explain(error, words), style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        return interrupted(console)
    return 1 if failed else 0


def _said(words: Sequence[str]) -> dict[str, str]:
    said = dict(word.split("=", 1) for word in words)
    for key in said:
        if key not in _KEYS:
            raise ConfigError(f"there is no option '{key}'; the options are: {', '.join(_KEYS)}")
    return said


def _options(said: dict[str, str]) -> Options:
    dataset = said.get("dataset")
    if dataset not in (None, "digits"):
        raise ConfigError(
            f"dataset must be digits, which stands in for all data, got '{dataset}': an experiment "
            "of a paper has its own"
        )
    for key in ("quick", "publish", "commands"):
        if said.get(key, "false") not in ("true", "false"):
            raise ConfigError(f"{key} must be true or false, got '{said[key]}'")
    numbers = {}
    for key in ("seeds", "jobs"):
        if key in said:
            if not said[key].isdigit() or int(said[key]) < 1:
                raise ConfigError(f"{key} must be a whole number of at least 1, got '{said[key]}'")
            numbers[key] = int(said[key])
    return Options(
        scope=Scope(quick=said.get("quick") == "true", stand_in=dataset == "digits"),
        output=Path(said.get("output", "runs/paper")),
        seeds=numbers.get("seeds"),
        jobs=numbers.get("jobs", 2),
        data_dir=said.get("data_dir"),
    )


def _chosen(names: Sequence[str]) -> list[Reproduction]:
    if list(names) == ["all"]:
        return list(CATALOGUE.values())
    if list(names) == ["results"]:
        return []
    for name in names:
        if name not in CATALOGUE:
            raise ConfigError(
                f"there is no experiment '{name}'; there are: {', '.join(CATALOGUE)}, all, results"
            )
    return [CATALOGUE[name] for name in names]


def _list() -> Table:
    table = Table(title="Experiments of the papers", title_justify="left")
    # A name is there to be copied: the other columns give way.
    table.add_column("name", no_wrap=True)
    for heading in ("paper", "what"):
        table.add_column(heading)
    for heading in ("seeds", "minutes"):
        table.add_column(heading, justify="right")
    for each in CATALOGUE.values():
        table.add_row(
            each.name,
            f"{each.paper}, {each.where}",
            each.about,
            str(each.seeds),
            f"{each.minutes:g}",
        )
    return table


def _print_commands(chosen: Sequence[Reproduction], options: Options, console: Console) -> None:
    for reproduction in chosen:
        seeds = ",".join(map(str, range(options.seeds or reproduction.seeds)))
        for cell in reproduction.cells(options.scope):
            words = reproduction.overrides(cell, options.scope, 0)[:-1]
            quoted = " ".join(f"'{w}'" if set(w) & set("[]{}(),' ") else w for w in words)
            console.print(
                f"python -m simulations.run -m {quoted} seed={seeds}",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )


def _one(reproduction: Reproduction, options: Options, publish: bool, console: Console) -> int:
    """Run one experiment and write its files; return how many runs failed."""
    _announce(reproduction, options, console)
    found = reproduce(reproduction, options, console)
    name = (
        f"{reproduction.name}{'-quick' if found.quick else ''}{'-digits' if found.stand_in else ''}"
    )
    folder = options.output / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(found.to_json())
    show.write_csv(found, folder / f"{name}.csv")
    save(reproduction.draw(found), folder / f"{name}.png")
    show.write_page(found, reproduction, folder / f"{name}.png", folder / f"{name}.html")
    console.print(show.rich_table(found, reproduction))
    console.print(f"Report: {folder / f'{name}.html'}", soft_wrap=True)
    if publish and not (found.quick or found.stand_in):
        results.publish(reproduction.name, options.output, DOCS)
    return len(found.failures)


def _announce(reproduction: Reproduction, options: Options, console: Console) -> None:
    scope = options.scope
    cells = len(reproduction.cells(scope))
    seeds = options.seeds or (1 if scope.quick else reproduction.seeds)
    minutes = reproduction.minutes * seeds / reproduction.seeds * 2 / min(2, options.jobs)
    length = "at most five minutes" if scope.quick else f"about {minutes:.0f} minutes on two cores"
    console.print(
        f"[bold]{reproduction.name}[/bold]: {reproduction.paper}, {reproduction.where}; "
        f"{cells * seeds} runs, {length} (finished ones are not repeated)."
    )


if __name__ == "__main__":
    sys.exit(main())
