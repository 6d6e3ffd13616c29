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
from gems_flwr import errors, strategies

ROOT = Path(__file__).resolve().parent.parent
NAMES = [name for name in gems_flwr.__all__ if name != "__version__"]
# Temporary, until the branches that write them are merged: names that do not resolve yet, and
# names without an example yet.
NOT_YET = {"Ball", "Cone", "Ellipsoid", "Neurons", "Gems", "LayerwiseGems"}


def public(name):
    if name in NOT_YET and not hasattr(gems_flwr, name):
        pytest.skip(f"{name} is written on another branch")
    return getattr(gems_flwr, name)


def test_importing_the_package_imports_nothing_heavy():
    code = """
import sys, time
start = time.perf_counter()
import gems_flwr
seconds = time.perf_counter() - start
heavy = sorted({name.split(".")[0] for name in sys.modules} & {
    "torch", "flwr", "numpy", "sklearn", "scipy", "safetensors", "ray", "hydra"})
others = sorted(name for name in sys.modules if name.startswith("gems_flwr."))
print(heavy, others)
print(f"import gems_flwr: {seconds * 1000:.1f} ms", file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    print(done.stderr)  # shown by pytest -rP
    assert done.stdout.strip() == "[] []"


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_what_its_module_defines(name):
    value = public(name)
    home = importlib.import_module(f"gems_flwr.{gems_flwr._HOMES[name]}")
    assert value is getattr(home, name)
    assert value.__module__ == home.__name__


def test_editors_and_the_interpreter_see_the_same_names():
    tree = ast.parse(Path(gems_flwr.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for line in block.body:
        assert isinstance(line, ast.ImportFrom)
        for alias in line.names:
            assert alias.asname == alias.name
            seen[alias.name] = line.module.removeprefix("gems_flwr.")
    assert seen == gems_flwr._HOMES
    assert set(NAMES) <= set(dir(gems_flwr))


def test_an_unknown_name_is_an_attribute_error_that_says_so():
    with pytest.raises(AttributeError, match="'gems_flwr' has no attribute 'Gem'"):
        gems_flwr.Gem  # noqa: B018
    with pytest.raises(ImportError):
        from gems_flwr import Gem  # noqa: F401


def test_all_strategies_and_all_errors_are_public():
    assert set(strategies.__all__) <= set(NAMES)
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_runs(name):
    value = public(name)
    text = inspect.cleandoc(value.__doc__ or "")
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    if not test.examples and name in NOT_YET:
        pytest.skip(f"the example of {name} is written on another branch")
    assert test.examples, f"the docstring of {name} has no example"
    assert re.search(r"^Examples\n--------$", text, re.MULTILINE), "under the heading Examples"
    said = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not result.failed, "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_examples_import_from_the_root_alone(name):
    test = doctest.DocTestParser().get_doctest(
        inspect.cleandoc(public(name).__doc__ or ""), {}, name, None, 0
    )
    for example in test.examples:
        assert not re.search(r"(from|import) gems_flwr\.", example.source)


def test_the_api_page_has_every_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: gems_flwr\.(\S+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *(ROOT / "examples").rglob("*.py")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_readers_are_shown_public_names_only(path):
    text = path.read_text()
    assert not re.findall(r"^\s*(?:from gems_flwr\.\S+ import|import gems_flwr\.).*$", text, re.M)
    for names in re.findall(r"^\s*from gems_flwr import ([^#\n]+)", text, re.MULTILINE):
        for name in names.split(","):
            assert name.strip() in NAMES
