"""`python -m mpi_util doctor` on machines that lack something: what is BAD, what is only noted, and always in time."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from conftest import OPEN_MPI, ROOT, mpi_environment, run
from launching import CLEAN_ENVIRONMENT

START_S = 1.0  # of an interpreter on a busy machine
NAMES = (
    "python", "mpi_util", "rank variables", "cores", "MPI library", "launcher", "shared memory", "/dev/shm",
    "2 ranks",
)  # fmt: skip


class Answer(dict):
    """The checks by name, with the exit status."""

    status = 0

    def bad(self) -> set[str]:
        return {name for name, check in self.items() if check["state"] == "BAD"}

    def notes(self) -> set[str]:
        return {name for name, check in self.items() if check["state"] == "NOTE"}


def doctor(python=sys.executable, before=(), within=30.0, **environment) -> Answer:
    """Its --json, within a time; the keys never vary, and whatever is not OK says what to do."""
    began = time.monotonic()
    environment = CLEAN_ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | {k: str(v) for k, v in environment.items()}
    command = [*before, str(python), "-m", "mpi_util", "doctor", "--json", "--timeout", str(within)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - began < within + START_S, done.stdout
    assert not done.stderr, done.stderr
    answer = json.loads(done.stdout)
    found = Answer(answer["checks"])
    found.status = done.returncode
    assert tuple(found) == NAMES and answer["ok"] == (not found.status) == (not found.bad())
    for name, check in found.items():
        assert set(check) == {"state", "found", "do", "data"} and check["found"], name
        assert check["do"] or check["state"] == "OK", name
    return found


def test_a_machine_that_is_well(mpi):
    found = doctor(**mpi_environment(mpi))
    assert found.status == 0, found
    family = {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi]
    assert family in found["MPI library"]["found"] and family in found["launcher"]["found"]
    trial = found["2 ranks"]["data"]
    assert trial["right"] is True and trial["ranks"] == trial["sharing"] == 2 and trial["bytes"] == 62_000_000
    assert found["cores"]["data"]["usable"] == len(os.sched_getaffinity(0))


def test_the_table():
    done = run([sys.executable, "-m", "mpi_util", "doctor", "--timeout", 30], timeout=60)
    assert done.status == 0 and done.out.endswith("\nA job will run here.\n"), done.out + done.err
    lines = [line for line in done.out.splitlines() if re.match("OK|NOTE|BAD", line)]
    assert [re.split(r" {2,}", line)[1] for line in lines] == list(NAMES)
    assert "62 MB gathered and broadcast" in lines[-1]


@pytest.mark.slow
def test_this_process_loads_neither_mpi_nor_a_framework():
    code = (
        "import sys; from mpi_util.doctor import checks; checks.examine(30)\n"
        "print({'mpi4py.MPI', 'torch', 'tensorflow', 'gymnasium'} & set(sys.modules))"
    )
    done = run([sys.executable, "-c", code], timeout=30)
    assert done.out == "set()\n", done.err


# ---- what ends every job


def test_no_mpi4py(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\")")
    found = doctor(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert found.status == 1 and "pip install mpi4py mpich" in found["MPI library"]["found"] + found["2 ranks"]["found"]


needs_open_mpi = pytest.mark.skipif(not OPEN_MPI.exists(), reason="no Open MPI beside MPICH")


@pytest.fixture
def bare(tmp_path):
    """An interpreter without packages but NumPy: its python."""
    import numpy

    venv.create(tmp_path / "bare", symlinks=True)
    site = next((tmp_path / "bare" / "lib").glob("python*")) / "site-packages"
    for part in ("numpy", "numpy.libs"):
        if (source := Path(numpy.__file__).parents[1] / part).exists():
            (site / part).symlink_to(source)
    return tmp_path / "bare" / "bin" / "python"


def test_a_new_environment(bare):
    found = doctor(bare)
    assert found.status == 1 and {"MPI library", "2 ranks"} == found.bad()
    assert "`pip install mpi4py mpich`" in found["MPI library"]["found"]
    assert found["launcher"]["state"] == "NOTE"


@pytest.mark.slow
def test_no_mpi_library():
    found = doctor(MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert found.bad() == {"MPI library", "2 ranks"} and "/nowhere/libmpi.so" in found["MPI library"]["found"]


@needs_open_mpi
def test_no_launcher(bare):
    """The library lies alone, as where only the runtime of a distribution's package is installed."""
    import mpi4py

    (bare.parents[1] / "lib" / "alone").mkdir()
    library = shutil.copy(OPEN_MPI.resolve(), bare.parents[1] / "lib" / "alone" / "libmpi.so.40")
    sites = next((bare.parents[1] / "lib").glob("python*")) / "site-packages"
    for part in (Path(mpi4py.__file__).parent, *Path(mpi4py.__file__).parents[1].glob("mpi4py-*")):
        (sites / part.name).symlink_to(part)
    folders = f"{OPEN_MPI.parent}{os.pathsep}{OPEN_MPI.parent / 'openmpi'}"
    found = doctor(bare, MPI4PY_LIBMPI=library, LD_LIBRARY_PATH=folders, PATH="/usr/bin:/bin")
    assert found.bad() == {"launcher", "2 ranks"}, found
    assert "no mpiexec of Open MPI" in found["launcher"]["found"]


def test_rank_variables_that_were_left_behind(mpi):
    stale = {"PMI_RANK": "0", "PMI_SIZE": "1"} if mpi == "mpich" else {"OMPI_COMM_WORLD_RANK": 0, "PMIX_RANK": 0}
    found = doctor(**mpi_environment(mpi), **stale)
    assert found.status == 0 and next(iter(stale)) in found["rank variables"]["found"]


def test_variables_of_a_rank_that_a_launcher_has_left():
    found = doctor(PMI_RANK=0, PMI_SIZE=4, PMI_FD=9)
    assert found.bad() == {"2 ranks"} and "rank variables" in found.notes()
    assert found["rank variables"]["do"].endswith("unset PMI_FD PMI_RANK PMI_SIZE")
    assert "variables that were left behind" in found["2 ranks"]["found"]


def test_variables_of_a_rank_that_make_no_sense():
    found = doctor(PMI_RANK="x")
    assert found.bad() == {"rank variables", "2 ranks"}
    assert found["rank variables"]["found"] == found["2 ranks"]["found"].removeprefix("mpi_util: LaunchError: ")
    assert "PMI_RANK is 'x'" in found["rank variables"]["found"]


@pytest.mark.slow_if(name="MPI_UTIL_UPDATE_THREADS")
@pytest.mark.parametrize(
    ("name", "bad"), [("MPI_UTIL_WATCHDOG", {"2 ranks"}), ("MPI_UTIL_UPDATE_THREADS", {"cores", "2 ranks"})]
)
def test_a_setting_that_the_ranks_refuse(name, bad):
    found = doctor(**{name: "x"})
    assert found.bad() == bad, found
    for check in bad:
        assert re.search(rf"(^|(rank \d|mpi_util): UsageError: ){name} is .*; got 'x'$", found[check]["found"])


def test_few_open_files():
    found = doctor(before=["sh", "-c", 'ulimit -n 20; exec "$0" "$@"'])
    assert found.bad() == {"2 ranks"} and "they need 40 open files" in found["2 ranks"]["found"]
    command = f"ulimit -n 8; {sys.executable} -m mpi_util doctor"
    done = run(["sh", "-c", command], timeout=30)
    (line,) = done.err.splitlines()
    assert done.status == 1 and "Too many open files" in line and "ulimit" in line


@pytest.mark.slow
def test_a_wrong_number_of_cores():
    found = doctor(MPI_UTIL_CORES="many")
    assert "cores" in found.bad() and "'many'" in found["cores"]["found"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["library", pytest.param("launcher", marks=needs_open_mpi)])
def test_what_hangs_does_not_hang_it(what, tmp_path, bare):
    tools = tmp_path / "tools"
    tools.mkdir()
    name = {"launcher": "mpiexec"}.get(what, what)
    for tool in (tools / name, *((bare.parent / name,) if what == "launcher" else ())):
        tool.write_text("#!/bin/sh\nexec sleep 1000\n")
        tool.chmod(0o755)
    extra = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    if what == "library":
        (tmp_path / "mpi4py.py").write_text("import time; time.sleep(1000)")
        extra["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    if what == "launcher":
        sites = next(path for path in map(Path, sys.path) if (path / "mpi4py").exists())
        extra |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{sites}", "MPI4PY_LIBMPI": OPEN_MPI}
    found = doctor(bare if what == "launcher" else sys.executable, within=5.0, **extra)
    assert found.bad() == {"2 ranks"} and "no answer within" in found["2 ranks"]["found"]
    time.sleep(0.5)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tools) not in left, left


# ---- what a job survives


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "do"),
    [("size=64m", 0, "shm-size"), ("size=4k", 1, "shm-size"), ("size=1m", 1, "shm-size"), ("ro", 1, "remount,rw")],
)
def test_a_small_dev_shm(options, status, do):
    mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    allowed = os.geteuid() == 0 and shutil.which("unshare")
    if not allowed or subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting a small /dev/shm needs root and mount namespaces")
    found = doctor(before=["unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" "$@"'])
    assert found.status == status and found["/dev/shm"]["state"] == "NOTE", found
    assert do in found["/dev/shm"]["do"] and found["shared memory"]["state"] == "OK"
    assert found.bad() == ({"2 ranks"} if status else set())


def test_no_memfd(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.memfd_create\n")
    found = doctor(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert found.status == 0 and {"shared memory", "2 ranks"} <= found.notes(), found
    assert "memfd_create" in found["shared memory"]["found"] and found["2 ranks"]["data"]["sharing"] == 1


@pytest.mark.slow
def test_one_core():
    found = doctor(before=["taskset", "-c", str(min(os.sched_getaffinity(0)))])
    assert found.status == 0 and "cores" in found.notes() and found["cores"]["data"] == {"usable": 1}
