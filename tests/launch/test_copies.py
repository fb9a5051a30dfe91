"""A copy of the folder without what may be deleted: one machine works, and what is missing is named."""

import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, mpi_environment, run

DELETED = ("cluster", "doctor")


@pytest.fixture
def copy(tmp_path) -> Path:
    """A folder with `vendored.mpi_util`, without cluster/ and doctor/."""
    there = tmp_path / "vendored" / "mpi_util"
    shutil.copytree(ROOT / "mpi_util", there, ignore=shutil.ignore_patterns("__pycache__", *DELETED))
    (there.parent / "__init__.py").touch()
    return tmp_path


def run_copy(copy: Path, mpi: str, *arguments: str, **environment: str):
    return run([sys.executable, *arguments], 60, {"PYTHONPATH": ""} | mpi_environment(mpi) | environment, copy)


def test_four_ranks_on_one_machine(copy, mpi):
    (copy / "program.py").write_text(
        "import sys\n"
        "from vendored import mpi_util\n"
        "if mpi_util.mpi_fork(4) == 'parent': sys.exit()\n"
        "batch = mpi_util.rank0_gather(mpi_util.rank)\n"
        "mpi_util.print0(batch, mpi_util.all_sum(1), mpi_util.nslots())\n"
    )
    done = run_copy(copy, mpi, "program.py")
    assert (done.status, done.out) == (0, "[0, 1, 2, 3] 4 4\n"), done.err


def test_one_rank_in_an_allocation_of_several_machines(copy):
    code = "from vendored import mpi_util; print(mpi_util.mpi_fork(1))"
    done = run_copy(copy, "mpich", "-c", code, SLURM_JOB_NUM_NODES="2")
    assert (done.status, done.out, done.err) == (0, "child\n", "")


@pytest.mark.parametrize(
    ("arguments", "environment", "by"),
    [
        ("4, hosts='h1:2,h2:2'", {}, "hosts="),
        ("hostfile='hosts.txt'", {}, "hostfile="),
        ("4", {"MPI_UTIL_HOSTS": "h1:2,h2:2"}, "MPI_UTIL_HOSTS"),
    ],
)
def test_several_machines_are_one_clear_line(copy, arguments, environment, by):
    done = run_copy(
        copy, "mpich", "-c", f"from vendored import mpi_util; mpi_util.mpi_fork({arguments})", **environment
    )
    line = f"LaunchError: {by} names hosts, but mpi_util/cluster/, which is needed for that, is missing\n"
    assert (done.status, done.out) == (1, "") and done.err.endswith(line) and done.err.count("\n") == 1


def test_doctor_says_what_is_missing(copy):
    done = run_copy(copy, "mpich", "-m", "vendored.mpi_util", "doctor")
    assert (done.status, done.out) == (2, "")
    assert done.err.endswith("; this copy of mpi_util lacks that folder\n") and done.err.count("\n") == 1


def test_a_rank_loads_nothing_of_the_waiting_parent():
    code = "import sys, mpi_util; mpi_util.mpi_fork(1); mpi_util.nslots()\nprint(*sys.modules)"
    loaded = {name for name in run([sys.executable, "-c", code], 30).out.split() if name.startswith("mpi_util.")}
    assert {name for name in loaded if ".launch." in name} == {"mpi_util.launch.api"}
    assert not {name for name in loaded if name.startswith(("mpi_util.cluster", "mpi_util.doctor"))}
