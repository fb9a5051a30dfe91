"""Both type checkers pass the package and the examples, and find the mistakes that users of it make."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

old = np.lib.NumpyVersion(np.__version__) < "2.3.0"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(old, reason="for mypy --strict NumPy's ndarray has needed no arguments since 2.3"),
]

# Each line with a comment is a mistake; the others are how the names are used.
PROGRAM = """
import sys
from typing import Any

import numpy as np

import mpi_util

if mpi_util.mpi_fork(2) == "parnt":  # mistake: the word
    sys.exit()
if mpi_util.mpi_fork(2) == "parent":
    sys.exit()
print(mpi_util.rnak)  # mistake: the name
rank: int = mpi_util.rank
name: str = mpi_util.nworkers  # mistake: a number
config: Any = mpi_util.tf_config


def collect(i: int) -> dict[str, np.ndarray]:
    return {"obs": np.zeros((i, 3))}


episodes = mpi_util.deal(40)
mine = [collect(i) for i in episodes]
batch: dict[str, np.ndarray] = mpi_util.rank0_accum_batches(mine, index=episodes.taken)
other: dict[str, int] = mpi_util.rank0_accum_batches(mine, index=episodes.taken)  # mistake: arrays
batch = mpi_util.rank0_accum_batches(mine[0])
batch = mpi_util.all_accum_batches(mine[0])
everything: list[dict[str, np.ndarray]] = mpi_util.rank0_gather(collect(1))
mean: np.ndarray = mpi_util.all_mean(batch["obs"])
word: str = mpi_util.bcast("word")
number: int = mpi_util.bcast("word")  # mistake: a word
if mpi_util.all_sum(bool(rank)):
    mpi_util.fail("so all end here")
"""


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """check("mypy", ...): runs the checker, and returns its status and what it printed."""
    cache = tmp_path_factory.mktemp("mypy")  # shared by all, which saves half a minute

    def run(tool: str, *arguments: object, cwd: Path = ROOT) -> tuple[int, str]:
        options = {"mypy": ["--strict", "--cache-dir", cache], "pyright": ["--pythonpath", sys.executable]}[tool]
        command = [sys.executable, "-m", tool, *options, *arguments]
        environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "MYPYPATH": str(ROOT)}
        done = subprocess.run(
            [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_package_and_examples_pass(check, tool):
    status, text = check(tool)
    assert status == 0, text


@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_mistakes_are_found_and_nothing_else(check, tool, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    settings = ["--config-file", ROOT / "setup.cfg"] if tool == "mypy" else ["--project", ROOT / "pyproject.toml"]
    _, text = check(tool, *settings, program)
    found = {int(number) for number in re.findall(r"program\.py:(\d+)(?::\d+)?(?: -|:) error", text)}
    assert found == {i for i, line in enumerate(PROGRAM.splitlines(), 1) if "# mistake" in line}, text


@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_a_copy_of_the_folder_passes_without_settings(check, tool, tmp_path):
    shutil.copytree(ROOT / "mpi_util", tmp_path / "mpi_util")
    status, text = check(tool, *(["--config-file=", "mpi_util"] if tool == "mypy" else ["."]), cwd=tmp_path)
    assert status == 0, text
