"""``report.html``: one file that holds everything, to be mailed, archived or read on a phone.

Images are data URIs and the style sheet is part of the page; nothing is loaded from anywhere.
"""

import base64
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from simulations.report import multi_model
from simulations.report.run_plots import Plot
from simulations.report.run_tables import caption_of, columns_of
from simulations.report.runs import Setting, UnfinishedRun
from simulations.report.summary import Method, SettingSummary, cell_texts, format_bytes

# Lists longer than this are folded away behind their heading.
_LONG_LIST = 12

_STYLE = """
:root { color-scheme: light dark; --text: #1d2329; --soft: #5b6670; --line: #dde2e7;
  --page: #f5f6f8; --card: #ffffff; --bar: #cfe3f3; --warn: #8a5200; --warn-back: #fff4e0; }
@media (prefers-color-scheme: dark) { :root { --text: #e7eaed; --soft: #a3adb6; --line: #39424a;
  --page: #14181c; --card: #1d2329; --bar: #24465f; --warn: #ffcf8a; --warn-back: #3a2c14; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 0 0 .8rem; line-height: 1.3; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .4rem 0; }
.soft { color: var(--soft); font-size: .9rem; }
section, .note { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: 1.1rem; margin: 1.2rem 0; }
.note { color: var(--warn); background: var(--warn-back); border-color: transparent; }
.note ul { margin: .3rem 0 0; padding-left: 1.2rem; }
.note li, td.reason { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; font-size: .85rem; vertical-align: bottom; }
th.text, td.text { text-align: left; }
td.reason { white-space: normal; min-width: 14rem; }
tr.reference td { color: var(--soft); font-style: italic; }
td.accuracy { background: linear-gradient(var(--bar), var(--bar)) no-repeat left center
  / calc(100% * var(--share)) 62%; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem),
  1fr)); margin-top: 1.2rem; align-items: start; }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: .4rem;
  padding: .4rem; }
figure img { display: block; width: 100%; max-width: 34rem; height: auto; margin: 0 auto; }
.plots figure:last-child:nth-child(odd) { grid-column: 1 / -1; }
@media (max-width: 40rem) { th, td { padding: .38rem .4rem; font-size: .9rem; }
  section { padding: .8rem; } }
details { margin-top: 1rem; }
summary { cursor: pointer; font-weight: 600; }
dl { margin: .4rem 0 0; }
dt { font-weight: 600; margin-top: .5rem; }
dd { margin: 0; color: var(--soft); }
"""

_HOW_TO_READ = """
<section>
<h2>How to read this</h2>
<p>Each row is one way of learning from data that stay where they are. A good method stands high
(accurate) and far to the left (few bytes) in the plot of accuracy against bytes.</p>
<dl>
<dt>up, down</dt>
<dd>What the nodes send to the server, and what the server sends to them: payload bytes, summed
over all nodes and rounds, mean over runs. 1 MB is 10<sup>6</sup> bytes, 1 KB is
10<sup>3</sup>.</dd>
<dt>accuracy</dt>
<dd>Share of right answers of the final model on the test data: mean ± sample standard deviation
over seeds. The bar behind the number runs from 0 to 1.</dd>
<dt>seconds, seeds, failed</dt>
<dd>Mean wall-clock time of a run; how many seeds the mean is over; how many nodes failed, summed
over runs. The column of failures is there only if a node failed.</dd>
<dt>global, local</dt>
<dd>Reference runs, not competitors: <em>global</em> trains on all data in one place (its
bytes are those of the raw data), <em>local</em> lets each node learn alone and gives the mean over
nodes. Plots show them as level lines.</dd>
<dt>curves and points</dt>
<dd>Methods with several rounds are curves, averaged over seeds round by round, with a band of one
standard deviation; thin lines are single seeds, shown where some ran longer than others. Methods
with one round are single points. The axis of bytes is logarithmic: each step to the right costs
a multiple of the one before.</dd>
<dt>cumulative loss</dt>
<dd>Of nodes that learn from a stream: the loss on every batch before learning from it, summed over
the run. A good protocol stands low (little loss) and far to the left (few bytes).</dd>
<dt>several models</dt>
<dd>Where a run trains several models at once, its accuracy is the mean over them;
<em>relative</em> is that mean over the one of full participation. "Who was drawn" shows which nodes
trained which model how often. The step size is 1 in expectation for unbiased methods; the less it
and the variance vary, the calmer the training.</dd>
<dt>labels per node</dt>
<dd>How many training examples of each class a node holds; white is none. The further apart the
columns look, the harder the task.</dd>
</dl>
</section>
"""


def render_page(
    settings: Sequence[SettingSummary],
    plots: Mapping[Setting, Sequence[Plot]],
    unfinished: Sequence[UnfinishedRun],
    warnings: Sequence[str],
) -> str:
    """Write the report as one HTML page.

    Parameters
    ----------
    settings : Sequence[SettingSummary]
        The tables.
    plots : Mapping[Setting, Sequence[Plot]]
        Plots of each setting, already on disk; their bytes are copied into the page.
    unfinished : Sequence[UnfinishedRun]
        Runs to name as left out.
    warnings : Sequence[str]
        What the reader should know before believing the numbers.

    Returns
    -------
    str
        A complete HTML document without any reference to another file or host.
    """
    runs = sum(len(summary.runs) for summary in settings)
    counts = [_plural(runs, "finished run"), _plural(len(settings), "setting")]
    if unfinished:
        counts.append(f"{len(unfinished)} unfinished, left out")
    columns = columns_of(settings)
    # A phone shows the first columns without scrolling, so what everybody looks for comes first.
    columns.insert(1, columns.pop(columns.index("accuracy")))
    body = [
        "<h1>Federated learning runs compared</h1>",
        f'<p class="soft">{escape(" · ".join(counts))}</p>',
        _note("Please note", warnings),
        _note("Unfinished runs, left out", [run.describe() for run in unfinished]),
        *(
            _setting_section(summary, columns, plots.get(summary.setting, ()))
            for summary in settings
        ),
        _HOW_TO_READ,
    ]
    return document("Federated learning runs compared", "".join(body))


def document(title: str, body: str) -> str:
    """Return a complete HTML page in the style of all reports; `body` is HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _setting_section(summary: SettingSummary, columns: Sequence[str], plots: Sequence[Plot]) -> str:
    parts = [
        f"<section>\n<h2>{escape(summary.setting.title)}</h2>",
        _methods_table(summary, columns),
        f'<p class="soft">{escape(caption_of(columns))}</p>',
    ]
    parts.append(_models_table(summary))
    if plots:
        parts.append(f'<div class="plots">{"".join(map(_figure, plots))}</div>')
    parts += [_failures(summary), _every_run(summary), "</section>\n"]
    return "\n".join(parts)


def _methods_table(summary: SettingSummary, columns: Sequence[str]) -> str:
    rows = []
    for method in summary.methods:
        texts = cell_texts(method)
        cells = "".join(_method_cell(method, column, texts[column]) for column in columns)
        rows.append(f'<tr class="reference">{cells}</tr>' if method.is_reference else _row(cells))
    heads = [(column, column == "method") for column in columns]
    return _table(heads, rows)


def _models_table(summary: SettingSummary) -> str:
    """Write the accuracy of every model, where there are several."""
    rows, models = multi_model.models_rows(summary), multi_model.models_of(summary)
    if not rows:
        return ""
    texts = [multi_model.texts(row, models) for row in rows]
    heads = [(column, column == "method") for column in texts[0]]
    lines = [
        _row("".join(_cell(t, "text" if c == "method" else "") for c, t in text.items()))
        for text in texts
    ]
    return (
        f"<h3>Accuracy of every model</h3>\n{_table(heads, lines)}\n"
        f'<p class="soft">{escape(multi_model.CAPTION)}</p>'
    )


def _method_cell(method: Method, column: str, text: str) -> str:
    if column == "method":
        return _cell(text, "text")
    if column == "accuracy" and method.accuracy is not None:
        share = min(max(method.accuracy.mean, 0.0), 1.0)
        return f'<td class="accuracy" style="--share:{share:.4f}">{escape(text)}</td>'
    return _cell(text)


def _figure(plot: Plot) -> str:
    data = base64.b64encode(plot.path.read_bytes()).decode("ascii")
    return (
        f'<figure><img alt="{escape(plot.title)}: {escape(plot.description)}" '
        f'src="data:image/png;base64,{data}"></figure>'
    )


def _failures(summary: SettingSummary) -> str:
    """List failures once per method, node and reason, with when they happened."""
    rounds: dict[tuple[str, str, str], dict[int, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run in summary.runs:
        for entry in run.history:
            for failure in entry.failures:
                key = (failure.node, failure.reason, run.method)
                rounds[key][run.seed].append(entry.number)
    if not rounds:
        return ""
    rows = []
    for (node, reason, method), by_seed in sorted(
        rounds.items(), key=lambda item: (_natural(item[0][0]), item[0])
    ):
        when = "; ".join(
            f"{_ranges(numbers)} (seed {seed})" for seed, numbers in sorted(by_seed.items())
        )
        cells = [_cell(node, "text"), _cell(reason, "text reason"), _cell(method, "text")]
        rows.append(_row("".join([*cells, _cell(when, "text")])))
    heads = [(head, True) for head in ("node", "reason", "method", "rounds")]
    return _folded(f"Failures by node ({len(rows)})", _table(heads, rows), len(rows) <= _LONG_LIST)


def _every_run(summary: SettingSummary) -> str:
    rows = []
    for run in summary.runs:
        cells = [
            _cell(run.method, "text"),
            _cell(str(run.seed)),
            _cell(str(run.rounds)),
            _cell("–" if run.accuracy is None else f"{run.accuracy:.4f}"),
            _cell("–" if run.loss is None else f"{run.loss:.4f}"),
            _cell(format_bytes(run.bytes_up)),
            _cell(format_bytes(run.bytes_down)),
            _cell("–" if run.messages is None else f"{run.messages:,}"),
            _cell("–" if run.seconds is None else f"{run.seconds:,.1f}"),
            _cell(run.stopped_because or "", "text"),
            _cell(run.name, "text"),
        ]
        rows.append(_row("".join(cells)))
    text_heads = {"method", "stopped because", "folder"}
    heads = ["method", "seed", "rounds", "accuracy", "loss", "up", "down", "messages", "seconds"]
    heads += ["stopped because", "folder"]
    table = _table([(head, head in text_heads) for head in heads], rows)
    return _folded(f"Every run ({len(rows)})", table, is_open=False)


def _folded(heading: str, content: str, is_open: bool) -> str:
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(heading)}</summary>{content}</details>"


def _note(heading: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    listed = f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
    if len(items) > _LONG_LIST:
        return f'<div class="note">{_folded(f"{heading} ({len(items)})", listed, False)}</div>\n'
    return f'<div class="note"><strong>{escape(heading)}</strong>{listed}</div>\n'


def _table(heads: Iterable[tuple[str, bool]], rows: Iterable[str]) -> str:
    head = "".join(
        f'<th scope="col" class="text">{escape(text)}</th>'
        if is_text
        else f'<th scope="col">{escape(text)}</th>'
        for text, is_text in heads
    )
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _row(cells: str) -> str:
    return f"<tr>{cells}</tr>"


def _cell(text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<td{attribute}>{escape(text)}</td>"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _natural(name: str) -> tuple[int, str]:
    """Sort node 10 after node 9."""
    return (int(name), "") if name.isdecimal() else (1 << 62, name)


def _ranges(numbers: Sequence[int]) -> str:
    """Write 1, 2, 3, 7 as "1–3, 7"."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)
