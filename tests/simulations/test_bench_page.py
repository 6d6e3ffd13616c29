"""The bench's tables, page and files, from a part that measures nothing."""

import csv
import importlib
import io
import json
import platform
import re
import types

import pytest
from rich.console import Console
from rich.table import Table

from simulations.bench import __main__ as command
from simulations.bench.bench_files import PartResult, change_table, changes, read_parts
from simulations.bench.bench_page import write_page
from simulations.bench.cost_tables import Column, CostTable, limit, obvious, ours, ratio, size
from simulations.bench.growth_plot import plot_growth
from simulations.bench.machine_facts import machine_facts
from simulations.bench.measuring import measure_part
from simulations.command_line import UsageError

COLUMNS = (
    size("nodes"),
    ours("quick"),
    obvious("slow"),
    limit("pass"),
    ratio("slow ×", "slow", "quick"),
    Column("memory", "MB"),
)


def fake_table(factor=1.0, slow=True):
    """Quick costs n ms, slow n² ms, a pass 0.5 ms whatever n is."""
    return CostTable(
        "A <fake> & its cost",
        COLUMNS,
        tuple(
            {
                "nodes": n,
                "quick": factor * n,
                "slow": float(n**2) if slow else None,
                "pass": 0.5,
                "memory": 3,
            }
            for n in (1, 10, 100)
        ),
        "About it.",
        grows_with="nodes",
    )


def fake_part(**options):
    return types.SimpleNamespace(measure=lambda quick: iter([fake_table(**options)]))


def printing_part():
    def report(console, quick):
        table = Table(title="old style")
        table.add_column("words")
        table.add_row(f"quick={quick}")
        with console.status("working"):
            console.print(table)

    return types.SimpleNamespace(report=report)


def screen(width=80):
    return Console(file=io.StringIO(), width=width)


def test_ratios_are_those_of_the_columns_and_exponents_those_of_the_formulas():
    table = fake_table()
    assert [row.cells[4] for row in table.text().rows] == ["1.00×", "10.0×", "100×"]
    slopes = {line.name: round(line.slope, 6) for line in table.lines()}
    assert slopes == {"quick": 1, "slow": 2, "pass": 0}


def test_what_was_not_measured_is_a_dash_and_no_point():
    table = fake_table(slow=False)
    assert {row.cells[2] for row in table.text().rows} == {"–"}
    assert {row.cells[4] for row in table.text().rows} == {"–"}
    assert [line.name for line in table.lines()] == ["quick", "pass"]


def test_a_row_that_does_not_fit_its_columns_is_refused():
    with pytest.raises(ValueError, match="expected"):
        CostTable("t", (size("n"), ours("a")), ({"n": 1},))


def test_groups_have_lines_of_their_own():
    rows = tuple({"how": how, "n": n, "ms": 2.0 * n} for how in ("ours", "zlib") for n in (1, 2))
    columns = (size("how"), size("n"), ours("ms"))
    roles = {"zlib": "obvious"}
    table = CostTable("t", columns, rows, grows_with="n", group="how", group_roles=roles)
    assert [(line.name, line.role) for line in table.lines()] == [
        ("ours", "ours"),
        ("zlib", "obvious"),
    ]


def test_a_single_size_has_no_picture(tmp_path):
    table = fake_table()
    single = CostTable(table.title, COLUMNS, table.rows[:1], grows_with="nodes")
    assert not plot_growth(single, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_the_screen_shows_the_table_whole_in_80_columns():
    console = screen()
    measure_part("fake", fake_part(), True, console)
    shown = console.file.getvalue()
    assert "A <fake> & its cost, ms" in shown
    assert "quick grows with exponent 1.00" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_part_that_only_prints_is_shown_and_kept_as_text():
    console = screen()
    result = measure_part("old", printing_part(), True, console)
    assert "quick=True" in console.file.getvalue()
    assert "quick=True" in result.text
    assert result.tables == ()


def test_the_page_has_every_table_its_picture_and_the_machine(tmp_path):
    parts = [PartResult("fake", (fake_table(),)), PartResult("old", text="a < b")]
    page = write_page(tmp_path, parts, {"date": "today", **machine_facts()}).read_text()
    assert page.count("<section>") == 2
    assert "A &lt;fake&gt; &amp; its cost, ms" in page
    assert "<pre>a &lt; b</pre>" in page
    assert len(re.findall(r"<img [^>]*alt=\"[^\"]*exponent 2\.00", page)) == 1
    assert "http" not in page.replace("http-equiv", "")
    assert "torch" in page
    assert [path.name for path in tmp_path.glob("*.png")] == ["growth-fake-0.png"]


def test_facts_do_not_name_the_machine():
    facts = machine_facts()
    assert int(facts["cores"]) >= 1
    assert not any(platform.node() and platform.node() == value for value in facts.values())


def test_files_hold_what_was_measured(tmp_path):
    write_page(tmp_path, [PartResult("fake", (fake_table(),)), PartResult("old", text="x")], {})
    read = read_parts(tmp_path / "bench.json")
    assert read == [PartResult("fake", (fake_table(),)), PartResult("old", text="x")]
    with (tmp_path / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 5
    assert rows[3]["column"] == "slow ×"
    assert (rows[5]["row"], rows[5]["column"], rows[5]["value"]) == ("nodes 10", "quick", "10.0")


def test_changes_are_told_as_they_are_and_by_the_limit():
    """Twice the cost on a machine whose limit took twice as long is no change."""
    before = [PartResult("fake", (fake_table(),))]
    rows = tuple(
        {**row, "quick": 2 * row["quick"], "slow": None, "pass": 1.0} for row in fake_table().rows
    )
    now = [PartResult("fake", (CostTable(fake_table().title, COLUMNS, rows, "other words"),))]
    found = changes(before, now)
    assert [(change.row, change.now / change.before) for change in found] == [
        ("nodes 1", 2),
        ("nodes 10", 2),
        ("nodes 100", 2),
    ]
    assert {change.against_limit for change in found} == {1}
    assert change_table(found).rows[0].cells[3:] == ("1.00", "2.00", "2.00×", "1.00×")


def test_another_table_is_no_change():
    assert (
        changes([PartResult("fake", (fake_table(),))], [PartResult("new", (fake_table(),))]) == []
    )


def test_the_command_measures_compares_and_writes(tmp_path, monkeypatch, capsys):
    parts = {"messages": fake_part(), "spaces": printing_part()}

    def load(name, package=None):
        return parts[name.rsplit(".", 1)[1].removesuffix("_cost")]

    monkeypatch.setattr(command, "import_module", load)
    assert command.main(["messages", "spaces", "--output", str(tmp_path / "a")]) == 0
    parts["messages"] = fake_part(factor=3.0)
    again = ["messages", "--quick", "--output", str(tmp_path / "b")]
    assert command.main([*again, "--compare", str(tmp_path / "a" / "bench.json")]) == 0
    said = capsys.readouterr().out
    assert "What changed" in said
    assert "3.00×" in said
    page = (tmp_path / "b" / "index.html").read_text()
    assert "What changed" in page
    assert "bench messages --quick" in page
    files = [str(tmp_path / name / "bench.json") for name in "ab"]
    assert command.main(["--compare", files[0], "--now", files[1]]) == 0
    assert "3.00×" in capsys.readouterr().out
    assert json.loads((tmp_path / "a" / "bench.json").read_text())["parts"][1]["name"] == "spaces"


@pytest.mark.parametrize("text", ["", "[]", '{"parts": [{}]}', '{"parts": 3}'])
def test_a_file_that_is_none_of_ours_is_refused(tmp_path, text):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"is no bench\.json that this command wrote"):
        read_parts(path)


def test_a_missing_file_to_compare_with_is_said_before_measuring(tmp_path, capsys):
    assert command.main(["messages", "--compare", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.PARTS)
def test_every_part_measures_or_reports(name):
    part = importlib.import_module(f"simulations.bench.{name}_cost")
    assert hasattr(part, "measure") or hasattr(part, "report")
