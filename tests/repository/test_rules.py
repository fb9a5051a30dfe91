"""The house's rules: who may import whom, what an import may start, what the copied folder needs."""

import ast
import configparser
import graphlib
import importlib
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import mpi_util

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import rooms  # noqa: E402

PACKAGE = ROOT / "mpi_util"
FRAMEWORKS = {
    "torch",
    "tensorflow",
    "keras",
    "gymnasium",
    "safetensors",
    "scipy",
    "torchrl",
    "stable_baselines3",
}
# Each room of mpi_util, and what it may import of the others. Files at the top are rooms of their own.
BELOW_COLLECTIVES = "errors host launch arrays arrays.adapters program"
KNOWN_NAMES = {name: BELOW_COLLECTIVES + " collectives" for name in ("mpi_tools", "mpi_pytorch", "mpi_tf")}
ROOMS = KNOWN_NAMES | {
    "errors": "",
    "host": "errors",
    "launch": "errors host",
    "arrays": "errors host",
    "arrays.adapters": "errors host arrays",
    "program": "errors host launch arrays",
    "collectives": BELOW_COLLECTIVES,
    "runs": BELOW_COLLECTIVES + " collectives",
    "weight_sync": BELOW_COLLECTIVES + " collectives",
    "integrations": BELOW_COLLECTIVES + " collectives",
    "logx": "runs",
    "run_utils": "runs",
    "serialization_utils": "runs",
    "plot": "runs",
    "spinup": "errors logx mpi_pytorch mpi_tools",
    "run": "arrays runs errors run_utils",
    "test_policy": "runs errors arrays logx",
    "__main__": "",
}
MOST_FLOORS, MOST_AT_THE_TOP = 9, 12


def imports(path: Path, inside_functions: bool = True) -> set[str]:
    """Modules that a file imports; relative ones as their name within mpi_util."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if inside_functions else tree.body
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." if node.level else ""
            found |= {base + (node.module or alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_mpi_util_imports_relatively_and_no_framework_at_module_level(path):
    roots = {name.partition(".")[0] for name in imports(path)}
    assert not roots & {"mpi_util", "policies", "train"}
    at_top = {name.partition(".")[0] for name in imports(path, inside_functions=False)}
    of_folder = {"integrations": path.stem.replace("sb3", "stable_baselines3"), "spinup": "torch"}
    library = {of_folder.get(path.parent.name, "")}
    assert not at_top & FRAMEWORKS - library and "mpi4py" not in at_top
    assert roots - FRAMEWORKS <= {"", "numpy", "mpi4py"} | sys.stdlib_module_names


def in_package(room: str) -> str:
    return room.removeprefix("mpi_util").removeprefix(".")


def test_rooms_import_only_what_they_may():
    graph = {
        in_package(room): targets for room, targets in rooms.room_imports().items() if room.startswith("mpi_util.")
    }
    assert graph.keys() == ROOMS.keys()
    for room, targets in graph.items():
        unexpected = {in_package(t) for t in targets} - set(ROOMS[room].split())
        assert not unexpected, f"{room} imports {unexpected}"


def test_neither_modules_nor_rooms_import_in_a_circle():
    rooms.floors(rooms.imports())
    assert len(rooms.floors(rooms.room_imports())) <= MOST_FLOORS


def test_the_check_finds_a_circle():
    with pytest.raises(graphlib.CycleError):
        rooms.floors({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_few_modules_at_the_top_none_hidden_by_a_name():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP
    for name in ("mpi_util", "mpi_util.collectives", "mpi_util.launch", "mpi_util_weight_sync", "mpi_util_spinup"):
        package = importlib.import_module(name)
        for module in rooms.modules():
            parent, _, last = module.rpartition(".")
            if parent == name:
                assert isinstance(getattr(package, last, importlib), types.ModuleType), module


def test_every_room_is_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {room for room in rooms.room_imports() if rooms.modules()[room].name == "__init__.py"}
    assert set(setup["options"]["packages"].split()) == folders and setup["options"]["py_modules"] == "train"


def test_the_drawing_is_that_of_the_code():
    assert rooms.drawing() in rooms.DOCUMENT.read_text(), "run: python docs/rooms.py"


def test_every_room_says_what_it_does_and_where_to_begin():
    for room in rooms.room_imports():
        path = rooms.modules()[room]
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert text, room
        if PACKAGE in path.parent.parents:
            assert "ead first" in text and "ay import" in text, room


def test_policies_know_neither_mpi_nor_each_others_framework():
    """A backend sees its own library, and the others see none; a folder is not the library of the same name."""
    library = {"numpy": "threadpoolctl", "torch": "torch", "tf": "tensorflow keras"}
    for path in (ROOT / "policies").rglob("*.py"):
        names = imports(path)
        roots = {name.partition(".")[0] for name in names}
        backend = path.parent.name if path.parent.name != "policies" else ""
        own = set(library.get(backend, "").split())
        assert roots - own <= {"policies", "numpy"} | sys.stdlib_module_names, path
        of_backends = {name.split(".")[1] for name in names if name.startswith("policies.")} & library.keys()
        assert of_backends <= {backend}, path
    assert {path.parent.name for path in (ROOT / "policies").glob("*/__init__.py")} == library.keys()


def mpi_util_names(path: Path) -> set[str]:
    """What a file uses of mpi_util: modules as `mpi_util.<module>`, names of the package as they are."""
    found = {name for name in imports(path) if name.startswith("mpi_util.")}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mpi_util":
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "mpi_util":
            found |= {alias.name for alias in node.names}
    return found


def test_trainer_and_train_use_public_names_and_point_one_way():
    public = {
        *mpi_util.__all__,
        "__version__",
        "mpi_util_spinup.logx",
        "mpi_util_spinup.mpi_pytorch",
        "mpi_util_weight_sync",
    }
    folder = sorted((ROOT / "trainer").glob("*.py"))
    for path in [*folder, ROOT / "train.py"]:
        assert mpi_util_names(path) <= public, path
        ours = {name.partition(".")[0] for name in imports(path)} & {"policies", "trainer", "train", "tests"}
        assert ours <= ({"trainer"} if path.name == "train.py" else {"policies", "trainer"}), path
        top = {name.partition(".")[0] for name in imports(path, inside_functions=False)}
        assert not top & {"torch", "tensorflow", "keras"}, path


def fresh(code: str, cwd: Path = ROOT, env: dict | None = None) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, text=True).stdout


def test_import_starts_nothing():
    loaded = fresh("import sys, mpi_util; mpi_util.rank; print(*sys.modules)").split()
    assert not {"mpi4py.MPI", "torch", "tensorflow", "gymnasium"} & set(loaded)
    before = fresh("import os; print(sorted(os.environ))")
    assert fresh("import os, mpi_util; print(sorted(os.environ))") == before


def test_a_worker_needs_no_framework():
    loaded = fresh("import sys, trainer.rollout, trainer.config; print(*sys.modules)")
    assert not {"torch", "tensorflow", "scipy", "policies.numpy"} & set(loaded.split())


def test_the_numpy_backend_needs_no_other():
    loaded = fresh("import sys, policies.learners, policies.numpy; print(*sys.modules)")
    assert not {"torch", "tensorflow", "policies.torch", "policies.tf"} & set(loaded.split())


def test_the_folder_works_where_it_is_copied(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "vendored" / "mpi_util", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "vendored" / "__init__.py").touch()
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "import numpy as np\n"
        "from vendored import mpi_util\n"
        "if mpi_util.mpi_fork(3) == 'parent': sys.exit()\n"
        "d = mpi_util.rank0_accum_batches({'x': np.full(2, mpi_util.rank)})\n"
        "mpi_util.print0(d['x'].tolist())\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0, 0, 1, 1, 2, 2]\n", done.stderr
