"""The house's rules: who may import whom, what an import may load, what the copied folder needs."""

import ast
import graphlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import mpi_util

PACKAGE = Path(mpi_util.__file__).parent
ROOT = PACKAGE.parent
sys.path.insert(0, str(ROOT / "docs"))
import rooms  # noqa: E402

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "gymnasium", "safetensors", "scipy", "torchrl"}
FRAMEWORKS |= {"stable_baselines3"}
# Each room of mpi_util, and the rooms that it may import, lowest first.
BELOW_CLUSTER = "errors host arrays ranks collectives launch"
ROOMS = {
    "errors": "",
    "host": "errors",
    "arrays": "errors host",
    "ranks": "errors host arrays",
    "collectives": "errors host arrays ranks",
    "launch": "errors host arrays ranks collectives",
    "cluster": BELOW_CLUSTER,
    "doctor": f"{BELOW_CLUSTER} cluster",
    "simulators": BELOW_CLUSTER,
    "compat_2017": "errors arrays ranks collectives",
    "": f"{BELOW_CLUSTER} compat_2017 doctor simulators",  # `import mpi_util`
}
FOR_SEVERAL_MACHINES = {"collectives", "launch"}  # may load cluster/ inside functions
ADAPTERS = " ".join(f"arrays/adapters/{name}.py" for name in ("jax", "keras", "pytorch", "tensorflow", "tf1"))
DELETABLE = ["cluster", "doctor", "simulators serve.py", "compat_2017.py", ADAPTERS]
# Modules that a function of a module which they import loads: where there are several machines, or torchrl is loaded.
# And the adapters of frameworks, each where an object of its framework is met.
LOADED_LATE = (rooms.LOADED_FROM_BELOW, "mpi_util_weight_sync.torchrl")
LOADED_LATE += ("mpi_util.arrays.adapters.",)
# Each package, and those that it may import.
PACKAGES = {
    "mpi_util": "",
    "mpi_util_spinup": "mpi_util",
    "mpi_util_weight_sync": "mpi_util",
    "mpi_util_sb3": "mpi_util",
    "policies": "",
    "trainer": "mpi_util mpi_util_spinup policies",
    "train": "mpi_util trainer",
}
MOST_ROOMS, MOST_FLOORS, MOST_ARROWS = 14, 7, 44
MOST_FILES_LOADED, MOST_LINES_LOADED = 30, 4000  # by `import mpi_util`


def imports(path: Path, inside_functions: bool = True) -> set[str]:
    """Modules that a file imports; relative ones with a dot in front."""
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


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


# ---- mpi_util


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_mpi_util_imports_relatively_and_no_framework(path):
    at_top = roots(imports(path, inside_functions=False))
    assert not at_top & FRAMEWORKS and "mpi4py" not in at_top
    assert roots(imports(path)) - FRAMEWORKS <= {"", "numpy", "mpi4py"} | sys.stdlib_module_names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room):
    may = {*ROOMS[room].split()} | ({"cluster"} if room in FOR_SEVERAL_MACHINES else set())
    found = {in_package(target) for target in rooms.between(rooms.room_of)[f"mpi_util.{room}".rstrip(".")]}
    assert found <= may, f"{room} imports {found - may}"


def in_package(room: str) -> str:
    return room.removeprefix("mpi_util").removeprefix(".")


def test_the_list_of_rooms_is_complete():
    assert {in_package(room) for room in rooms.between(rooms.room_of)} == ROOMS.keys()


def test_cluster_is_loaded_in_few_places_and_inside_functions():
    for room in FOR_SEVERAL_MACHINES:
        paths = sorted((PACKAGE / room).rglob("*.py"))
        assert not [path for path in paths if "cluster" in ".".join(imports(path, inside_functions=False))]
        assert len([path for path in paths if "cluster" in ".".join(imports(path))]) <= 2


def test_only_adapters_know_a_framework():
    for path in sorted((PACKAGE / "arrays").glob("*.py")):
        assert not [name for name in imports(path) if "adapters" in name], path


def test_no_modules_rooms_or_packages_import_in_a_circle():
    late = {name for name in rooms.modules() if name.startswith(LOADED_LATE)}
    rooms.floors({name: targets - (late) for name, targets in rooms.imports().items() if name not in late})
    rooms.floors({name: targets & late for name, targets in rooms.imports().items() if name in late})
    for group in (rooms.package_of, rooms.room_of):
        rooms.floors(rooms.downward(rooms.between(group)))


def test_the_picture_is_small():
    graph = rooms.between(rooms.room_of)
    assert len(graph) <= MOST_ROOMS and sum(map(len, graph.values())) <= MOST_ARROWS
    assert len(rooms.floors(rooms.downward(graph))) <= MOST_FLOORS


def test_the_check_finds_a_circle():
    with pytest.raises(graphlib.CycleError):
        rooms.floors({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_names_of_modules_in_strings_are_found():
    def found(code: str) -> set[str]:
        return {rooms._module(name) for name in rooms._strings(ast.parse(code), "mpi_util.launch")} - {""}

    assert found("run([sys.executable, '-m', 'mpi_util', 'doctor'])") == {"mpi_util", "mpi_util.__main__"}
    assert found("run('-m', f'{package}.doctor.checks')") == {"mpi_util.doctor.checks"}
    assert found("import_module('.api', __package__)") == {"mpi_util.launch.api"}
    assert found("import_module(f'.{names[k]}', here); names = {'a': 'ranks.state'}") == {"mpi_util.ranks.state"}
    assert found("print('api', 'train', 'trainer')") == set()


def test_no_module_is_hidden_by_a_name():
    for name in ("mpi_util", "mpi_util.collectives", "mpi_util.launch", "mpi_util_weight_sync", "mpi_util_spinup"):
        package = importlib.import_module(name)
        for module in rooms.modules():
            parent, _, last = module.rpartition(".")
            if parent == name:
                assert isinstance(getattr(package, last, importlib), types.ModuleType), module


def test_the_pictures_are_those_of_the_code():
    text = rooms.DOCUMENT.read_text()
    assert rooms.with_drawings(text) == text, "run: python docs/rooms.py"


def test_every_room_says_what_it_does_and_where_to_begin():
    for room in rooms.between(rooms.room_of).keys() - {"mpi_util"}:
        path = rooms.modules()[room]
        text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        assert text, room
        if path.name == "__init__.py":
            assert "ead first" in text and "ay import" in text, room


# ---- packages


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package):
    found = rooms.between(rooms.package_of)
    assert found.keys() == PACKAGES.keys() and found[package] <= {*PACKAGES[package].split()}


def test_satellites_use_only_what_is_never_deleted():
    for module, targets in rooms.imports().items():
        if module.startswith("mpi_util_"):
            deletable = r"mpi_util\.(cluster|doctor|simulators|serve|compat_2017|.*\.tf1)\b"
            assert not [t for t in targets if re.match(deletable, t)], module


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_mpi_util_names_no_other_package(path):
    """Not in a message or a comment either: whoever copies the folder has none of them."""
    assert not re.findall(
        r"\bmpi_util_(?:spinup|weight_sync|sb3)|\btrainer\b|\btrain\.py|\bpolicies\b", path.read_text()
    )


def test_policies_know_neither_mpi_nor_each_others_framework():
    """A backend sees its own library, and the others see none; a folder is not the library of the same name."""
    library = {"numpy": "threadpoolctl", "torch": "torch", "tf": "tensorflow keras"}
    for path in (ROOT / "policies").rglob("*.py"):
        names = imports(path)
        backend = path.parent.name if path.parent.name != "policies" else ""
        own = set(library.get(backend, "").split())
        assert roots(names) - own <= {"policies", "numpy"} | sys.stdlib_module_names, path
        of_backends = {name.split(".")[1] for name in names if name.startswith("policies.")} & library.keys()
        assert of_backends <= {backend}, path
    assert {path.parent.name for path in (ROOT / "policies").glob("*/__init__.py")} == library.keys()


def mpi_util_names(path: Path) -> set[str]:
    """What a file uses of mpi_util and its satellites: modules by their names, names of mpi_util as they are."""
    found = {name for name in imports(path) if re.match(r"mpi_util(\.|_)", name)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mpi_util":
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "mpi_util":
            found |= {alias.name for alias in node.names}
    return found


def test_trainer_and_train_use_public_names():
    public = {*mpi_util.__all__, "__version__"}
    public |= {f"mpi_util_spinup.{name}" for name in ("files", "logx", "run_utils", "table")}
    for path in [*sorted((ROOT / "trainer").glob("*.py")), ROOT / "train.py"]:
        assert mpi_util_names(path) <= public, path
        assert not roots(imports(path, inside_functions=False)) & {"torch", "tensorflow", "keras"}, path


# ---- what an import loads


def fresh(code: str, cwd: Path = ROOT, env: dict | None = None) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, text=True).stdout


def test_import_starts_nothing():
    loaded = fresh("import sys, mpi_util; mpi_util.rank; print(*sys.modules)").split()
    assert not {"mpi4py.MPI", "torch", "tensorflow", "gymnasium"} & set(loaded)
    before = fresh("import os; print(sorted(os.environ))")
    assert fresh("import os, mpi_util; print(sorted(os.environ))") == before


def test_import_loads_little():
    loaded = fresh("import sys, mpi_util; print(*(n for n in sys.modules if n.split('.')[0] == 'mpi_util'))").split()
    lines = {name: len(rooms.modules()[name].read_text().splitlines()) for name in loaded}
    assert len(lines) <= MOST_FILES_LOADED and sum(lines.values()) <= MOST_LINES_LOADED
    deletable = {"cluster", "doctor", "simulators", "compat_2017"}
    assert not {name.split(".")[1] for name in loaded if "." in name} & deletable


def test_public_names_are_found_before_they_are_loaded():
    code = "import mpi_util; names = {*mpi_util.__all__}; print(names <= {*dir(mpi_util)})\n"
    assert fresh(code + "from mpi_util import *; print(names <= {*globals()})") == "True\nTrue\n"
    assert "mpi_fork(n: " in fresh("import mpi_util, pydoc; print(pydoc.plain(pydoc.render_doc(mpi_util)))")
    with pytest.raises(AttributeError, match="no attribute 'rnak'"):
        mpi_util.rnak  # noqa: B018


def test_a_worker_needs_no_framework():
    loaded = fresh("import sys, trainer.rollout, trainer.config; print(*sys.modules)")
    assert not {"torch", "tensorflow", "scipy", "policies.numpy"} & set(loaded.split())


def test_the_numpy_backend_needs_no_other():
    loaded = fresh("import sys, policies.learners, policies.numpy; print(*sys.modules)")
    assert not {"torch", "tensorflow", "policies.torch", "policies.tf"} & set(loaded.split())


# ---- the folder that people copy


@pytest.mark.parametrize("deleted", ["", *DELETABLE, " ".join(DELETABLE)])
def test_a_copy_works_without_what_may_be_deleted(tmp_path, deleted):
    copy = tmp_path / "vendored"  # else what is installed would stand in for what is deleted
    shutil.copytree(PACKAGE, copy / "mpi_util", ignore=shutil.ignore_patterns("__pycache__"))
    for name in deleted.split():
        path = copy / "mpi_util" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (copy / "__init__.py").touch()
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "import numpy as np\n"
        "from vendored import mpi_util\n"
        "from vendored.mpi_util import *\n"
        "if mpi_util.mpi_fork(3) == 'parent': sys.exit()\n"
        + "sys.modules['jax'] = sys\n"
        * ("jax.py" in deleted)  # loaded, but not used with mpi_util
        + "weights = {'w': np.full(3, mpi_util.rank + 1.0)}\n"
        "rank0_bcast_wts(weights)\n"
        "d = mpi_util.rank0_accum_batches({'x': np.full(2, mpi_util.rank), 'w': weights['w'][:1]})\n"
        "mpi_util.print0(d['x'].tolist(), d['w'].tolist(), all_sum(1))\n"
        "[*mpi_util.deal(4)]\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0, 0, 1, 1, 2, 2] [1.0, 1.0, 1.0] 3\n", done.stderr
    if "cluster" in deleted:
        environment["MPI_UTIL_HOSTS"] = "h1:2,h2:2"
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode and done.stderr.count("\n") == 1 and "cluster" in done.stderr, done.stderr
