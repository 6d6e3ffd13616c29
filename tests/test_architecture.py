"""The house keeps its rooms apart: imports go one way."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "gems_flwr"

# What may know of Flower; everything else in the library is mathematics.
SHELL = ("strategies", "tracking", "server", "client", "runtime", "wire", "__main__.py")
# A lower room never imports from a higher one.
STOREYS = [
    "simulations",
    "gems_flwr.strategies",
    "gems_flwr.tracking",
    "gems_flwr.server",
    "gems_flwr.client",
    "gems_flwr.runtime",
    "gems_flwr.wire",
]


def imports(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(folder):
    return sorted(p for p in folder.rglob("*.py"))


EVERYTHING = modules(LIBRARY) + modules(ROOT / "simulations")


def dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", modules(LIBRARY), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_library_imports_neither_the_experiments_nor_hydra(path):
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & {"simulations", "hydra", "omegaconf", "matplotlib", "ray", "tests"}


@pytest.mark.parametrize("path", modules(LIBRARY), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_mathematics_does_not_know_flower(path):
    if path.relative_to(LIBRARY).parts[0] in (*SHELL, "__init__.py"):
        pytest.skip("part of the Flower shell, or the list of public names")
    assert not [name for name in imports(path) if name.split(".")[0] == "flwr"]
    shell = {f"gems_flwr.{room}" for room in SHELL}
    used = {".".join(name.split(".")[:2]) for name in imports(path)}
    assert not used & shell


def test_spaces_are_built_from_below():
    """A space knows neither who builds nor who intersects it, and a node intersects nothing."""
    higher = ("intersect", "neuron_merging", "networks")
    rooms = {"spaces": ("radii", "moments", *higher), "radii": higher, "moments": higher}
    for room, above in rooms.items():
        for path in modules(LIBRARY / room):
            used = {name.split(".")[1] for name in imports(path) if name.startswith("gems_flwr.")}
            assert not used & set(above), path


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_room_imports_from_a_storey_above(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    floor = next((i for i, s in enumerate(STOREYS) if (name + ".").startswith(s + ".")), None)
    if floor is None:
        pytest.skip("not on a storey")
    above = STOREYS[:floor]
    # What runs on a node and what runs on the server share what lies below them, and nothing else.
    if STOREYS[floor] in ("gems_flwr.strategies", "gems_flwr.tracking", "gems_flwr.server"):
        above = [*above, "gems_flwr.client"]
    wrong = [i for i in imports(path) if any((i + ".").startswith(s + ".") for s in above)]
    assert not wrong


def test_record_keys_are_spelled_out_in_the_wire_module_alone():
    keys = {"server-round", "num-examples", "run-seed", "space-request", "class-sums", "verify"}
    keys |= {"neuron-request", "frozen-layers", "multi-model", "local-loss", "update-norm"}
    keys |= {"statistics-request", "tell-name"}
    for path in modules(LIBRARY):
        if path.parent.name == "wire":
            continue
        tree = ast.parse(path.read_text())
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        assert not keys & {s for s in strings if isinstance(s, str)}, path


# The rooms of Flower that are public; of each, what its ``__all__`` lists.
FLOWERS_ROOMS = (
    *("flwr.app", "flwr.clientapp", "flwr.clientapp.mod", "flwr.simulation"),
    *("flwr.serverapp", "flwr.serverapp.strategy"),
)


def flowers_private_names(path):
    public = {f"{room}.{name}" for room in FLOWERS_ROOMS for name in import_module(room).__all__}
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] == "flwr" and name not in public]


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_flower_does_not_make_public_is_imported_in_one_place(path):
    """And its messages are numbered there alone, for which there is no public way either."""
    private = flowers_private_names(path)
    if path == LIBRARY / "runtime" / "flower_internals.py":
        assert private
    else:
        assert private == []
        assert '_message_id"' not in path.read_text()


def test_what_is_taken_from_flowers_insides_is_there_and_used():
    internals = import_module("gems_flwr.runtime.flower_internals")
    users = [p.read_text() for p in EVERYTHING if p.stem != "flower_internals"]
    for name in internals.__all__:
        assert hasattr(internals, name)
        assert any(re.search(rf"\b{name}\b", text) for text in users), name


_ASKS = re.compile(
    r"torch\.(cuda|mps|xpu|backends\.mps|accelerator)\."
    r"|torch_xla\b.*\(|import torch_xla|torch\.device\(['\"](?!cpu)"
)


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda p: str(p.relative_to(ROOT)))
def test_one_module_decides_on_devices(path):
    """Nobody else asks PyTorch what there is, nor names another device than the CPU."""
    text = path.read_text()
    if path != LIBRARY / "devices.py":
        assert not _ASKS.search(text)


def test_the_module_that_decides_on_devices_asks():
    assert _ASKS.search((LIBRARY / "devices.py").read_text())


def test_nothing_unpickles():
    for path in EVERYTHING:
        text = path.read_text()
        assert not {n.split(".")[0] for n in imports(path)} & {"pickle", "dill", "joblib"}, path
        assert "torch.load" not in text, path
        assert "allow_pickle=True" not in text, path


def test_the_strategies_folder_of_the_top_level_is_the_librarys():
    link = ROOT / "strategies"
    assert link.is_symlink()
    assert link.resolve() == (LIBRARY / "strategies").resolve()


def test_no_two_modules_have_the_same_name():
    homes = defaultdict(list)
    for path in EVERYTHING:
        if not path.stem.startswith("__"):
            homes[path.stem].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


# Rooms whose own name is where their contents are imported from.
SHOP_WINDOWS = {
    "gems_flwr",
    "gems_flwr.strategies",
    "simulations.data",
    "simulations.partitions",
}


@pytest.mark.parametrize(
    "path", [p for p in EVERYTHING if p.name == "__init__.py"], ids=lambda p: dotted(p)
)
def test_a_room_is_a_docstring_and_things_are_imported_from_where_they_are_defined(path):
    if dotted(path) in SHOP_WINDOWS:
        pytest.skip("a list of names")
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def strategies_in(path):
    from gems_flwr import strategies

    tree = ast.parse(path.read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return classes & set(strategies.__all__), classes - set(strategies.__all__)


def test_the_room_of_strategies_holds_one_strategy_per_file_and_nothing_else():
    from gems_flwr import strategies

    found = []
    for path in (LIBRARY / "strategies").glob("*.py"):
        if path.name != "__init__.py":
            own, others = strategies_in(path)
            assert len(own) == 1, path
            assert not {name for name in others if not name.startswith("_")}, path
            found += own
    # A strategy with files of its own has a room, and one of the files is called like the room.
    for room in (p for p in (LIBRARY / "strategies").iterdir() if (p / "__init__.py").exists()):
        own = [name for path in room.glob("*.py") for name in strategies_in(path)[0]]
        assert own, room
        assert strategies_in(room / f"{room.name}.py")[0] == set(own)
        found += own
    assert sorted(found) == sorted(strategies.__all__)


def test_every_module_can_be_imported_first():
    """What another module has imported before cannot help: a cycle of imports shows."""
    script = ROOT / "tests" / "helpers" / "import_each.py"
    done = subprocess.run(
        [sys.executable, script, *map(dotted, EVERYTHING)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {}


# What a user can set is refused by an error that the commands know; see `errors.OptionError`.
@pytest.mark.parametrize(
    "path",
    [
        *modules(LIBRARY / "strategies"),
        *modules(LIBRARY / "networks"),
        LIBRARY / "server" / "settings.py",
        LIBRARY / "server" / "stopping.py",
        LIBRARY / "client" / "limits.py",
        LIBRARY / "server" / "gems_options.py",
        LIBRARY / "wire" / "requests.py",
        LIBRARY / "wire" / "space_requests.py",
    ],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_what_a_user_gets_wrong_is_an_error_of_ours(path):
    raised = {
        node.exc.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
    }
    assert not raised & {"ValueError", "TypeError", "Exception", "RuntimeError"}


# --- the tests mirror the rooms ---------------------------------------------------------------

TESTS = ROOT / "tests"
# What no single room answers for.
WHOLE = {"battery", "deployment", "device", "simulations"}
NO_TESTS = {"helpers", "artifacts"}


def rooms(folder):
    return {path.name for path in folder.iterdir() if path.is_dir() and list(path.glob("*.py"))}


def test_every_room_has_a_folder_of_tests_and_every_folder_of_tests_a_room():
    tested = {path.parent.name for path in TESTS.rglob("test_*.py") if path.parent != TESTS}
    assert rooms(LIBRARY) <= tested
    assert tested - rooms(LIBRARY) <= WHOLE | rooms(ROOT / "simulations")
    assert not tested & NO_TESTS


@pytest.mark.parametrize("path", modules(TESTS), ids=lambda p: str(p.relative_to(TESTS)))
def test_no_test_imports_from_another(path):
    """What tests share lies in ``tests/helpers`` and ``conftest.py``."""
    assert not [name for name in imports(path) if name.split(".")[0].startswith("test")]


def test_no_two_modules_of_tests_have_one_name():
    names = [path.name for path in modules(TESTS)]
    assert len(names) == len(set(names))
