"""The bench: one table of ratios, written as Markdown too, and a part that fails is named."""

import pytest

from simulations.bench import __main__ as command
from simulations.bench.__main__ import Row


def growing(quick):
    """Ours grows with the size, the obvious way with its square; the limit is constant."""
    for size in (1, 10):
        yield Row("toy", "work", f"{size} nodes", size, 2.0 * size, 4.0 * size**2, 0.5)


def test_a_row_has_ratios_and_an_exponent():
    first, second = command.table([*growing(True)]).rows
    assert first.cells[3:] == ("2", "4", "0.5", "2", "4", "–")
    assert second.cells[3:] == ("20", "400", "0.5", "20", "40", "1.00")
    # Kinds are compared with their own; what was not measured is a dash.
    alone = Row("toy", "other", "1 node", 1, 2.0)
    assert command.table([alone]).rows[0].cells[4:] == ("–",) * 5


def test_a_part_that_fails_is_named_and_the_others_are_written(monkeypatch, tmp_path, capsys):
    def broken(quick):
        raise RuntimeError("no disk")
        yield

    monkeypatch.setattr(command, "PARTS", {"broken": broken, "toy": growing})
    assert command.main(["--output", str(tmp_path / "deep" / "bench.md")]) == 1
    assert "broken failed: RuntimeError: no disk" in capsys.readouterr().out
    page = (tmp_path / "deep" / "bench.md").read_text()
    assert "|work|10 nodes|20|400|0.5|20|40|1.00|" in page
    assert command.main(["toy", "--output", str(tmp_path / "bench.md")]) == 0


def test_a_part_that_does_not_exist_is_one_line(capsys):
    assert command.main(["speed"]) == 2
    said = capsys.readouterr().err
    assert "there is no 'speed'; there are messages" in said
    assert said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", ["messages", "packing", "sums", "sampling"])
def test_a_part_measures_what_it_names(part):
    rows = [*command.PARTS[part](True)]
    assert rows
    assert all(row.part == part and row.ours > 0 for row in rows)
