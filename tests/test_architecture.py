"""The rules of the house, one test each: docs/architecture.md says what the rooms are."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "gems_flwr"
TESTS = ROOT / "tests"

# A lower storey never imports from a higher one when it is loaded.
STOREYS = [
    ("simulations",),
    ("tools",),
    ("strategies",),
    ("stages",),
    ("node", "carriers"),
    ("core", "spaces", "neurons"),
]
MATHEMATICS = {"averaging", "compression", "lifts", "merging", "networks", "secure"}
# What no single room answers for.
WHOLE = {"battery", "deployment", "device", "simulations", "multi_model"}


def modules(folder):
    return sorted(folder.rglob("*.py"))


EVERYTHING = modules(LIBRARY) + modules(ROOT / "simulations")
TREES = {path: ast.parse(path.read_text()) for path in EVERYTHING}


def is_for_types_alone(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(tree, *, when_loaded=False):
    """Return what a module imports; `when_loaded`, without types and what functions import."""
    found, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if not (when_loaded and (is_for_types_alone(node) or isinstance(node, ast.FunctionDef))):
            waiting += ast.iter_child_nodes(node)
    return found


def dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rooms_of(names):
    """Return the rooms that imported names are in."""
    split = [name.split(".") for name in names]
    return {each[1] if each[0] == "gems_flwr" else each[0] for each in split if len(each) > 1}


def test_the_library_imports_neither_the_experiments_nor_hydra():
    for path in modules(LIBRARY):
        roots = {name.split(".")[0] for name in imports(TREES[path])}
        assert not roots & {"simulations", "hydra", "omegaconf", "matplotlib", "ray", "tests"}, path


def test_the_mathematics_knows_neither_flower_nor_messages():
    upstairs = {"flwr", *(room for storey in STOREYS[:-1] for room in storey), "core"}
    for path in modules(LIBRARY):
        if path.relative_to(LIBRARY).parts[0].removesuffix(".py") in MATHEMATICS:
            assert not rooms_of(imports(TREES[path], when_loaded=True)) & upstairs, path
        elif path.relative_to(LIBRARY).parts[0] in ("spaces", "neurons"):
            assert path.name == "question.py" or "flwr" not in rooms_of(imports(TREES[path])), path


def test_no_room_imports_from_a_storey_above():
    floors = {room: floor for floor, rooms in enumerate(STOREYS) for room in rooms}
    for path, tree in TREES.items():
        parts = path.relative_to(ROOT).parts
        room = parts[1] if parts[0] == "gems_flwr" else parts[0]
        used = rooms_of(imports(tree, when_loaded=True))
        wrong = {each for each in used if floors.get(each, 99) < floors.get(room, -1)}
        assert not wrong, path


def test_the_records_that_all_messages_share_are_named_in_one_module():
    keys = {"server-round", "num-examples", "run-seed"}
    for path in modules(LIBRARY):
        strings = {n.value for n in ast.walk(TREES[path]) if isinstance(n, ast.Constant)}
        shared = keys & {each for each in strings if isinstance(each, str)}
        assert not shared or path == LIBRARY / "core" / "records.py", path


# The rooms of Flower that are public; of each, what its ``__all__`` lists.
FLOWERS_ROOMS = (
    *("flwr.app", "flwr.clientapp", "flwr.clientapp.mod", "flwr.simulation"),
    *("flwr.serverapp", "flwr.serverapp.strategy"),
)


def test_what_flower_does_not_make_public_is_imported_in_one_place():
    home = LIBRARY / "core" / "flower.py"
    public = {f"{room}.{name}" for room in FLOWERS_ROOMS for name in import_module(room).__all__}
    for path, tree in TREES.items():
        private = {n for n in imports(tree) if n.split(".")[0] == "flwr"} - public
        assert bool(private) == (path == home), path
    others = "\n".join(path.read_text() for path in EVERYTHING if path != home)
    for name in import_module("gems_flwr.core.flower").__all__:
        assert re.search(rf"\b{name}\b", others), f"{name} is taken from Flower and not used"


def test_one_module_decides_on_devices():
    """No other one asks PyTorch what there is, nor names another device than the CPU."""
    asks = re.compile(
        r"torch\.(cuda|mps|xpu|backends\.mps|accelerator)\."
        r"|torch_xla\b.*\(|import torch_xla|torch\.device\(['\"](?!cpu)"
    )
    assert [path for path in EVERYTHING if asks.search(path.read_text())] == [
        LIBRARY / "devices.py"
    ]


def test_nothing_unpickles():
    for path, tree in TREES.items():
        assert not {n.split(".")[0] for n in imports(tree)} & {"pickle", "dill", "joblib"}, path
        text = path.read_text()
        assert "torch.load" not in text, path
        assert "allow_pickle=True" not in text, path


def test_the_strategies_folder_of_the_top_level_is_the_librarys():
    link = ROOT / "strategies"
    assert link.is_symlink()
    assert link.resolve() == (LIBRARY / "strategies").resolve()


def test_a_rooms_face_lists_what_can_be_imported_from_it():
    for path in EVERYTHING:
        if path.name == "__init__.py":
            room = import_module(dotted(path))
            for name in getattr(room, "__all__", ()):
                assert hasattr(room, name), f"{dotted(path)}.{name}"


# In one process, since torch and Flower take long: only ours are forgotten before each import.
IMPORT_EACH = """
import importlib, json, sys
failed = {}
for name in sys.argv[1:]:
    for other in list(sys.modules):
        if other.split(".")[0] in ("gems_flwr", "simulations"):
            del sys.modules[other]
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
print(json.dumps(failed))
"""


def test_every_module_can_be_imported_first():
    """What another module has imported before cannot help: a cycle of imports shows."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *map(dotted, EVERYTHING)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def test_what_a_user_gets_wrong_is_an_error_that_the_commands_know():
    """See `errors.OptionError`; elsewhere a ValueError is about arrays, and becomes one of ours."""
    for path in modules(LIBRARY):
        room = path.relative_to(LIBRARY).parts[0]
        if room in ("stages", "tools") or path.parent == LIBRARY / "strategies":
            raised = {
                ast.unparse(node.exc.func)
                for node in ast.walk(TREES[path])
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
            }
            assert not raised & {"ValueError", "TypeError", "Exception", "RuntimeError"}, path


def test_every_room_has_a_folder_of_tests_and_every_folder_of_tests_a_room():
    tested = {path.parent.name for path in TESTS.rglob("test_*.py") if path.parent != TESTS}
    rooms = {path.parent.name for path in LIBRARY.glob("*/*.py")}
    assert rooms <= tested
    assert tested <= rooms | WHOLE | {path.stem for path in LIBRARY.glob("*.py")}


def test_no_test_imports_from_another_and_no_two_have_one_name():
    """What tests share lies in ``tests/helpers`` and ``conftest.py``."""
    paths = modules(TESTS)
    for path in paths:
        used = imports(ast.parse(path.read_text()))
        assert not [name for name in used if name.split(".")[0].startswith("test")], path
    assert len({path.name for path in paths}) == len(paths)
