"""Variables of a launcher that are another's, or left over; ranks that never come to mpi_fork."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import OPEN_MPI, mpi_environment, run
from launching import CLEAN_ENVIRONMENT, TIMEOUT_S

from mpi_util.host import reap
from mpi_util.host.reap import JOB_VARIABLE, belongs, end_job, job_processes
from mpi_util.launch.launcher import ENVIRONMENT

# in one write, so that the lines of several ranks do not mix
SHOW = "import mpi_util as m, os; os.write(1, b'%d %d %d\\n' % (m.rank, m.nworkers, m.all_sum(1)))"
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
FORK = "import sys, mpi_util\nif mpi_util.mpi_fork({}) == 'parent': sys.exit()\n" + SHOW


def mpiexec(mpi, n, *command, library=None, env=None):
    """Runs a command on n ranks, started by hand by the launcher of an MPI."""
    prefix = OPEN_MPI.parents[1] if mpi == "openmpi" else Path(sys.executable).parents[1]
    oversubscribe = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return subprocess.run(
        [prefix / "bin" / "mpiexec", "-n", str(n), *command], capture_output=True, text=True, timeout=TIMEOUT_S,
        env=CLEAN_ENVIRONMENT | ENVIRONMENT | oversubscribe | mpi_environment(library or mpi) | (env or {}),
    )  # fmt: skip


@pytest.mark.openmpi
@pytest.mark.parametrize("program", [SHOW, FORK.format(2), "import mpi4py.MPI\n" + SHOW], ids=["", "fork", "mpi4py"])
def test_the_launcher_of_another_mpi(mpi, program):
    if mpi == "openmpi" and "mpi4py" in program:
        pytest.skip("MPICH ends it in MPI_Init, with a message of its own")
    other = {"mpich": "openmpi", "openmpi": "mpich"}[mpi]
    done = mpiexec(mpi, 2, sys.executable, "-W", "ignore", "-c", program, library=other)
    names = {"mpich": "MPICH", "openmpi": "Open MPI"}
    ours = [line for line in done.stderr.splitlines() if "LaunchError" in line]
    assert done.returncode == 1 and done.stdout == "" and len(ours) == 1, done.stderr
    assert f"{names[mpi]}'s mpiexec has started 2 processes, but with mpi4py's library, {names[other]} " in ours[0]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi", outer="fork", fork="os.fork()")
@pytest.mark.left_out(mpi="mpich", outer="hand", fork="os.fork()")
@pytest.mark.parametrize("fork", ["os.fork()", "mp.get_context('fork').Process(target=show).start()"])
@pytest.mark.parametrize("outer", ["fork", "hand"])
def test_a_program_that_a_rank_has_started_may_fork_at_once(tmp_path, mpi, outer, fork):
    """It is a single process, and so is what it forks."""
    (tmp_path / "inner.py").write_text(
        "import multiprocessing as mp, os, mpi_util\n"
        "def show(): os.write(1, b'%d %d %d\\n' % (mpi_util.rank, mpi_util.nworkers, mpi_util.all_sum(1)))\n"
        f"{fork}\nshow()\n"
    )
    program = (
        "import subprocess, sys, mpi_util\n"
        + ("if mpi_util.mpi_fork(2) == 'parent': sys.exit()\n" if outer == "fork" else "")
        + "mpi_util.all_sum(1)\n"
        + f"if mpi_util.rank == 1: subprocess.run([sys.executable, {str(tmp_path / 'inner.py')!r}])\n"
        + "mpi_util.all_sum(1)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    if outer == "hand":
        done = mpiexec(mpi, 2, *command)
        assert done.returncode == 0 and done.stdout == "0 1 1\n" * 2, done.stderr
    else:
        done = run(command, TIMEOUT_S, mpi_environment(mpi))
        assert done.status == 0 and done.out == "0 1 1\n" * 2, done.err


@pytest.mark.slow
def test_a_program_that_goes_into_the_background_forks_first(tmp_path):
    """Its ranks do so too: the process that calls mpi_fork is the rank."""
    program = tmp_path / "program.py"
    background = "import os, sys, mpi_util\nif p := os.fork(): sys.exit(os.waitpid(p, 0)[1])\nos.setsid()\n"
    program.write_text(background + FORK.format(2))
    done = run([sys.executable, program], TIMEOUT_S)
    assert done.status == 0 and sorted(done.out.splitlines()) == ["0 2 2", "1 2 2"], done.err


def test_the_folder_of_a_job_that_has_gone_makes_no_rank(tmp_path):
    done = run([sys.executable, "-c", FORK.format(2)], TIMEOUT_S, {JOB_VARIABLE: str(tmp_path / "gone")})
    assert done.status == 0 and sorted(done.out.splitlines()) == ["0 2 2", "1 2 2"], done.err


LEFT = {
    "PMI": {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9"},
    "no socket": {"PMI_RANK": "0", "PMI_SIZE": "4", "PMI_FD": "1"},
    "no PMI_FD": {"PMI_RANK": "1", "PMI_SIZE": "4"},
    "OMPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"},
}


@pytest.mark.slow_unless(left=["PMI", "no PMI_FD", "all"], program=SHOW)
@pytest.mark.left_out(left=["no socket", "no PMI_FD"], program=FORK.format(4))
@pytest.mark.parametrize("left", [*LEFT, "all"])
@pytest.mark.parametrize("program", [SHOW, FORK.format(4)], ids=["", "fork"])
def test_variables_that_a_launcher_has_left(mpi, left, program):
    """ "all": what its rank 1 had, now that it has ended."""
    if left == "all":
        show = f"import json, os\nif '1' in map(os.environ.get, {RANK_VARIABLES}): print(json.dumps(dict(os.environ)))"
        shown = json.loads(mpiexec(mpi, 4, sys.executable, "-c", show).stdout)
        variables = {name: value for name, value in shown.items() if name not in CLEAN_ENVIRONMENT}
    else:
        variables = dict(LEFT[left])
    started, since = time.monotonic(), time.time()
    done = run([sys.executable, "-c", program], TIMEOUT_S, CLEAN_ENVIRONMENT | mpi_environment(mpi) | variables)
    assert time.monotonic() - started < 4  # it waits for no other rank
    while left != "all" and reap.unused_files(since):  # those of jobs beside this one go soon
        assert time.monotonic() - started < TIMEOUT_S
        time.sleep(0.1)
    assert done.status == 1 and done.out == ""
    (line,) = done.err.splitlines()
    assert "LaunchError" in line and " of 4 of " in line
    assert "which it cannot reach: variables that were left behind" in line
    _, remedy, _ = line.split("`")
    for name in remedy.removeprefix("unset ").split():
        del variables[name]
    if left == "all":
        program = "import mpi4py.MPI\n" + SHOW
        done = run([sys.executable, "-c", program], TIMEOUT_S, CLEAN_ENVIRONMENT | mpi_environment(mpi) | variables)
        assert done.out == "0 1 1\n" and not done.err
    else:
        assert not [name for name in variables if name.endswith(("_RANK", "_SIZE"))]


@pytest.mark.slow
@pytest.mark.parametrize("left", LEFT)
def test_a_launcher_in_a_shell_with_variables_of_another_one(mpi, left):
    """Those that its own ranks do not overwrite stay, but are not of a launcher that can be reached."""
    done = mpiexec(mpi, 2, sys.executable, "-c", SHOW, env=LEFT[left])
    assert sorted(done.stdout.splitlines()) == ["0 2 2", "1 2 2"] and not done.stderr, done.stderr


@pytest.mark.parametrize(
    "left",
    [{"PMI_RANK": "3"}, {"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}, {"PMIX_RANK": "3", "PMIX_NAMESPACE": "x"}],
)
def test_a_rank_without_a_size_is_none(left):
    done = run([sys.executable, "-c", FORK.format(1)], TIMEOUT_S, CLEAN_ENVIRONMENT | left)
    assert done.out == "0 1 1\n" and not done.err


@pytest.mark.slow_unless(value="x")
@pytest.mark.slow_unless(bad="PMI_RANK")
@pytest.mark.parametrize(
    ("bad", "variables"),
    [
        *((name, {"PMI_RANK": "0", "PMI_SIZE": "2"}) for name in ("PMI_RANK", "PMI_SIZE", "MPI_UTIL_RANK_PID")),
        ("OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_SIZE": "2"}),
        ("OMPI_COMM_WORLD_SIZE", {"OMPI_COMM_WORLD_RANK": "0"}),
        ("PMI_RANK", {}),
        ("MPI_UTIL_DEPTH", {}),
        ("MPI_UTIL_RESTARTS", {}),
    ],
)
@pytest.mark.parametrize("value", ["x", "", "-1", "9" * 5000], ids=["x", "empty", "-1", "long"])
def test_variables_that_make_no_sense(bad, variables, value):
    for program in (FORK.format(2), SHOW) if value == "x" else (SHOW,):
        done = run([sys.executable, "-c", program], TIMEOUT_S, CLEAN_ENVIRONMENT | variables | {bad: value})
        assert done.status == 1 and done.out == ""
        (line,) = done.err.splitlines()
        assert f"LaunchError: {bad} is '{value}', as no launcher sets it" in line and f"`unset {bad}`" in line


@pytest.mark.slow_unless(n=None, outer="mpi_util")
@pytest.mark.left_out(mpi="openmpi", n=1)
@pytest.mark.left_out(mpi="mpich", n=3, outer="mpi4py")
@pytest.mark.parametrize("n", [None, 1, 3])
@pytest.mark.parametrize("outer", ["mpi_util", "mpi4py"])
def test_a_program_that_a_rank_starts(mpi, n, outer):
    """It is a single process, or a job of its own; also where the rank has never called mpi_util."""
    program = f"""
import subprocess, sys
if {outer == "mpi_util"}:
    import mpi_util
    if mpi_util.mpi_fork(2) == "parent": sys.exit()
from mpi4py.MPI import COMM_WORLD
if COMM_WORLD.rank == 1:
    subprocess.run([sys.executable, "-c", {FORK.format(n) if n else SHOW!r}], timeout=20, check=True)
COMM_WORLD.Barrier()
"""
    if outer == "mpi_util":
        done = run([sys.executable, "-c", program], TIMEOUT_S, CLEAN_ENVIRONMENT | mpi_environment(mpi))
        status, out, err = done.status, done.out, done.err
    else:
        done = mpiexec(mpi, 2, sys.executable, "-c", program)
        status, out, err = done.returncode, done.stdout, done.stderr
    size = n or 1
    assert (status, err) == (0, ""), err
    assert sorted(out.splitlines()) == [f"{rank} {size} {size}" for rank in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["mpi_util", "mpi4py"])
def test_a_rank_may_start_a_launcher_by_hand(mpi, outer):
    """Its ranks have what the outer launcher has set for the outer rank too."""
    prefix = OPEN_MPI.parents[1] if mpi == "openmpi" else Path(sys.executable).parents[1]
    flags = ["--oversubscribe"] if mpi == "openmpi" else []
    inner = [str(prefix / "bin" / "mpiexec"), "-n", "3", *flags, sys.executable, "-c", FORK.format(3)]
    start = "import subprocess\nprint(subprocess.run({}, timeout=30).returncode) if {} == 0 else None\n"
    if outer == "mpi_util":
        text = "import sys, mpi_util\nif mpi_util.mpi_fork(2) == 'parent': sys.exit()\nmpi_util.all_sum(1)\n"
        text += start.format(inner, "mpi_util.rank") + "mpi_util.all_sum(1)"
        done = run([sys.executable, "-c", text], TIMEOUT_S, {**ENVIRONMENT, **mpi_environment(mpi)})
        out, err = done.out, done.err
    else:
        text = "from mpi4py import MPI\n" + start.format(inner, "MPI.COMM_WORLD.rank") + "MPI.COMM_WORLD.Barrier()"
        found = mpiexec(mpi, 2, sys.executable, "-c", text)
        out, err = found.stdout, found.stderr
    assert sorted(out.split("\n")) == ["", "0", "0 3 3", "1 3 3", "2 3 3"], out + err


@pytest.mark.slow
def test_a_program_that_starts_itself_in_each_rank_is_stopped(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys, mpi_util\nif mpi_util.mpi_fork(2) == 'parent': sys.exit()\n"
        "if mpi_util.rank == 0: sys.exit(subprocess.run([sys.executable, __file__]).returncode)\n"
    )
    done = run([sys.executable, program], TIMEOUT_S)
    assert done.status == 1 and "does the program start itself?" in done.err


@pytest.mark.slow
def test_a_shell_of_srun_is_no_rank(mpi):
    """`srun --pty bash`: the first program in it gets PMI's socket; the next ones cannot use it again."""
    for step in ({"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9"}, {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}):
        environment = CLEAN_ENVIRONMENT | mpi_environment(mpi) | step | {"SLURM_PROCID": "0"}
        assert run([sys.executable, "-c", SHOW], TIMEOUT_S, environment).out == "0 1 1\n"
        done = run([sys.executable, "-c", FORK.format(3)], TIMEOUT_S, environment)
        assert sorted(done.out.splitlines()) == ["0 3 3", "1 3 3", "2 3 3"] and done.err == ""


@pytest.mark.slow_if(how=["5", "kill"])
@pytest.mark.parametrize(
    ("how", "status", "text"),
    [("import", 1, "status 1"), ("0", 1, "before MPI_Finalize"), ("5", 5, "status 5"), ("kill", 137, "signal 9")],
)
def test_a_rank_that_ends_above_mpi_fork(run_ranks, tmp_path, how, status, text):
    done = run_ranks("early.py", 3, how, tmp_path / "ended", timeout=TIMEOUT_S, status=status)
    assert time.time() - float((tmp_path / "ended").read_text()) < 4  # 0.3 s on an idle machine
    ours = [line for line in done.err.splitlines() if line.startswith("mpi_util:")]
    assert len(ours) == 1 and ours[0].startswith("mpi_util: rank 1 ") and text in ours[0], done.err
    assert "(above mpi_fork); all 3 ranks were stopped" in ours[0]
    assert done.err.count("Traceback") == (how == "import")


@pytest.mark.parametrize(("code", "status"), [("4", 4), ("0", 1), ("'no luck'", 1)])
def test_all_ranks_end_at_once_above_mpi_fork(tmp_path, mpi, code, status):
    """So soon that the waiting process sees none of them alive: the launcher knows the status."""
    lines = [
        "import os, sys",
        f"if 'MPI_UTIL_JOB' in os.environ: sys.exit({code})",
        "import mpi_util; mpi_util.mpi_fork(2)",
    ]
    (tmp_path / "program.py").write_text("\n".join(lines))
    done = run([sys.executable, tmp_path / "program.py"], TIMEOUT_S, CLEAN_ENVIRONMENT | mpi_environment(mpi))
    assert done.status == status, done.err
    assert re.fullmatch(r"mpi_util: rank \d .* \(above mpi_fork\); all 2 ranks were stopped", done.err.splitlines()[-1])


@pytest.mark.parametrize("n", ["0", "'3'", "2.5"])
def test_a_bad_count_is_reported_in_one_line(n):
    done = run([sys.executable, "-c", f"import mpi_util; mpi_util.mpi_fork({n})"], TIMEOUT_S)
    (line,) = done.err.splitlines()
    assert done.status == 2 and "UsageError: mpi_fork: n is a whole number" in line


@pytest.mark.slow
def test_the_parent_prints_and_reads_rank_0(tmp_path):
    """`mpi_util.rank` is 0 there as in any single process; a collective call is refused."""
    program = tmp_path / "program.py"
    program.write_text("import mpi_util as m\nif m.mpi_fork(2) == 'parent': m.print0('end', m.rank, m.nworkers)\n")
    assert run([sys.executable, program], TIMEOUT_S).out == "end 0 1\n"


def test_rank_0_reads_nothing_where_it_may_not_open_stdin(mpi):
    program = "import sys, mpi_util\nmpi_util.mpi_fork(2)\nif mpi_util.rank == 0: print('read', sys.stdin.read())"
    done = mpiexec(mpi, 2, sys.executable, "-c", program, env={"MPI_UTIL_STDIN": "/proc/none/fd/0"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "read \n", "")


def start_chains(tmp_path, job):
    """Each process of a chain starts the next one and exits, until tmp_path/stop exists."""
    chain = tmp_path / "chain.sh"
    chain.write_text(f"[ -e {tmp_path}/stop ] || {{ sh {chain} & }}\n")
    for _ in range(3):
        subprocess.Popen(["sh", chain], env={JOB_VARIABLE: job, "PATH": "/bin:/usr/bin"}).wait()


def assert_ended(tmp_path, job):
    time.sleep(0.05)
    left = job_processes(job)
    (tmp_path / "stop").touch() if left else None
    assert not left


@pytest.mark.slow
def test_a_chain_of_processes_is_ended_as_a_whole(tmp_path):
    """A list of processes may hold only those that are about to end."""
    for attempt in range(20):
        job = str(tmp_path / str(attempt))
        start_chains(tmp_path, job)
        end_job(job)
        assert_ended(tmp_path, job)


@pytest.mark.slow
def test_a_chain_is_ended_by_a_parent_that_had_to_wait(tmp_path, monkeypatch):
    """On a busy machine the one who looks may get no processor time while all that it has listed end."""
    job, waits = str(tmp_path / "job"), [1.0]
    start_chains(tmp_path, job)

    def late(pid, *of):
        if waits:  # never 0: that gives the core away at each look, and then a chain can be ahead of all lists
            time.sleep(waits.pop())
        return belongs(pid, *of)

    monkeypatch.setattr(reap, "belongs", late)
    end_job(job)
    assert_ended(tmp_path, job)


@pytest.mark.slow
def test_a_bad_number_of_cores_is_reported_in_one_line():
    done = run([sys.executable, "-c", FORK.format(1)], TIMEOUT_S, CLEAN_ENVIRONMENT | {"MPI_UTIL_CORES": "0"})
    (line,) = done.err.splitlines()
    assert done.status == 2 and "UsageError: MPI_UTIL_CORES is the number of cores" in line and "got '0'" in line
