"""Taking a node out of a run that has ended, by the run's folder.

Everywhere that a run keeps what a node has sent: its file in ``spaces``, replies in the inbox, the
moments that refinement has in the checkpoint. The model is made anew from the others' spaces, goes
back into the checkpoint and, if there is one, into ``published.safetensors``; details that were
about the node, or about the model before, go as well, and ``model_card.md`` is written anew.

Decided here: the folder says what nodes sent, not with which options the strategy used it. So the
options that change the layer have to be given again, and runs whose model took more than spaces (a
public sample, a screening, another head, an epsilon of the server's) are refused: resume those, and
let the node withdraw. A run that was refined has the layer of the class moments afterwards;
resumed, it is refined again without the node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from gems_flwr.disk.faults import disk_faults
from gems_flwr.disk.files import replacing, write_atomically
from gems_flwr.disk.lock import hold_folder
from gems_flwr.errors import OfflineError
from gems_flwr.intersect.aggregate import OnEmpty, aggregate_spaces, intersection_details
from gems_flwr.intersect.cone_objective import ConeOptions
from gems_flwr.intersect.result import Select
from gems_flwr.model_card import FILE as CARD
from gems_flwr.offline import OfflineResult, receipt_for, taken
from gems_flwr.receipts import RECEIPTS, Receipt, samples_of, save_receipt
from gems_flwr.runtime.checkpoint import CheckpointFolder
from gems_flwr.server.nodes import name_order
from gems_flwr.server.publishing import FILE as PUBLISHED
from gems_flwr.server.refine_memory import RefineMemory, has_refinement
from gems_flwr.server.refine_memory import others as without_refinement
from gems_flwr.server.round_log import read_rounds
from gems_flwr.server.run_card import card_of
from gems_flwr.server.state import ServerState
from gems_flwr.server.withdrawing import WITHDRAWALS, begun_anew, without_leavers
from gems_flwr.spaces.cone import ClassMomentCone
from gems_flwr.spaces.output_layer import find_output_layer
from gems_flwr.spaces.space_files import Space, SpaceFolder
from gems_flwr.typing import Arrays

# Details of a model that is no more.
_OUTDATED = ("refinement", "loss", "data_loss", "gradient_norm", "loss_bound", "published")


def leave_run(
    folder: Path,
    remove: Sequence[str],
    output: Path,
    *,
    layer: str | None = None,
    select: Select | None = None,
    on_empty: OnEmpty = "least",
    ridge: float | None = None,
) -> OfflineResult:
    """Take nodes out of a run of `Gems`, and write the model of the others.

    Parameters
    ----------
    folder : Path
        The run's `checkpoint_dir`.
    remove : sequence of str
        Who leaves.
    output : Path
        The model file: all arrays of the model.
    layer : str, optional
        Name of the output layer, as the strategy has it.
    select, on_empty, ridge
        As the strategy has them.

    Raises
    ------
    OfflineError
        If the folder is not that of such a run, or a node is not in it.
    FolderInUseError
        If the run is under way.
    DiskError
        If something cannot be written or removed.
    """
    if not remove:
        raise OfflineError("name who leaves the run: --remove")
    if not folder.is_dir():
        raise OfflineError(f"{folder} is not the folder of a run")
    with hold_folder(folder):
        files = CheckpointFolder(folder)
        groups, meta = _checked(files, folder)
        kept = SpaceFolder(folder / "spaces")
        spaces: dict[str, Space] = kept.load()
        leaving = taken(spaces, remove)
        spaces = {node: spaces[node] for node in sorted(spaces, key=name_order)}
        found = aggregate_spaces(
            list(spaces.values()),
            select=select,
            on_empty=on_empty,
            cone_options=ConeOptions(ridge=ridge),
        )
        before = groups["arrays"]
        arrays = find_output_layer(before, layer).replace_in(before, found.point)
        receipt = receipt_for(leaving, spaces, before, arrays)
        kind = next(iter(spaces.values())).kind
        told = intersection_details(kind, found, spaces, {})
        meta["details"] = _details(meta, remove, told, receipt, groups.get("memory", {}))
        memory = _memory(groups.get("memory", {}), spaces)
        # The model first: a disk that fails here has cost nothing.
        _save_model(output, arrays)
        files.replace_state({"arrays": arrays, "memory": memory}, meta)
        if (folder / PUBLISHED).exists():
            _save_model(folder / PUBLISHED, arrays, private=True)
        for node in remove:
            files.drop_replies_of(node, but=None)
        kept.remove(remove)
        _renew_card(folder, arrays, meta, spaces)
        save_receipt(folder / RECEIPTS, receipt)
        save_receipt(output.with_suffix(".receipts.json"), receipt)
        return OfflineResult(found, tuple(spaces), (), receipt)


def _checked(
    files: CheckpointFolder, folder: Path
) -> tuple[dict[str, dict[str, NDArray]], dict[str, Any]]:
    """Return a run's state, if its model was made of spaces and nothing else."""
    saved = files.load()
    if saved is None:
        raise OfflineError(f"no round of the run in {folder} is done yet: resume it")
    groups, meta = saved
    details = meta.get("details", {})
    if meta.get("strategy") != "Gems":
        raise OfflineError(f"a run of {meta.get('strategy')} keeps nothing by node to be removed")
    more = {
        f"head='{details.get('head')}'": details.get("head", "cone") != "cone",
        "tune": bool(details.get("tuned_on")),
        "robust": "unchecked_classes" in details or "unchecked" in details,
        "an epsilon that the server chose": details.get("epsilon") is not None,
        "class_weight": "class_weight" in details,
        "max_examples": "max_examples" in details,
    }
    if took := [what for what, holds in more.items() if holds]:
        raise OfflineError(
            f"the model of {folder} took more than spaces ({', '.join(took)}): resume the run and "
            "let the node withdraw"
        )
    return groups, meta


def _details(
    meta: Mapping[str, Any],
    remove: Sequence[str],
    told: Mapping[str, Any],
    receipt: Receipt,
    memory: Arrays,
) -> dict[str, Any]:
    kept = {key: value for key, value in meta["details"].items() if key not in _OUTDATED}
    details = {**without_leavers(kept, remove), **told}
    details[WITHDRAWALS] = [*kept.get(WITHDRAWALS, ()), receipt.to_json()]
    return details | (begun_anew(meta["round"], 1) if has_refinement(memory) else {})


def _memory(memory: Arrays, spaces: Mapping[str, Space]) -> dict[str, NDArray]:
    """Return what a resumed run goes on with: the others' moments, and no gradient of anybody."""
    if not has_refinement(memory):
        return dict(memory)
    cones = {n: space for n, space in spaces.items() if isinstance(space, ClassMomentCone)}
    return {**without_refinement(memory), **RefineMemory(cones, tuple(cones)).to_arrays()}


def _renew_card(
    folder: Path, arrays: Arrays, meta: Mapping[str, Any], spaces: Mapping[str, Space]
) -> None:
    """Replace the model card by one of the new model, which nobody has scored yet.

    Rounds and their traffic are what they were; what single nodes said is the others' alone.
    """
    # First, so that a card of the model before is gone whatever happens.
    with disk_faults(f"remove {folder / CARD}"):
        (folder / CARD).unlink(missing_ok=True)
    history = tuple(
        dataclasses.replace(
            record, server_metrics={}, evaluate_metrics={}, empty_metrics=(), train_metrics={}
        )
        for record in read_rounds(folder)
    )
    state = ServerState(arrays, history, details=meta["details"])
    card = card_of(
        state.result("a node left after the run had ended"),
        name=str(meta["strategy"]),
        seed=meta.get("seed"),
        examples={node: samples_of(space) for node, space in spaces.items()},
    )
    others = {node: each for node, each in card.nodes.items() if node in spaces}
    card = dataclasses.replace(card, nodes=others)
    write_atomically(folder / CARD, card.to_markdown().encode())


def _save_model(path: Path, arrays: Arrays, *, private: bool = False) -> None:
    with replacing(path, private=private) as temporary:
        save_file({k: np.ascontiguousarray(array) for k, array in arrays.items()}, temporary)
