"""What a program and its machine do around a job: hooks, timers, handlers, titles, archives, cleaners, other MPI."""

import os
import re
import shutil
import subprocess
import sys
import time
import zipapp

import psutil
import pytest
from conftest import LAUNCHER, ROOT, mpi_environment, run
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
    assert head.startswith("mpi_util: after 2") and "not all ranks have come: rank 1: above mpi_fork." in head
    assert any("program.py" in line and "line 4" in line for line in stack), done.err


def test_the_watchdog_may_end_a_job_to_which_a_rank_does_not_come(tmp_path, mpi):
    (tmp_path / "program.py").write_text(
        LATE.replace("import mpi_util\n", "import mpi_util\nmpi_util.watchdog(6, kill=True)\n")
    )
    done = run([sys.executable, tmp_path / "program.py"], TIMEOUT_S, mpi_environment(mpi))
    (line,) = done.err.splitlines()
    assert done.status == 1 and "rank 1: above mpi_fork; process " in line and "is stopped, `kill -CONT " in line


def test_a_colon_is_an_argument_as_others_and_other_ranks_have_no_input(tmp_path, mpi):
    words = [":", "touch", "no:program"]
    program = HEAD + "mpi_util.msg(sys.argv[1:], repr(sys.stdin.read()) if mpi_util.rank else '')"
    done = run([sys.executable, "-c", program, *words], TIMEOUT_S, mpi_environment(mpi))
    assert sorted(done.out.splitlines()) == [f"[rank 0] {words} ", f"[rank 1] {words} ''"]


def test_a_single_rank_has_come_without_mpi(tmp_path):
    (tmp_path / "program.py").write_text(
        "import time, mpi_util\nmpi_util.watchdog(4, kill=True)\nmpi_util.mpi_fork(1, max_restarts=1, exit=True)\n"
        "time.sleep(6)\nprint(mpi_util.all_sum(1))\n"
    )
    done = run([sys.executable, tmp_path / "program.py"], TIMEOUT_S)
    assert (done.status, done.out, done.err) == (0, "1\n", "")


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_variables_of_slurm_without_its_programs_start_ranks_here(start):
    names = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    slurm = dict.fromkeys(names, "1") | {"SLURM_JOB_NODELIST": "node1", "SLURM_NODELIST": "node1"}
    slurm |= {"SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": "2"}
    assert start("print('sum', mpi_util.all_sum(1))", **slurm).out == "sum 2\n" * 2


# ---- what the machine, or the program, takes away


def run_within(prepare, tmp_path, mpi, program="mpi_util.all_sum(1)", **environment):
    """A program of two ranks after a command of a shell in mount namespaces of its own."""
    if os.getuid() or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mounting needs root and namespaces")
    (tmp_path / "program.py").write_text(HEAD + program)
    shell = ["unshare", "--mount", "sh", "-c", f'{prepare} && exec "$@"', "sh"]
    launcher = f"{os.path.dirname(LAUNCHER[mpi])}{os.pathsep}{os.environ['PATH']}"  # found by /proc as a rule
    environment |= mpi_environment(mpi) | {"PATH": launcher}
    return run([*shell, sys.executable, tmp_path / "program.py"], TIMEOUT_S, environment)


def assert_one_line(done, text, status=1):
    assert done.status == status and done.out == "" and done.err.count("\n") == 1 and text in done.err, done.err


def test_a_machine_without_proc(tmp_path, mpi):
    done = run_within("mount -t tmpfs none /proc", tmp_path, mpi)
    assert_one_line(done, "LaunchError: mpi_fork sees its ranks in /proc, which is not mounted here")
    mount = "mount -t proc -o hidepid=2 proc /proc"
    assert run_within(mount, tmp_path, mpi, "mpi_util.print0(mpi_util.all_sum(1))").out == "2\n"


def test_a_full_folder_for_temporary_files(tmp_path, mpi):
    (folder := tmp_path / "small").mkdir()
    done = run_within(f"mount -t tmpfs -o size=64k tmpfs {folder}", tmp_path, mpi, TMPDIR=str(folder))
    assert_one_line(
        done, f"LaunchError: cannot start 2 ranks: {folder} has less than 256 kB free; set TMPDIR to another"
    )


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_too_few_processes_are_allowed(tmp_path, mpi):
    """Of a user who may read what root may: the interpreter is root's."""
    rights = "+dac_override,+dac_read_search"
    few = f"setpriv --reuid 54321 --inh-caps=-all,{rights} --ambient-caps=-all,{rights} --bounding-set=-all,{rights}"
    done = run_within("true && set -- " + few + ' prlimit --nproc=9 "$@"', tmp_path, mpi, TMPDIR=str(tmp_path))
    assert_one_line(done, "LaunchError: cannot start 2 ranks: they need 10 more processes, and `ulimit -u` allows less")


def test_a_program_that_closes_all_files_above_mpi_fork(start, mpi):
    done = start("mpi_util.print0(mpi_util.all_sum(1))", "import os\nos.closerange(3, 1024)\n" + HEAD)
    assert done.out == "2\n" if mpi == "openmpi" else "the program has closed files that it did not" in done.err
    assert done.err.count("\n") == 2 * bool(done.status) and bool(done.status) == (mpi == "mpich")


def test_a_rank_that_closes_all_files_ends_the_job(start):
    done = start("import os\nmpi_util.all_sum(1)\nos.closerange(3, 1024)\nmpi_util.all_sum(1)\n")
    assert done.status and done.err.rstrip().endswith("; all 2 ranks were stopped")


def test_a_rank_without_memory_ends_the_job(start):
    program = """
import resource
import numpy as np
mpi_util.all_sum(1)
if mpi_util.rank:
    resource.setrlimit(resource.RLIMIT_AS, (300 << 20, -1))
for _ in range(100):
    kept = mpi_util.rank0_accum_batches({"x": np.ones((1_000_000, 8))})
"""
    done = start(program)
    end = r"mpi_util: rank 1 ended with status 1 \((Memory|OS)Error.*allocate.*\); all 2 ranks were stopped\n$"
    assert done.status == 1 and re.search(end, done.err), done.err


def test_a_signal_to_the_launcher_is_no_ranks(start):
    program = """
mpi_util.all_sum(1)
pid = os.getpid()
while (fields := open(f"/proc/{pid}/stat").read().split()) and not fields[1].startswith(("(mpiexec", "(prterun")):
    pid = int(fields[3])
if mpi_util.rank == 0:
    os.kill(pid, signal.SIGTERM)
time.sleep(20)
"""
    assert_one_line(start(program), "mpi_util: the launcher (or each rank) was killed by signal 15 (SIGTERM)", 143)


@pytest.mark.slow_unless(rank="0", mpi="mpich")
@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_is_refused_by_one_process(start, mpi, rank):
    done = start("", RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost")
    line = "torchrun, accelerate or deepspeed has started this program 2 times (WORLD_SIZE), and each of them is alone;"
    assert done.status == 1 and done.err.count("\n") == (rank == "0") and (line in done.err) == (rank == "0"), done.err


@pytest.mark.slow
def test_coverage_of_all_processes(tmp_path, mpi):
    pytest.importorskip("coverage")
    (tmp_path / "program.py").write_text(
        HEAD + "if mpi_util.rank:\n    mpi_util.all_sum(1)\nelse:\n    mpi_util.all_sum(1)\n"
    )
    for command in (
        ["run", "-p", "program.py"],
        ["combine", "-q"],
        ["report", "--include=program.py", "--fail-under=100"],
    ):
        done = run([sys.executable, "-m", "coverage", *command], TIMEOUT_S, mpi_environment(mpi), cwd=tmp_path)
        assert done.status == 0 and not done.err, done.out + done.err
