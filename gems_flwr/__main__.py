"""The command line: ``gems-flwr``, or ``python -m gems_flwr``.

``run``, ``report`` and ``reproduce`` are the ready simulations, each with options of its own
(``gems-flwr run --help``). ``submit`` submits a Flower app to a SuperLink, follows its log, and
ends with a status that tells success from failure. ``aggregate A B -o model.safetensors``
aggregates space files and ``--remove`` takes a node out again; ``show`` says what one holds,
``inspect`` what it gives away. ``export`` writes a model as ONNX, a torch program or a scikit-learn
estimator.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gems_flwr.disk.faults import file_fault
from gems_flwr.errors import EmptyIntersectionError, GemsError, OptionError
from gems_flwr.inspect_command import add_inspect
from gems_flwr.offline import aggregate_files, describe
from gems_flwr.offline_totals import aggregate_total
from gems_flwr.receipts import Receipt
from gems_flwr.runtime.app_output import output_for
from gems_flwr.runtime.flower_cli import COMPLETED, FlowerCli
from gems_flwr.runtime.ready_simulations import COMMANDS, start_simulations
from gems_flwr.secure.kept_total import is_total, load_total
from gems_flwr.server.export_command import add_export
from gems_flwr.server.leaving_runs import leave_run
from gems_flwr.spaces.space_files import load_space


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns 0 for success, 1 for a run that failed, 2 for bad input, 3 for an empty intersection,
    4 for a space that gives a class away (``inspect``), 130 if it was interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in COMMANDS:
            # Hydra's and others' own options, which this parser knows nothing of.
            _refuse_apps(*words)
            return start_simulations(words[0], words[1:])
        options = _parser().parse_args(words)
        return int(options.run(options))
    except EmptyIntersectionError as error:
        print(error, file=sys.stderr)
        return 3
    except GemsError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(file_fault(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # A run that was submitted goes on without us.
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gems-flwr", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (_, help_text) in COMMANDS.items():
        commands.add_parser(name, help=help_text)

    aggregate = commands.add_parser("aggregate", help="aggregate space files into a model file")
    aggregate.add_argument("files", nargs="*", type=Path, help="space files, one per node")
    aggregate.add_argument("-o", "--output", type=Path, required=True, help="the model file")
    aggregate.add_argument(
        "--add", action="store_true", help="go on from the spaces kept beside the output"
    )
    aggregate.add_argument(
        "--remove",
        action="append",
        default=[],
        metavar="NODE",
        help="a node that leaves: its space is deleted, the model made anew from the others'; may "
        "be given several times",
    )
    aggregate.add_argument(
        "--run",
        type=Path,
        dest="folder",
        metavar="FOLDER",
        help="checkpoint_dir of a run of Gems that has ended, to remove nodes from",
    )
    aggregate.add_argument("--layer", help="with --run: name of the output layer, if it needs one")
    aggregate.add_argument(
        "--total", type=Path, metavar="FILE", help="a kept total of sums, instead of space files"
    )
    aggregate.add_argument(
        "--difference",
        type=Path,
        metavar="FILE",
        help="what those who leave a total take out of it, signed by each",
    )
    aggregate.add_argument(
        "--key",
        action="append",
        default=[],
        type=Path,
        metavar="NODE.pub",
        help="public key of a node that leaves a total; may be given several times",
    )
    aggregate.add_argument("--classes", type=int, help="classes of the task (balls, ellipsoids)")
    aggregate.add_argument(
        "--keys",
        nargs=2,
        default=("weight", "bias"),
        metavar=("WEIGHT", "BIAS"),
        help="names of the layer in the model file; weight bias",
    )
    aggregate.add_argument(
        "--select",
        choices=["first", "margin", "objective"],
        help="which model of the intersection; by default what suits the kind of spaces",
    )
    aggregate.add_argument(
        "--on-empty",
        choices=["least", "fail"],
        default="least",
        help="if no model is good enough for all: the one that violates least, or status 3",
    )
    aggregate.add_argument("--ridge", type=float, help="of the cone objective")
    aggregate.set_defaults(run=_aggregate)

    show = commands.add_parser("show", help="say what a space file holds and reveals")
    show.add_argument("files", nargs="+", type=Path, help="space files")
    show.set_defaults(run=_show)
    add_inspect(commands)
    add_export(commands)

    submit = commands.add_parser("submit", help="flwr run, follow the log, and tell how it ended")
    submit.add_argument("app", nargs="?", default=".", help="folder of the Flower app")
    submit.add_argument("superlink", nargs="?", help="connection in Flower's config")
    submit.add_argument(
        "-c",
        "--run-config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="as of flwr run; may be given several times",
    )
    submit.add_argument("--federation-config", metavar="KEY=VALUE", help="as of flwr run")
    submit.set_defaults(run=_submit)
    return parser


def _refuse_apps(command: str, first: str = "", second: str = "", *_: str) -> None:
    """Say what to write if a simulation is asked to run a Flower app, as ``run`` once did."""
    is_option = "=" in first or first.startswith(("-", "~", "+"))
    is_run_config = first in ("-c", "--run-config", "--federation-config") and "=" in second
    if command == "run" and ((first and not is_option) or is_run_config):
        app = "APP" if is_run_config else first
        raise OptionError(
            f"gems-flwr submit {app} submits a Flower app; gems-flwr run takes options of a "
            "simulation, such as strategy=gems"
        )


def _aggregate(options: argparse.Namespace) -> int:
    if options.total is not None:
        return _aggregate_total(options)
    if options.difference is not None or options.key:
        raise OptionError("--difference and --key are for --total: spaces are kept by node")
    how = {key: getattr(options, key) for key in ("select", "on_empty", "ridge")}
    if options.folder is not None:
        if options.files or options.add:
            raise OptionError("no space file can be added to a run that has ended")
        result = leave_run(
            options.folder, options.remove, options.output, layer=options.layer, **how
        )
    else:
        result = aggregate_files(
            options.files,
            options.output,
            add=options.add,
            remove=options.remove,
            classes=options.classes,
            keys=tuple(options.keys),
            **how,
        )
    found = result.aggregate.intersection
    for failure in result.rejected:
        print(f"left out: {failure}", file=sys.stderr)
    verdict = {
        "feasible": "good enough for every node",
        "empty": "no model is good enough for every node (proved); this one violates least",
        "undecided": "not shown to be good enough for every node",
    }[found.status]
    print(f"{options.output}: {len(result.nodes)} nodes, {verdict} ({found.seconds:.2f} s)")
    if found.is_average:
        print("it is the plain average of the nodes' models")
    for node, margin in zip(result.nodes, found.margins, strict=True):
        print(f"  {node}: margin {margin:+.4g}")
    if result.receipt is not None:
        _print_receipt(result.receipt)
    return 0


def _aggregate_total(options: argparse.Namespace) -> int:
    if options.files or options.add:
        raise OptionError("a total is of sums, to which no space file can be added")
    result = aggregate_total(
        options.total,
        options.output,
        remove=options.remove,
        difference=options.difference,
        keys=options.key,
        layer_keys=tuple(options.keys),
        ridge=options.ridge,
    )
    seconds = result.aggregate.intersection.seconds
    print(f"{options.output}: the total of {len(result.nodes)} nodes ({seconds:.2f} s)")
    if result.receipt is not None:
        _print_receipt(result.receipt)
        print(result.receipt.note)
    return 0


def _print_receipt(receipt: Receipt) -> None:
    for node, digest in receipt.removed.items():
        print(f"removed {node} at {receipt.at}: sha256 {digest}")
    print(f"model before: sha256 {receipt.model_before}")
    print(f"model after:  sha256 {receipt.model_after}")


def _show(options: argparse.Namespace) -> int:
    for path in options.files:
        print(path)
        if is_total(path):
            note = load_total(path).note
            print(f"  kind: total of {len(note.nodes)} nodes\n  sha256: {note.digest}")
            print(f"  note for nodes that leave: {note.to_json()}")
            continue
        for name, text in describe(load_space(path)):
            print(f"  {name}: {text}")
    return 0


def _submit(options: argparse.Namespace) -> int:
    flwr = FlowerCli(options.superlink)
    run_config = list(options.run_config)
    output = output_for(options.app, options.superlink, run_config)
    if output:
        run_config.append(f'output="{output}"')
    further = [part for value in run_config for part in ("-c", value)]
    if options.federation_config:
        further += ["--federation-config", options.federation_config]
    run_id = flwr.submit(options.app, *further)
    print(f"run {run_id} is submitted", flush=True)
    if output:
        print(f"results will be below {output}", flush=True)
    flwr.follow(run_id)
    status = flwr.wait(run_id)
    print(f"run {run_id} is {status}")
    return 0 if status == COMPLETED else 1


if __name__ == "__main__":
    sys.exit(main())
