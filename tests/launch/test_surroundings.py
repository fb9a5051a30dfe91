"""What a program and its machine do around a job: hooks, timers, handlers, titles, archives, cleaners, other MPI."""

import os
import shutil
import subprocess
import sys
import time
import zipapp

import psutil
import pytest
from conftest import ROOT, mpi_environment, run
from launching import CLEAN_ENVIRONMENT, TIMEOUT_S

HEAD = """
import os, shutil, signal, subprocess, sys, time
import mpi_util
if mpi_util.mpi_fork(2) == "parent":
    sys.exit()
"""


@pytest.fixture
def start(tmp_path, mpi):
    """start(program, ...): what a program of two ranks has left."""

    def started(program, head=HEAD, **environment):
        (tmp_path / "program.py").write_text(head + program)
        return run([sys.executable, tmp_path / "program.py"], TIMEOUT_S, mpi_environment(mpi) | environment)

    return started


def test_a_hook_that_is_set_later_shows_the_error_once_and_the_job_ends_at_once(start):
    program = """
sys.excepthook = lambda kind, error, trace: print("pretty", error, file=sys.stderr)
mpi_util.all_sum(1)
if mpi_util.rank:
    with mpi_util.during("rollout", episode=3):
        raise ValueError("bad")
mpi_util.all_sum(1)
"""
    began = time.monotonic()
    done = start(program)
    assert done.status == 1 and time.monotonic() - began < 8
    lines = (
        "rank 1 (phase rollout, episode 3): uncaught exception",
        "pretty bad",
        "mpi_util: rank 1 ended with status 1",
    )
    assert len(found := done.err.splitlines()) == 3 and all(map(str.startswith, found, lines)), done.err


def test_a_timer_that_runs_on_does_not_end_a_finished_job(start):
    program = """
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
mpi_util.all_sum(1)
"""
    assert (start(program).status, start(program).err) == (0, "")


def test_a_stop_request_outlives_the_handlers_of_others(start):
    program = """
stop = mpi_util.StopRequest()
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda *_: print("node: shutting down", flush=True))
for i in range(200):
    if mpi_util.all_sum(int(bool(stop))):
        break
    if i == 2 and mpi_util.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.02)
mpi_util.print0("stopped after", i)
sys.exit(stop.status)
"""
    done = start(program)
    assert done.status == 143 and done.out == "stopped after 3\n", done.err


def test_what_shows_no_environment_ends_with_the_job(start, tmp_path):
    program = """
nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
child = subprocess.Popen(["env", "-i", "sleep", "300"], **nothing)  # shows as little as one that sets its title
open(f"{os.environ['NOTES']}/{mpi_util.rank}", "w").write(str(child.pid))
mpi_util.all_sum(1)
"""
    assert start(program, NOTES=str(tmp_path)).status == 0
    for pid in [int((tmp_path / f"{rank}").read_text()) for rank in (0, 1)]:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_record_that_has_gone_is_no_failure(start):
    program = """
mpi_util.all_sum(1)
if mpi_util.rank == 0:
    print("run", flush=True)
    shutil.rmtree(os.environ["MPI_UTIL_JOB"])
mpi_util.all_sum(1)
"""
    done = start(program, HEAD.replace("mpi_fork(2)", "mpi_fork(2, max_restarts=2)"))
    assert (done.status, done.out, done.err) == (0, "run\n", "")


def test_mpi_programs_in_a_rank_are_alone_or_are_spawned(start):
    program = """
from mpi4py import MPI
mpi_util.all_sum(1)
alone = "from mpi4py import MPI; print('world of', MPI.COMM_WORLD.size)"
print(subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True).stdout, end="", flush=True)
child = "from mpi4py import MPI; comm = MPI.Comm.Get_parent(); comm.gather(MPI.COMM_WORLD.size, 0); comm.Disconnect()"
comm = MPI.COMM_WORLD.Spawn(sys.executable, ["-c", child], maxprocs=2)
got = comm.gather(None, MPI.ROOT if mpi_util.rank == 0 else MPI.PROC_NULL)
comm.Disconnect()
mpi_util.print0(got, mpi_util.all_sum(1))
"""
    done = start(program)
    assert (done.status, sorted(done.out.splitlines())) == (0, ["[2, 2] 2", "world of 1", "world of 1"]), done.err


def test_a_program_in_an_archive_is_refused(tmp_path):
    app = tmp_path / "app"
    shutil.copytree(ROOT / "mpi_util", app / "mpi_util", ignore=shutil.ignore_patterns("__pycache__"))
    (app / "__main__.py").write_text(HEAD)
    zipapp.create_archive(app, tmp_path / "app.pyz")
    environment = {name: value for name, value in CLEAN_ENVIRONMENT.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "app.pyz"] if sys.version_info >= (3, 11) else [sys.executable, "app.pyz"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode and "mpi_util is in the archive" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_what_prints_at_the_end_of_each_python_process_does_no_harm(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import atexit; atexit.register(print, 'bye')")
    done = start("print('sum', mpi_util.all_sum(1))", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.status == 0 and sorted(done.out.splitlines()) == ["bye"] * 3 + ["sum 2"] * 2


LATE = """
import os, sys, time
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    time.sleep(4) if sys.argv[1:] else os.kill(os.getpid(), 19)
import mpi_util
if mpi_util.mpi_fork(2) == "parent":
    sys.exit()
"""


def test_a_rank_that_does_not_come_is_named_with_its_stack(tmp_path, mpi):
    (tmp_path / "program.py").write_text(LATE)
    done = run(
        [sys.executable, tmp_path / "program.py", "late"], TIMEOUT_S, mpi_environment(mpi) | {"MPI_UTIL_WATCHDOG": "2"}
    )
    assert done.status == 0
    head, _, *stack = done.err.splitlines()
    assert head.startswith("mpi_util: after 2") and "not all ranks have come: rank 1 is above mpi_fork." in head
    assert any("program.py" in line and "line 4" in line for line in stack), done.err


def test_the_watchdog_may_end_a_job_to_which_a_rank_does_not_come(tmp_path, mpi):
    (tmp_path / "program.py").write_text(
        LATE.replace("import mpi_util\n", "import mpi_util\nmpi_util.watchdog(2, kill=True)\n")
    )
    done = run([sys.executable, tmp_path / "program.py"], TIMEOUT_S, mpi_environment(mpi))
    (line,) = done.err.splitlines()
    assert done.status == 1 and "rank 1 is above mpi_fork; process " in line and "is stopped, `kill -CONT " in line


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_variables_of_slurm_without_its_programs_start_ranks_here(start):
    names = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    slurm = dict.fromkeys(names, "1") | {"SLURM_JOB_NODELIST": "node1", "SLURM_NODELIST": "node1"}
    slurm |= {"SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": "2"}
    assert start("print('sum', mpi_util.all_sum(1))", **slurm).out == "sum 2\n" * 2
