"""The house's rules: who may import whom, what an import may start, what the copied folder needs."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mpi_util"
FRAMEWORKS = {
    "torch",
    "tensorflow",
    "keras",
    "gymnasium",
    "rich",
    "safetensors",
    "scipy",
    "torchrl",
    "stable_baselines3",
}
# a module may import those that stand before it
LAYERS = [
    "errors",
    "cores tree waiting shared",
    "threads pickles",
    "launch",
    "failure machine",
    "channel",
    "comm",
    "adapters console",
]
LAYERS += ["transport", "board", "gather", "weights reductions", "averaging", "weight_sync"]


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
    library = {path.stem.replace("sb3", "stable_baselines3")} if path.parent.name == "integrations" else set()
    assert not at_top & FRAMEWORKS - library and "mpi4py" not in at_top
    assert roots - FRAMEWORKS <= {"", "numpy", "mpi4py"} | sys.stdlib_module_names


def test_layers_point_one_way():
    order = {name: i for i, layer in enumerate(LAYERS) for name in layer.split()}
    for name, height in order.items():
        path = PACKAGE / f"{name}.py"
        for imported in imports(path if path.exists() else PACKAGE / name / "__init__.py"):
            other = imported.strip(".").partition(".")[0]
            if imported.startswith(".") and other in order and other != name:
                assert order[other] < height, f"{name} imports {other}"


def test_policies_know_neither_mpi_nor_each_others_framework():
    for path in (ROOT / "policies").rglob("*.py"):
        roots = {name.partition(".")[0] for name in imports(path)}
        assert not roots & {"mpi_util", "mpi4py", "train"}, path
        framework = {"pytorch": "torch", "tf": "tensorflow"}.get(path.parent.name)
        top = {name.partition(".")[0] for name in imports(path, inside_functions=False)}
        assert not top & ({"torch", "tensorflow", "keras"} - {framework}), path
        other = {"pytorch": "policies.tf", "tf": "policies.pytorch"}.get(path.parent.name)
        assert not other or not any(name.startswith(other) for name in imports(path)), path


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
    loaded = fresh("import sys, policies.rollout, policies.config; print(*sys.modules)")
    assert not {"torch", "tensorflow", "scipy", "rich"} & set(loaded.split())


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
