"""What compression changes: beside the same protocol without, and beside periodic averaging.

Bytes at equal loss are those of `simulations.reproduce.papers.equal_loss`, taken twice: beside
periodic averaging as it is in the paper, and, for honesty, with the same compression on both
sides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from simulations.report.tables import TextTable
from simulations.reproduce.papers.equal_loss import (
    AT_EQUAL_LOSS,
    BYTES,
    LOSS,
    MODELS,
    compare_with_periodic,
)
from simulations.reproduce.papers.findings import Finding, Findings
from simulations.reproduce.studies.compressed_grid import (
    ACCURACY,
    FORMS,
    PLAIN,
    QUIET,
    TEST_LOSS,
    UP,
    judged_by,
    split_name,
)

BYTES_BESIDE_PLAIN, LOSS_BESIDE_PLAIN = "bytes beside float32", "loss beside float32"
SAME_FORM = "bytes beside periodic with the same compression at equal loss"
# What a protocol's name begins with, and what its colour is called.
_FAMILIES = {"b": "periodic", "Δ": "dynamic, local", "total": "dynamic, total"}


def compare_forms(found: Findings) -> None:
    """Add all comparisons, seed by seed."""
    measured = [*judged_losses(found), *found.of(BYTES)]
    view = replace(found, findings=[*measured, *found.of(TEST_LOSS)])
    for quantity, title in (
        (BYTES, BYTES_BESIDE_PLAIN),
        (LOSS, LOSS_BESIDE_PLAIN),
        (TEST_LOSS, LOSS_BESIDE_PLAIN),
    ):
        for each in view.of(quantity):
            protocol, form = split_name(each.method)
            plain = view.get(each.setting, protocol, quantity)
            if form != PLAIN and plain is not None:
                found.add(Finding(each.setting, each.method, title, _ratios(each, plain)))
    # Beside the paper's periodic averaging; then, form by form, beside a compressed one.
    paper = [m for m in found.methods() if not m.startswith("b = ") or split_name(m)[1] == PLAIN]
    _compare(found, measured, AT_EQUAL_LOSS, paper)
    for form in FORMS:
        same = [method for method in found.methods() if split_name(method)[1] == form]
        _compare(found, measured, SAME_FORM, same)


def judged_losses(found: Findings) -> list[Finding]:
    """Return the losses by which protocols are compared, whichever they are, as `LOSS`."""
    return [
        replace(each, quantity=LOSS)
        for each in found.findings
        if each.quantity == judged_by(each.setting) and each.values
    ]


def _compare(
    found: Findings, measured: Sequence[Finding], title: str, methods: Collection[str]
) -> None:
    """Add bytes at equal loss among some of the methods."""
    view = replace(found, findings=[each for each in measured if each.method in methods])
    compare_with_periodic(view)
    for each in view.of(AT_EQUAL_LOSS):
        found.add(replace(each, quantity=title))


def _ratios(above: Finding, below: Finding) -> list[float | None]:
    pairs = zip(above.by_seed, below.by_seed, strict=True)
    return [None if a is None or not b else a / b for a, b in pairs]


def stream_table(found: Findings) -> TextTable:
    """Return loss, bytes and their comparisons on the streams."""
    headings = (
        *("stream", "protocol", "form", "loss", "loss +", "MB", "of float32", "models"),
        *("of periodic float32", "of periodic, same form", "up", "quiet", "accuracy", "own loss"),
    )
    rows = []
    for loss in judged_losses(found):
        protocol, form = split_name(loss.method)
        rows.append((loss.setting, protocol, form, *_numbers(found, loss)))
    return TextTable.of(headings, rows, names=(0, 1, 2), group_by=0)


def _numbers(found: Findings, loss: Finding) -> list[str]:
    def text(quantity: str, form: str) -> str:
        return _text(found.get(loss.setting, loss.method, quantity), form)

    def share(quantity: str) -> str:
        part = found.get(loss.setting, loss.method, quantity)
        whole = found.get(loss.setting, loss.method, BYTES)
        if part is None or whole is None:
            return "–"
        return f"{part.mean / whole.mean:.1%}"

    more = found.get(loss.setting, loss.method, LOSS_BESIDE_PLAIN)
    places = 2 if loss.mean > 10 else 4
    sd = "" if loss.sd is None else f" ± {loss.sd:.{places}f}"
    return [
        f"{loss.mean:.{places}f}{sd}",
        "–" if more is None else f"{100 * (more.mean - 1):+.2f} %",
        text(BYTES, ",.0f"),
        text(BYTES_BESIDE_PLAIN, ".3f"),
        text(MODELS, ",.1f"),
        text(AT_EQUAL_LOSS, ".3f"),
        text(SAME_FORM, ".2f"),
        share(UP),
        share(QUIET),
        text(ACCURACY, ".4f"),
        text(LOSS, ",.2f"),
    ]


def label_table(found: Findings) -> TextTable:
    """Return loss and bytes of FedAvg by label."""
    headings = ("model", "form", "test loss over rounds", "loss +", "MB", "of float32", "accuracy")
    rows = []
    for loss in found.of(TEST_LOSS):
        if loss.values:
            model, form = split_name(loss.method)
            more = found.get(loss.setting, loss.method, LOSS_BESIDE_PLAIN)
            rest = [
                _text(found.get(loss.setting, loss.method, quantity), form_of)
                for quantity, form_of in (
                    (BYTES, ",.2f"),
                    (BYTES_BESIDE_PLAIN, ".3f"),
                    (ACCURACY, ".4f"),
                )
            ]
            added = "–" if more is None else f"{100 * (more.mean - 1):+.2f} %"
            rows.append((model, form, f"{loss.mean:.4f}", added, *rest))
    return TextTable.of(headings, rows, names=(0, 1), group_by=0)


def _text(found: Finding | None, form: str) -> str:
    if found is None:
        return "–"
    return f"{found.mean:{form}}" + (f" ({len(found.values)} seeds)" if found.missing else "")


def families(
    found: Findings, setting: str
) -> dict[tuple[str, str], list[tuple[float, float, str]]]:
    """Return MB, loss and short name of a stream's runs, by protocol family and compression."""
    points: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for loss in judged_losses(found):
        sent = found.get(loss.setting, loss.method, BYTES)
        if loss.setting != setting or sent is None or loss.method == "nosync":
            continue
        protocol, form = split_name(loss.method)
        kind, _, option = protocol.rpartition(", ")
        family = _FAMILIES.get(kind or option[0], kind)
        points.setdefault((family, form), []).append((sent.mean, loss.mean, option))
    return points
