"""``report.html``: the runs compared, on one page."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from simulations.report import multi_model_table
from simulations.report.accuracy_plot import SCORE_NAMES
from simulations.report.columns import Column
from simulations.report.pages import LONG_LIST, caption, document, figure, folded, note
from simulations.report.run_plots import Plot
from simulations.report.run_tables import (
    caption_of,
    columns_of,
    methods_table,
    models_table,
    runs_table,
)
from simulations.report.runs import Setting, UnfinishedRun
from simulations.report.summary import SettingSummary
from simulations.report.tables import TextTable, html_table

_HOW_TO_READ = """
<section>
<h2>How to read this</h2>
<p>Each row is one way of learning from data that stay where they are. A good method stands high
(accurate) and far to the left (few bytes) in the plot of accuracy against bytes; where numbers are
predicted it is the error that is drawn, and a good method stands low.</p>
<dl>
<dt>up, down</dt>
<dd>What the nodes send to the server, and what the server sends to them: payload bytes, summed
over all nodes and rounds, mean over runs. 1 MB is 10<sup>6</sup> bytes, 1 KB is
10<sup>3</sup>.</dd>
<dt>accuracy</dt>
<dd>Share of right answers of the final model on the test data: mean ± sample standard deviation
over seeds. The bar behind the number runs from 0 to 1.</dd>
<dt>rmse</dt>
<dd>Where the label is a number there is no accuracy but the root of the mean squared error of the
final model on the test data, in the label's own unit; 0 is best.</dd>
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
    columns.sort(key=lambda c: (c.heading != "method", c.heading not in SCORE_NAMES))
    body = [
        "<h1>Federated learning runs compared</h1>",
        caption(" · ".join(counts)),
        note("Please note", warnings),
        note("Unfinished runs, left out", [run.describe() for run in unfinished]),
        *(
            _setting_section(summary, columns, plots.get(summary.setting, ()))
            for summary in settings
        ),
        _HOW_TO_READ,
    ]
    return document("Federated learning runs compared", "".join(body))


def _setting_section(
    summary: SettingSummary, columns: Sequence[Column], plots: Sequence[Plot]
) -> str:
    parts = [
        f"<section>\n<h2>{escape(summary.setting.title)}</h2>",
        html_table(methods_table(summary, columns)),
        caption(caption_of(columns)),
    ]
    models = models_table(summary)
    if models is not None:
        parts.append(f"<h3>Accuracy of every model</h3>\n{html_table(models)}")
        parts.append(caption(multi_model_table.CAPTION))
    if plots:
        shown = (figure(plot.path, f"{plot.title}: {plot.description}") for plot in plots)
        parts.append(f'<div class="plots">{"".join(shown)}</div>')
    parts.append(_failures(summary))
    every = html_table(runs_table(summary))
    parts.append(folded(f"Every run ({len(summary.runs)})", every, is_open=False))
    return "\n".join([*parts, "</section>\n"])


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
        rows.append((node, reason, method, when))
    table = TextTable.of(("node", "reason", "method", "rounds"), rows, names=(0, 1, 2, 3))
    content = html_table(table, wide=(1,))
    return folded(f"Failures by node ({len(rows)})", content, len(rows) <= LONG_LIST)


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
