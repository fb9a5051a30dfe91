"""A rank that raises, exits, is killed, ends early or hangs: the whole job ends soon, says why, and leaves nothing."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import FLAGS, LAUNCHER, OPEN_MPI, RANKS, ROOT, mpi_environment, run
from launching import survivors

import mpi_util
from mpi_util.launch.launcher import ENVIRONMENT
from mpi_util.ranks import failure, watchdog

# A job ends within a second or two; starting it takes as long again, more on a busy machine.
SOON_S = 20


IN, STOPPED = "phase rollout, episode 17", "; all 3 ranks were stopped\n"
CASES = {
    # how: (status, text on stderr)
    "raise": (1, [f"rank 1 ({IN}): uncaught exception", "ZeroDivisionError: a bug"]),
    "folder-gone": (1, [f"mpi_util: rank 1 ended with status 1 (ZeroDivisionError: a bug){STOPPED}"]),
    "exit": (3, [f"mpi_util: rank 1 ended with status 3 ({IN}){STOPPED}"]),
    "raise-exit": (4, [f"mpi_util: rank 1 ended with status 4 ({IN}){STOPPED}"]),
    "site-exit": (5, [f"mpi_util: rank 1 ended with status 5 ({IN}){STOPPED}"]),
    "exit-text": (1, [f"no luck\nmpi_util: rank 1 ended with status 1 (no luck; {IN}){STOPPED}"]),
    "os-exit": (3, ["rank 1"]),
    "kill": (137, ["rank 1 was killed by signal 9"]),
    "kill-parent": (137, [f"mpi_util: rank 1 was killed by signal 9 (SIGKILL){STOPPED}"]),
    "crash": (139, [f"mpi_util: rank 1 was killed by signal 11 (SIGSEGV){STOPPED}"]),
    "bus": (135, [f"7 (SIGBUS) (the usual cause is a full /dev/shm: docker run --shm-size=1g){STOPPED}"]),
    "long": (1, ["ZeroDivisionError: a bug a bug", "characters left out", "rank 1 ended with status 1 (ZeroDivision"]),
    "no-str": (1, [f"mpi_util: rank 1 ended with status 1 (NoText: its __str__ fails){STOPPED}"]),
    "hook": (1, [f"of its own\nmpi_util: rank 1 ended with status 1 (ZeroDivisionError: a bug){STOPPED}"]),
    "interrupt": (130, ["rank 1: interrupted"]),
    "fail": (1, ["train: reward is nan\nmpi_util: rank 1 has ended the job; all 3 ranks were stopped\n"]),
    "thread": (1, ["ZeroDivisionError"]),
    "return": (1, ["rank0_accum_batches: rank 1 has ended while rank 0 waits for it"]),
}


@pytest.mark.slow_unless(how=["raise", "site-exit", "kill", "long", "thread", "return", "interrupt"])
@pytest.mark.left_out(mpi="openmpi", how=["folder-gone", "raise-exit", "exit-text", "no-str", "hook", "fail", "long"])
@pytest.mark.parametrize("how", CASES)
def test_a_rank_that_fails_ends_the_job(run_ranks, how):
    status, texts = CASES[how]
    token = f"{os.getpid()}-{time.time()}"
    finished = run_ranks("fail.py", 3, 1, how, timeout=SOON_S, status=status, env={"MPI_UTIL_TEST_TOKEN": token})
    for text in texts:
        assert text in finished.err
    traces = "ZeroDivisionError" in finished.err or how == "no-str"
    assert finished.err.count("Traceback") == traces  # one report, of one rank
    assert traces or len(finished.err.splitlines()) <= 2
    assert len(finished.err) < 10_000
    assert not survivors(token)


def test_what_mpi_fork_changes_in_the_interpreter_of_a_single_rank(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import os, sys, threading
import numpy as np
import mpi_util
from mpi_util.ranks.console import print0_once

def interpreter():
    return sys.excepthook, threading.excepthook, sys.meta_path[:], dict(os.environ)

before, kept = interpreter(), (sys.exit, SystemExit.__dict__["code"])
for version in 1, 2:
    assert mpi_util.mpi_fork(1) == "child" and mpi_util.all_sum(1) == 1
    assert all(new != old for new, old in zip(interpreter(), before))
    assert kept == (sys.exit, SystemExit.__dict__["code"])
    with mpi_util.during("rollout"):
        assert mpi_util.rank0_bcast_wts(np.ones(3)).sum() == 3 and mpi_util.weights_version == version
    print0_once("once")
sys.exit(3)
""")
    done = run([sys.executable, program], SOON_S)
    assert done.status == 3 and done.err == "once\n"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_a_rank_starts_are_no_ranks(run_ranks, method):
    """They run the program's top level again, and its mpi_fork with it."""
    assert run_ranks("children.py", 2, method, timeout=SOON_S).out == "[[0, 20], [2, 20]]\n"


@pytest.mark.parametrize("model", ["None", "3", "print"])
def test_an_error_names_the_line_of_the_program(tmp_path, model):
    program = tmp_path / "program.py"
    program.write_text(f"import mpi_util\nmpi_util.mpi_fork(1)\n\nmpi_util.rank0_bcast_wts({model})\n")
    done = run([sys.executable, program], SOON_S, cwd=tmp_path)
    assert done.err.startswith("mpi_util: program.py:4: WeightsError: no weights found in a")


LIMITED = "import resource, mpi_util\nresource.setrlimit(resource.RLIMIT_NOFILE, ({}, {}))\nmpi_util.mpi_fork({})\n"


LEFT = """
import sys, mpi_util
if mpi_util.mpi_fork(int(sys.argv[1])) == "parent":
    sys.exit()
import numpy as np
for iteration in range(10):
    mpi_util.rank0_bcast_wts({"w": np.ones(3)})
    if mpi_util.rank == 0 and iteration == 3:
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_rank_0_that_leaves_a_loop_alone_is_reported(tmp_path, mpi, n):
    (tmp_path / "program.py").write_text(LEFT)
    for _ in range(3):  # it depended on who came first
        done = run([sys.executable, tmp_path / "program.py", n], 30, mpi_environment(mpi))
        assert done.status == 1 and done.err.count("\n") == 2, done.err
        assert "rank 0 has ended while rank 1 waits for it in rank0_bcast_wts at program.py:7" in done.err


@pytest.mark.slow
def test_an_error_that_one_rank_catches_ends_the_others(tmp_path, mpi):
    (tmp_path / "program.py").write_text(
        "import sys, mpi_util\nif mpi_util.mpi_fork(2) == 'parent': sys.exit()\n"
        "if mpi_util.rank == 0:\n"
        "    try: mpi_util.bcast(1)\n"
        "    except mpi_util.RankMismatchError: pass\n"
        "mpi_util.rank0_gather(1)\n"
    )
    done = run([sys.executable, tmp_path / "program.py"], 30, mpi_environment(mpi))
    assert done.status == 1 and "rank 1 ended with status 1 (RankMismatchError: ranks are in diff" in done.err, done.err


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_threads_that_fail_together_lose_no_report(tmp_path, n):
    (tmp_path / "program.py").write_text(
        f"import sys, threading, time, mpi_util\nif mpi_util.mpi_fork({n}) == 'parent': sys.exit()\n"
        "together = threading.Barrier(4)\n"
        "def fail(): together.wait(); raise ValueError('no luck')\n"
        "stderr, threads = sys.stderr, [threading.Thread(target=fail) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(sys.stderr is stderr, flush=True)\n"
    )
    done = run([sys.executable, tmp_path / "program.py"], 30)
    assert "Traceback" in done.err and (n > 1 or (done.err.count("Traceback") == 4 and done.out == "True\n")), done


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there only Python's own hook does that")
@pytest.mark.parametrize("n", [1, 2])
def test_a_misspelt_name_is_suggested_as_python_does(tmp_path, n):
    program = tmp_path / "program.py"
    program.write_text(f"import mpi_util\nif mpi_util.mpi_fork({n}) == 'child':\n    weights = 1\n    print(weihgts)\n")
    assert "Did you mean: 'weights'?" in run([sys.executable, program], 30).err


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "n", "needed"), [(100, 200, 832), (20, 4, 48), (40, 4, 48), (10, 2, 40)])
def test_more_ranks_than_files_may_be_open(tmp_path, limit, n, needed):
    (tmp_path / "program.py").write_text(LIMITED.format(limit, limit, n))
    done = run([sys.executable, tmp_path / "program.py"], SOON_S, {"TMPDIR": str(tmp_path)})
    line = f"LaunchError: cannot start {n} ranks: they need {needed} open files, and `ulimit -n` allows {limit}"
    assert done.status == 1 and line in done.err and len(done.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.slow
def test_a_soft_limit_of_open_files_is_raised(tmp_path, mpi):
    program = "import mpi_util; mpi_util.mpi_fork(4)"
    shell = ["bash", "-c", 'ulimit -n 60; ulimit -Sn 30; exec "$@"', "bash", sys.executable, "-c", program]
    done = run(shell, SOON_S, mpi_environment(mpi))
    assert (done.status, done.out, done.err) == (0, "", "")


def test_what_the_system_refuses_is_one_line(tmp_path):
    """Such as no room for temporary files, or no more processes."""
    (tmp_path / "program.py").write_text("import mpi_util, tempfile\ntempfile.tempdir = '/no'\nmpi_util.mpi_fork(2)\n")
    done = run([sys.executable, tmp_path / "program.py"], SOON_S)
    assert done.status == 1 and len(done.err.splitlines()) == 1
    assert "LaunchError: cannot start 2 ranks: [Errno 2] No such file" in done.err


def test_an_error_within_mpi_is_named_and_no_signal(mpi):
    """MPICH then ends with the low byte of an error code, 143 as after SIGTERM; Open MPI with 14."""
    nothing = {"UCX_TLS": "nothing", "FI_PROVIDER": "nothing", "OMPI_MCA_pml": "nothing"}
    program = "import mpi_util; mpi_util.mpi_fork(3, max_restarts=3); mpi_util.all_sum(1)"
    done = run([sys.executable, "-c", program], SOON_S, mpi_environment(mpi) | nothing)
    error = {"mpich": "Fatal error in internal_Init_thread: Other MPI error", "openmpi": "An error occurred in MPI_Ini"}
    lines = [line for line in done.err.splitlines() if line.startswith("mpi_util:")]
    assert len(lines) == 2, done.err
    first, last = lines
    for line in (first, last):
        assert re.match(rf"mpi_util: rank \d ended with status 1 \({error[mpi]}.*\); all 3 ranks were stopped; ", line)
    assert (done.status, first[-14:]) == (1, "restart 1 of 3") and "not restarted: it has failed in the same" in last
    assert done.err.count(f"{error[mpi]}") >= 4  # MPI's own report, of which more lines follow, is there too


def test_a_program_that_goes_on_in_the_parent_runs_once(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import mpi_util\nmpi_util.mpi_fork(2)\nprint('sum', mpi_util.all_sum(1))\n")
    done = run([sys.executable, program], SOON_S)
    assert done.status == 1 and done.out == "sum 2\nsum 2\n"
    assert (
        "has started the ranks, which have ended, and has nothing to compute; write `mpi_fork(n, exit=True)`"
        in done.err
    )


@pytest.mark.parametrize(("mpi", "who"), [("mpich", 0), ("openmpi", 1)], indirect=["mpi"])
def test_the_watchdog_says_who_waits_and_who_is_missing(run_ranks, who):
    finished = run_ranks("fail.py", 3, who, "hang", timeout=60)
    program = (RANKS / "fail.py").read_text().splitlines()
    hangs = 1 + next(i for i, line in enumerate(program) if "time.sleep(7)" in line)
    others = [k for k in range(3) if k != who]
    assert finished.err.count("mpi_util: ") == finished.err.count(f"mpi_util: rank {others[0]} has waited for") <= 2
    said = rf": waiting in rank0_accum_batches at fail.py:{len(program)} since [\d:]+\n"  # in one second, or in two
    assert re.search(
        rf"ranks {others[0]}, {others[1]}{said}|rank {others[0]}{said}  rank {others[1]}{said}", finished.err
    )
    assert re.search(rf"rank {who}: missing, phase rollout, episode 17 since [\d:]+ \(process \d+", finished.err)
    assert re.search(rf'stack of rank {who}:\n.*\n  File ".*fail.py", line {hangs} in <module>', finished.err)
    assert finished.err.count("stack of") == 2 * finished.err.count("has waited")  # the others' are the same


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"], indirect=True)
@pytest.mark.parametrize(("who", "machines"), [(0, 1), (2, 1), (1, 3)])
def test_the_watchdog_may_end_the_job_of_a_rank_that_is_stopped(run_ranks, who, machines):
    env = {"MPI_UTIL_WATCHDOG": "1", "KILL": "1", "MPI_UTIL_MACHINES": str(machines)}
    finished = run_ranks("fail.py", 3, who, "stop", timeout=SOON_S, status=1, env=env)
    assert f"rank {who}: missing, phase rollout, episode 17" in finished.err
    assert "stopped: it has no stack to show, and `kill -CONT" in finished.err
    last = finished.err.splitlines()[-2:]
    assert re.match(rf"mpi_util: the watchdog ends the job after 1[.\d]* s: rank {who}: missing, phase roll", last[0])
    assert re.fullmatch(r"mpi_util: rank \d has ended the job; all 3 ranks were stopped", last[1])
    assert "This is a report" not in finished.err.partition("phase rollout")[2]  # of a slow start it may be said


@pytest.mark.slow
def test_the_watchdog_sees_a_wait_for_the_lock_of_deal(run_ranks):
    finished = run_ranks("fail.py", 2, 1, "lock", timeout=SOON_S, env={"MPI_UTIL_WATCHDOG": "1"})
    assert "rank 0: waiting in deal at fail.py" in finished.err and "rank 1: missing" in finished.err


TEAMS = """
import sys, threading, time, mpi_util
if mpi_util.mpi_fork(3) == "parent":
    sys.exit()
from mpi4py import MPI
rank, team, others = mpi_util.rank, MPI.COMM_WORLD.Split(mpi_util.rank // 2), MPI.COMM_WORLD.Split(mpi_util.rank > 0)
"""
FORGOTTEN = """
if sys.argv[1] == "later":
    mpi_util.all_sum(1, comm=team)
if rank == 2:
    time.sleep(60)
if rank == 0:
    mpi_util.all_sum(1, comm=team)
mpi_util.rank0_gather("comm is forgotten")
"""


@pytest.mark.parametrize("call", ["first", "later"])
def test_ranks_that_wait_for_one_another_end_the_job(tmp_path, mpi, call):
    """On different communicators, while another rank computes; also where one of them is still to be opened."""
    (tmp_path / "program.py").write_text(TEAMS + FORGOTTEN)
    done = run([sys.executable, tmp_path / "program.py", call], 40, mpi_environment(mpi))
    of_team = "the first call" if call == "first" else "all_sum"
    assert done.status == 1 and re.fullmatch(
        "mpi_util: ranks 0, 1 wait for one another and can never meet; is comm= missing in one of these calls, or do "
        r"they come in another order\?\n"
        rf"  rank 0: waiting in {of_team} at program.py:13, on the communicator of ranks 0, 1 since [\d:]+\n"
        r"  rank 1: waiting in rank0_gather at program.py:14 since [\d:]+\n"
        r"  rank 2: missing, outside of `mpi_util.during` since .*\n"
        r"mpi_util: rank 0 has ended the job; all 3 ranks were stopped\n",
        done.err,
    ), done.err


SLOW = """
def late(call):
    time.sleep(5)
    call()

everyone, wait = lambda: mpi_util.all_sum(1), lambda comm: mpi_util.rank0_gather(rank, comm=comm)
for _ in range(2):  # the first call on a communicator, and a later one
    if rank == 2:
        late(lambda: wait(others))  # on which rank 1 waits, and on that rank 0
    if rank == 1:
        wait(others)
    if rank < 2:
        wait(team)
    everyone()
if rank == 0:
    helper = threading.Thread(target=late, args=(lambda: wait(team),))  # what rank 1 waits for
    helper.start()
if rank == 1:
    wait(team)
everyone()
if rank == 0:
    helper.join()
mpi_util.print0("met")
"""


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.slow)], indirect=True)
def test_ranks_that_wait_for_a_slow_one_are_let_alone(tmp_path, mpi):
    """On several communicators; also where another thread of a waiting rank makes the call that is waited for."""
    (tmp_path / "program.py").write_text(TEAMS + SLOW)
    done = run([sys.executable, tmp_path / "program.py"], 60, mpi_environment(mpi))
    assert (done.status, done.out, done.err) == (0, "met\n", "")


def test_a_rank_that_handles_a_signal_is_in_no_circle(monkeypatch):
    monkeypatch.setattr(watchdog, "_OURS_TOO", signal.valid_signals() - {signal.SIGUSR1})  # pytest has others
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])  # so it has of threads
    assert not watchdog._may_act()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    assert watchdog._may_act()
    signal.signal(signal.SIGUSR1, before)


def test_a_note_has_room_for_any_number_of_ranks_and_any_text(monkeypatch):
    dog, mine = watchdog.Watchdog(), failure.FailureState()
    monkeypatch.setattr(watchdog, "state", lambda _: mine)
    mine.call = watchdog.FIRST_CALL
    mine.where = {"phase": "\U0001f916" * 300}
    ticket = dog.ticket
    dog.due(2.0, lambda: (range(5000), range(5000)))
    note = watchdog._RankView(ticket).note
    assert note["call"].startswith("the first call") and note["awaits"] == [] and "\U0001f916" in note["where"]


TWO_THREADS = """
call = lambda: getattr(mpi_util, sys.argv[1])(1.0)
call()
if rank:
    time.sleep(60)
threading.Thread(target=call, name="helper").start()
time.sleep(0.5)
call()
"""


@pytest.mark.parametrize("call", ["all_sum", "rank0_gather"])
def test_collective_calls_come_from_one_thread(tmp_path, mpi, call):
    (tmp_path / "program.py").write_text(TEAMS + TWO_THREADS)
    done = run([sys.executable, tmp_path / "program.py", call], 30, mpi_environment(mpi))
    assert done.status == 2 and done.err == (
        f"rank 0: program.py:8: UsageError: {call}, in thread 'MainThread': thread 'helper' of this rank is in {call}; "
        "the collective calls of a rank come from one thread (only `deal` may be shared)\n"
        "mpi_util: all 3 ranks were stopped\n"
    )


@pytest.mark.parametrize("seconds", [-1, "soon", float("nan")])
def test_the_watchdog_takes_seconds(seconds):
    with pytest.raises(mpi_util.UsageError, match="is a number of seconds, 0 or more"):
        mpi_util.watchdog(seconds)


def test_a_watchdog_that_is_off_reports_nothing(tmp_path):
    program = tmp_path / "program.py"
    lines = "import sys, mpi_util", "if mpi_util.mpi_fork(2) == 'parent':", "    sys.exit()", "mpi_util.all_sum(1)"
    program.write_text("\n".join(lines))
    done = run([sys.executable, program], SOON_S, env={"MPI_UTIL_WATCHDOG": "0"})
    assert (done.status, done.out, done.err) == (0, "", "")


UNDER = {"mpich": Path(sys.prefix) / "bin", "openmpi": OPEN_MPI.parents[1] / "bin"}


def mpiexec(mpi, n, *program):
    """(command, environment) of a plain mpiexec."""
    oversubscribe = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    command = [UNDER[mpi] / "mpiexec", "-n", n, sys.executable, *program]
    return command, mpi_environment(mpi) | ENVIRONMENT | oversubscribe


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise-exit", "rank 1 has ended (only its launcher knows with which status) while rank 0 waits for it"),
        ("return", "rank 1 has ended (only its launcher knows with which status) while rank 0 waits for it"),
        ("hook", "rank 1 has ended with status 1 (ZeroDivisionError: a bug) while rank 0 waits for it"),
        ("no-str", "rank 1 (phase rollout, episode 17): uncaught exception"),
    ],
)
def test_a_rank_that_fails_ends_a_job_that_mpi_fork_has_not_started(mpi, how, text):
    command, environment = mpiexec(mpi, 3, RANKS / "fail.py", 3, 1, how)
    done = run(command, SOON_S, environment)
    reports = [line for line in done.err.splitlines() if re.match("rank [0-9]", line)]
    assert done.status == 1 and len(reports) == 1 and text in reports[0], done.err


UNREAD = """\
from mpi4py import MPI
comm = MPI.COMM_WORLD.Dup()  # of one of MPI's own MPICH would say so
kept = [comm.Isend(bytes(1000), k, 7) for k in range(comm.size) if k != comm.rank for _ in range(300)]
"""  # after which MPICH keeps no message for a rank that does not look


@pytest.mark.parametrize("before", ["", UNREAD], ids=["", "unread"])
def test_a_rank_that_exits_ends_its_program_in_order(tmp_path, mpi, before):
    """While the others work: then the job is aborted, within a second or so."""
    (tmp_path / "program.py").write_text(
        "import atexit, pathlib, sys, threading, time, mpi_util\n"
        "atexit.register(lambda: pathlib.Path('atexit').touch())\n"
        "if mpi_util.mpi_fork(2) == 'parent': sys.exit()\n"
        "file = open('file', 'w')\n"
        "file.write('whole' * mpi_util.all_sum(1))\n"
        f"{before}"
        "if mpi_util.rank == 0: time.sleep(60)\n"
        "threading.Timer(0.1, lambda: pathlib.Path('thread').touch()).start()\n"
        "sys.exit(3)\n"
    )
    done = run([sys.executable, "program.py"], SOON_S, mpi_environment(mpi), cwd=tmp_path)
    assert (done.status, done.err) == (3, "mpi_util: rank 1 ended with status 3; all 2 ranks were stopped\n")
    assert (tmp_path / "file").read_text() == "wholewhole"
    assert (tmp_path / "atexit").exists() and (tmp_path / "thread").exists()


@pytest.mark.parametrize("n", [2, 4])
def test_messages_that_nobody_reads_keep_no_rank(tmp_path, mpi, n):
    (tmp_path / "program.py").write_text(
        f"import sys, mpi_util\nif mpi_util.mpi_fork({n}) == 'parent': sys.exit()\n"
        f"print(mpi_util.all_sum(1), flush=True)\n{UNREAD}"
    )
    done = run([sys.executable, "program.py"], SOON_S, mpi_environment(mpi), cwd=tmp_path)
    assert (done.status, done.out, done.err) == (0, f"{n}\n" * n, "")


@pytest.mark.parametrize(
    ("to", "handler", "status", "err"),
    [
        ("os.environ['STARTER']", "signal.default_int_handler", 130, "rank 0: interrupted (Ctrl-C)\n"),
        ("os.environ['STARTER']", "lambda *_: sys.exit(130)", 130, ""),
        ("pids[2]", "lambda *_: sys.exit(5)", 5, "mpi_util: rank 2 ended with status 5; all 3 ranks were stopped\n"),
    ],
    ids=["interrupt", "exit", "exit-2"],
)
def test_a_signal_ends_a_job_of_which_some_ranks_have_ended(tmp_path, mpi, to, handler, status, err):
    """They wait for the others in an atexit function, and what that raises Python passes over."""
    (tmp_path / "program.py").write_text(
        "import os, signal, sys, time, mpi_util\n"
        "os.environ.setdefault('STARTER', str(os.getpid()))\n"
        "if mpi_util.mpi_fork(3) == 'parent': sys.exit()\n"
        f"signal.signal(signal.SIGINT, {handler})\n"
        "pids = [mpi_util.all_sum(os.getpid() * (mpi_util.rank == k)) for k in range(3)]\n"
        "if mpi_util.rank == 1:\n"
        "    time.sleep(1)\n"
        f"    os.kill(int({to}), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    done = run([sys.executable, "program.py"], SOON_S, mpi_environment(mpi), cwd=tmp_path)
    assert (done.status, done.err) == (status, err)


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_may_call_mpi_finalize_itself(tmp_path, mpi, who):
    """The others do it when Python ends, and first wait for this one."""
    (tmp_path / "program.py").write_text(
        "import sys, mpi_util\nif mpi_util.mpi_fork(2) == 'parent': sys.exit()\nfrom mpi4py import MPI\n"
        f"if mpi_util.rank == {who}: MPI.Finalize()\nprint('end')\n"
    )
    done = run([sys.executable, "program.py"], SOON_S, mpi_environment(mpi), cwd=tmp_path)
    assert (done.status, done.out, done.err) == (0, "end\nend\n", "")


STOPS = """
import sys, time, mpi_util
if mpi_util.mpi_fork(int(sys.argv[1])) == "parent": sys.exit()
import os
stop, i = mpi_util.StopRequest(), 0
while not mpi_util.all_sum(bool(stop)):
    mpi_util.print0("pid", os.getpid(), flush=True) if i == 3 else mpi_util.msg("at work")
    time.sleep(0.05)
    i += 1
time.sleep(1.5)
if mpi_util.rank == 0:
    open("saved", "w").write(str(stop.signum))
    try: print("saved", flush=True)
    except OSError: pass
sys.exit(stop.status)
"""


def read_pid(out) -> int:
    """Of rank 0, which prints it when the program is under way."""
    while not (found := re.search(rb"pid (\d+)", line := out.readline())):
        assert line
    return int(found[1])


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi", n=1)  # without MPI
@pytest.mark.parametrize(
    ("n", "how", "before", "sent", "status"),
    [
        (3, "mpi_fork", "", ["HUP"], 129),
        (1, "mpi_fork", "", ["HUP"], 129),
        (3, "mpi_fork", "", ["HUP", "HUP", "TERM"], 129),
        (2, "mpi_fork", "trap '' HUP;", ["HUP", "TERM"], 143),
        (2, "mpiexec", "", ["HUP", "TERM"], 129),
    ],
)
def test_a_hang_up_stops_in_order_and_is_no_first_signal(tmp_path, mpi, n, how, before, sent, status):
    (tmp_path / "program.py").write_text(STOPS)
    command, env = [sys.executable, "program.py", str(n)], mpi_environment(mpi)
    if how == "mpiexec":
        command, env = mpiexec(mpi, str(n), "program.py", str(n))
    shell = ["bash", "-c", f'{before} exec "$@"', "bash", *map(str, command)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    process = subprocess.Popen(shell, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        pid = read_pid(process.stdout)
        for name in sent:
            os.kill(pid if how == "mpiexec" else process.pid, getattr(signal, f"SIG{name}"))
            time.sleep(0.4)
        process.stdout.read()
    assert (process.returncode, (tmp_path / "saved").read_text()) == (status, str(status - 128))


@pytest.mark.slow
def test_a_hang_up_ends_a_program_that_says_nothing_of_signals(tmp_path, mpi):
    """UCX, in MPICH, would take it for itself."""
    (tmp_path / "program.py").write_text(STOPS.replace("mpi_util.StopRequest()", "False"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), **mpi_environment(mpi)}
    command = [sys.executable, "program.py", "2"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        read_pid(process.stdout)
        process.send_signal(signal.SIGHUP)
        killer = threading.Timer(10, process.kill)
        killer.start()
        assert process.wait() == 129
        killer.cancel()


@pytest.mark.slow
@pytest.mark.parametrize(("mpi", "n"), [("mpich", 1), ("mpich", 3), ("openmpi", 3)], indirect=["mpi"])
def test_a_terminal_that_closes_stops_the_program_in_order(tmp_path, mpi, n):
    text = STOPS.replace('mpi_util.msg("at work")', "None" if n == 1 else "mpi_util.msg(i)")
    if n == 1:  # in a single process Python itself reports, with status 120, what it could not print
        text = text.replace('print("saved", flush=True)', "None")
    (tmp_path / "program.py").write_text(text)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.environ |= {"PYTHONPATH": str(ROOT), **mpi_environment(mpi)}
        os.execv(sys.executable, [sys.executable, "program.py", str(n)])
    with open(terminal, "rb", buffering=0) as shown:
        read_pid(shown)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    assert (tmp_path / "saved").read_text() == "1"


@pytest.mark.slow_unless(streams=["| head -1", "> /dev/full"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("streams", [">&-", ">&- 2>&- <&-", "| head -1", "2>&1 | head -1", "> /dev/full"])
def test_a_program_needs_no_output(tmp_path, n, streams):
    if n == 1 and "-" not in streams.replace("-1", ""):
        pytest.skip("in a single process print() raises what it always does")
    (tmp_path / "program.py").write_text(
        "import sys, mpi_util\nif mpi_util.mpi_fork(int(sys.argv[1])) == 'parent': sys.exit()\n"
        "for i in range(300): mpi_util.msg('line', i, 'x' * 1000)\n"
        "mpi_util.print0('sum', mpi_util.all_sum(1))\nif mpi_util.rank == 0: open('done', 'w').close()\n"
    )
    shell = f'set -o pipefail; "$0" program.py {n} {streams}'
    done = run(["bash", "-c", shell, sys.executable], SOON_S, cwd=tmp_path)
    assert done.status == 0 and not done.err and (tmp_path / "done").exists()


@pytest.mark.slow_if(ends="")
@pytest.mark.parametrize(("ends", "status"), [("sys.exit(3)", 3), ("raise ValueError('of the child')", 1), ("", 0)])
def test_a_forked_process_of_a_rank_may_end_as_it_likes(tmp_path, mpi, ends, status):
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, os, sys, mpi_util\nif mpi_util.mpi_fork(2) == 'parent': sys.exit()\nmpi_util.all_sum(1)\n"
        "if mpi_util.rank == 1:\n"
        "    if (child := os.fork()) == 0:\n"
        "        atexit.register(print, 'its own atexit')\n"
        f"        {ends}\n        sys.exit()\n"
        "    print('status', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "mpi_util.all_sum(1)\n"
    )
    done = run([sys.executable, program], SOON_S, mpi_environment(mpi))
    assert done.status == 0 and done.out.splitlines() == ["its own atexit", f"status {status}"], done.err


@pytest.mark.slow_unless(call=["all_sum(np.ones(3))", "deal(4)"])
@pytest.mark.parametrize(
    "call", ["all_sum(1)", "all_sum(np.ones(3))", "rank0_gather(1)", "rank0_bcast_wts(w)", "deal(4)"]
)
def test_a_forked_process_is_no_rank(tmp_path, call):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, numpy as np, mpi_util\nif mpi_util.mpi_fork(2) == 'parent': sys.exit()\n"
        "w = {'w': np.ones(3)}\n"
        f"def call(): result = mpi_util.{call}; return list(result) if 'deal' in {call!r} else result\n"
        "call()\n"
        "if mpi_util.rank == 1:\n"
        "    if (child := os.fork()) == 0: call()\n"
        "    else: print('status', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "if mpi_util.rank != 1 or child: call()\n"
        "if mpi_util.all_sum(1) == 2: mpi_util.print0('done')\n"
    )
    done = run([sys.executable, program], SOON_S)
    assert done.status == 0 and sorted(done.out.splitlines()) == ["done", "status 2"], done.err
    name = call.partition("(")[0]
    assert re.fullmatch(
        rf"process \d+, forked by rank 1: .*program.py:4: UsageError: {name}.*: this process was forked by rank 1, or "
        r"started by its multiprocessing, and is no rank itself: it cannot take part in collective calls; let the rank "
        r"make them\n",
        done.err,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["multiprocessing.get_context('fork').Process(target=call).start()", "os.fork() or call()"]
)
def test_a_process_forked_before_the_first_call_is_no_rank(tmp_path, mpi, how):
    """By its environment it could be one, under mpiexec."""
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, os, sys, mpi_util\n"
        "def call():\n"
        "    try: print(mpi_util.all_sum(1))\n"
        "    except mpi_util.UsageError: os.write(1, b'no rank\\n')\n"
        "    os._exit(0)\n"
        f"{how}\n"
        "mpi_util.print0(mpi_util.all_sum(1))\n"
    )
    done = run([LAUNCHER[mpi], *FLAGS[mpi], "-n", 2, sys.executable, program], SOON_S, mpi_environment(mpi))
    assert done.status == 0 and sorted(done.out.splitlines()) == ["2", "no rank", "no rank"], done.err


@pytest.mark.slow_if(context="spawn")
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_mpi_fork_in_a_process_of_multiprocessing_is_refused(tmp_path, context):
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, mpi_util\n"
        "if __name__ == '__main__':\n"
        f"    process = multiprocessing.get_context('{context}').Process(target=mpi_util.mpi_fork, args=(2,))\n"
        "    process.start()\n    process.join()\n    print(process.exitcode)\n"
    )
    done = run([sys.executable, program], SOON_S)
    assert done.out == "1\n" and "it cannot be called in a process of multiprocessing" in done.err.splitlines()[-1]


@pytest.mark.slow
def test_the_end_of_the_ranks_is_not_waited_for_in_silence(tmp_path, mpi):
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys, mpi_util\nfrom mpi_util.launch import supervise\nsupervise._NOTICE_S = 0.5\n"
        "if mpi_util.mpi_fork(2) == 'parent': sys.exit()\n"
        "if mpi_util.all_sum(1) and mpi_util.rank == 1: subprocess.Popen(['sleep', '3'])\n"
    )
    done = run([sys.executable, program], SOON_S, mpi_environment(mpi))
    line = (
        r"mpi_util: all ranks have ended; waiting for what they have started: sleep \(process \d+\); Ctrl-C ends it\n"
    )
    assert done.status == 0 and re.fullmatch(line, done.err)


@pytest.mark.slow
def test_ranks_that_differ_are_told_where_they_are(tmp_path, mpi):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, mpi_util\nif mpi_util.mpi_fork(2) == 'parent': sys.exit()\n"
        "if mpi_util.rank == 0:\n    mpi_util.all_sum(1)\n"
        "mpi_util.all_sum(0.5)\n"
    )
    done = run([sys.executable, program], SOON_S, mpi_environment(mpi))
    assert (
        "  rank 1: float64 () (of 1 arrays)\ncalled at:\n  rank 0: program.py:4\n  rank 1: program.py:5\n" in done.err
    )


SIGNALLED = """
import os, signal, sys, time, mpi_util
from mpi_util.launch import supervise
supervise._NOTICE_S = 0.5
if mpi_util.mpi_fork(int(sys.argv[1]), max_restarts=1) == "parent": sys.exit()
stop = mpi_util.StopRequest()
mpi_util.all_sum(1)
if mpi_util.rank == 0:
    print("pid", os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP) if sys.argv[2] == "stopped" else time.sleep(2)
mpi_util.all_sum(1)
mpi_util.print0("saved")
sys.exit(stop.status)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mpi", "n"), [("mpich", 3), ("openmpi", 2), ("mpich", 1)], indirect=["mpi"])
@pytest.mark.parametrize("how", ["stopped", "slow"])
def test_after_a_signal_the_job_says_what_it_waits_for(tmp_path, mpi, n, how):
    (tmp_path / "program.py").write_text(SIGNALLED)
    process = subprocess.Popen(
        [sys.executable, "program.py", str(n), how], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **mpi_environment(mpi)},
    )  # fmt: skip
    pid = read_pid(process.stdout)
    process.send_signal(signal.SIGTERM)
    what = "signal 15 (SIGTERM)"
    line = f"mpi_util: rank 0 (process {pid}) has got {what} and works on; a second signal ends everything now\n"
    assert process.stderr.readline().decode() == line
    if how == "stopped":
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=SOON_S)
    # a launcher that takes its time to end is told of too
    told = [line for line in err.decode().splitlines(keepends=True) if "all ranks have ended" not in line]
    last = f"mpi_util: {what}" + f"; all {n} ranks were stopped" * (n > 1) + "\n"
    assert (process.returncode, "".join(told)) == (143, last * (how == "stopped"))
    assert out == b"saved\n" * (how == "slow")


@pytest.mark.parametrize("n", [1, 2])
def test_one_signal_ends_a_program_that_only_a_thread_keeps(tmp_path, n):
    (tmp_path / "program.py").write_text(
        f"import sys, threading, mpi_util\nmpi_util.mpi_fork({n}, exit=True)\nstop = mpi_util.StopRequest()\n"
        "if mpi_util.rank == 0: threading.Thread(target=threading.Event().wait).start()\n"
        "mpi_util.print0('done', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "done\n"
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 143 and err.startswith("mpi_util: after the program's end, stopping now\n"), err


def test_a_file_that_is_not_closed_is_whole_at_the_end(tmp_path):
    (tmp_path / "program.py").write_text(
        "import mpi_util\nmpi_util.mpi_fork(1)\n"
        "class Log:\n    def __init__(self, path): self.file, self.me = open(path, 'w'), self\n"
        "log, other = Log('in a circle'), open('global', 'w')\n"
        "log.file.write('a'), other.write('b')\n"
    )
    run([sys.executable, "program.py"], SOON_S, cwd=tmp_path)
    assert ((tmp_path / "in a circle").read_text(), (tmp_path / "global").read_text()) == ("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize(("interrupted", "times"), [(0, 1), (1, 1), (1, 2)])
def test_an_interrupted_call_leaves_no_answer_for_the_next(tmp_path, interrupted, times, mpi):
    """Nor does a rank that is two calls ahead then change what the others add up."""
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys, time, mpi_util\n"
        "if mpi_util.mpi_fork(2) == 'parent': sys.exit()\n"
        "left = mpi_util.all_sum(0)\n"
        f"if mpi_util.rank == {interrupted}:\n"
        "    signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        f"    left = {times}\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.2)\n"
        "else:\n"
        "    time.sleep(1)\n"
        "for i in range(6):\n"
        "    try: print('sum', i, mpi_util.all_sum(100 * i), flush=True)\n"
        "    except mpi_util.MpiUtilError as error: print(type(error).__name__, flush=True)\n"
        "    except KeyboardInterrupt:\n"
        "        left -= 1\n"
        "        if not left: signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "        print('KeyboardInterrupt', flush=True)\n"
    )
    done = run([sys.executable, program], SOON_S, mpi_environment(mpi))  # it must not hang
    sums = [line.split()[1:] for line in done.out.splitlines() if line.startswith("sum")]
    assert all(int(total) == 200 * int(i) for i, total in sums), done.out
    assert "KeyboardInterrupt" in done.out and (interrupted == 0 or times > 1 or len(sums) == 11), done.out


INTERRUPTED_SUMS = """
import os, signal, sys, threading, time
import numpy as np
n, machines, size, at, shared = map(int, sys.argv[1:])
os.environ["MPI_UTIL_MACHINES"] = str(machines)
if not shared:
    del os.memfd_create
import mpi_util
if mpi_util.mpi_fork(n) == "parent":
    sys.exit()
for i in range(4):
    if i == at and mpi_util.rank == 1:
        timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()
    time.sleep(1.2 * (i == at and mpi_util.rank == 0))
    try:
        found = mpi_util.all_sum(np.full(size, 10.0**i))
    except KeyboardInterrupt:
        kept = [np.full(size, 7.0) for _ in range(300)]  # in what may be free now
        print("interrupted", flush=True)
        continue
    except mpi_util.RankMismatchError as error:
        sys.exit(4 if "(second part)" in str(error) else 5)
    assert (found == n * 10.0**i).all(), (i, found)
    print("right", i, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "machines", "size", "at", "shared", "status"),
    [(3, 1, 100_000, 0, 1, 4), (4, 2, 400_000, 1, 1, 4), (3, 1, 1000, 1, 0, 0), (2, 1, 3000, 1, 0, 0)],
)
def test_who_was_interrupted_in_a_sum_spoils_no_other(tmp_path, mpi, n, machines, size, at, shared, status):
    """It is not taken for a rank in the call's second part, and what MPI sends of it is not overwritten."""
    (tmp_path / "program.py").write_text(INTERRUPTED_SUMS)
    command = [sys.executable, "program.py", n, machines, size, at, shared]
    done = run(command, SOON_S, mpi_environment(mpi), cwd=tmp_path)
    assert "interrupted" in done.out and done.status == status, done.out + done.err
    assert done.out.count("right") == (n * at if status else 4 * n - 1), done.out


@pytest.mark.slow
@pytest.mark.parametrize("late", [2, 3])
def test_a_large_row_for_a_leader_that_has_ended_is_no_wait(tmp_path, mpi, late):
    (tmp_path / "program.py").write_text(
        "import sys, time, numpy as np, mpi_util\n"
        "if mpi_util.mpi_fork(4) == 'parent': sys.exit()\n"
        "mpi_util.all_sum(1)\n"
        f"if mpi_util.rank != {late}: sys.exit()\n"
        "time.sleep(1.5)\n"
        "mpi_util.all_sum(np.ones(20000))\n"
    )
    done = run([sys.executable, "program.py"], SOON_S, mpi_environment(mpi) | {"MPI_UTIL_MACHINES": "2"}, cwd=tmp_path)
    assert done.status == 1 and f"rank 0 has ended while rank {late} waits for it" in done.err, done.err


@pytest.mark.slow
@pytest.mark.parametrize(("n", "slow"), [(2, 0), (3, 2)])
def test_an_early_message_is_about_the_next_round(tmp_path, n, slow, mpi):
    """A rank that is interrupted while it waits may receive what is sent in the next call."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time, numpy as np, mpi_util\n"
        f"if mpi_util.mpi_fork({n}) == 'parent': sys.exit()\n"
        "from mpi_util.collectives.messages import Messages\n"
        "mean, poll = lambda: mpi_util.all_mean(np.ones(3)), Messages.poll\n"
        "def interrupted(self):\n"
        "    time.sleep(0.4)\n"
        "    return poll(self) or poll(self)\n"
        "mean()\n"
        f"if mpi_util.rank == {slow}: Messages.poll = interrupted\n"
        f"if mpi_util.rank not in ({slow}, 2): time.sleep(0.1)\n"
        "mean()\n"
        "Messages.poll = poll\n"
        "try: mpi_util.rank0_gather(1) if mpi_util.rank == 1 else mean()\n"
        "except mpi_util.RankMismatchError: print('found')\n"
        "print(mpi_util.all_sum(1))\n"
    )
    done = run([sys.executable, program], SOON_S, mpi_environment(mpi))  # it must not hang
    assert done.status == 0 and sorted(done.out.split()) == [str(n)] * n + ["found"] * n, done.out + done.err
