"""The root of the package is its public API: lazy, documented, and each name with an example."""

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gems_flwr
from gems_flwr import strategies

ROOT = Path(__file__).resolve().parent.parent
NAMES = gems_flwr.__all__
HOMES = {n: f"gems_flwr.{room}" for room, each in gems_flwr._NAMES.items() for n in each.split()}
MOST_NAMES = 45


def test_importing_the_package_imports_nothing_heavy():
    code = """
import sys, gems_flwr
print([name for name in sys.modules if name.split(".")[0] in (
    "torch", "flwr", "numpy", "sklearn", "scipy", "safetensors", "ray", "hydra")],
    [name for name in sys.modules if name.startswith("gems_flwr.")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[] ['gems_flwr.faces']"


def test_public_names_are_few_and_what_their_modules_define():
    assert len(NAMES) <= MOST_NAMES
    for name in NAMES:
        value, home = getattr(gems_flwr, name), importlib.import_module(HOMES[name])
        assert value is getattr(home, name)
        assert value.__module__.startswith(home.__name__)
    assert set(strategies.__all__) <= set(NAMES)


def test_editors_and_the_interpreter_see_the_same_names():
    tree = ast.parse(Path(gems_flwr.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for line in block.body:
        for alias in line.names:
            assert alias.asname == alias.name
            seen[alias.name] = line.module
    assert seen == HOMES
    assert set(NAMES) <= set(dir(gems_flwr))


def test_an_unknown_name_is_an_attribute_error_that_says_so():
    with pytest.raises(AttributeError, match="'gems_flwr' has no attribute 'Gem'"):
        gems_flwr.Gem  # noqa: B018


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_runs(name):
    text = inspect.cleandoc(getattr(gems_flwr, name).__doc__ or "")
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert test.examples, f"the docstring of {name} has no example"
    assert re.search(r"^Examples\n--------$", text, re.MULTILINE), "under the heading Examples"
    said = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    result = runner.run(test, out=said.append)
    assert not result.failed, "".join(said)


def test_the_api_page_has_every_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: gems_flwr\.(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)
    for path in re.findall(r"^::: (gems_flwr\.\w+\.\S+)$", page, re.MULTILINE):
        room, _, name = path.rpartition(".")
        assert name in importlib.import_module(room).__all__, path


def test_what_readers_are_shown_can_be_imported():
    """From the root, or from the face of a room."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]
    for path in pages:
        text = path.read_text()
        assert not re.findall(r"^\s*import gems_flwr", text, re.MULTILINE), path
        shown = re.findall(r"^\s*from (gems_flwr\S*) import ([^#\n]+)", text, re.MULTILINE)
        for room, names in shown:
            public = importlib.import_module(room).__all__
            assert {name.strip() for name in names.split(",")} <= set(public), (path, names)
