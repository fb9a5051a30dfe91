"""A rank that raises, exits, is killed, ends early or hangs: the whole job ends soon, says why, and leaves nothing."""

import os
import sys
import time

import psutil
import pytest
from conftest import RANKS, mpi_environment, run

# A job ends within a second or two; starting it takes as long again, more on a busy machine.
SOON_S = 20


def survivors(token: str) -> list[psutil.Process]:
    """Processes that were started with `token` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if token in process.environ().get("MPI_UTIL_TEST_TOKEN", "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


CASES = {
    # how: (status, text on stderr)
    "raise": (1, ["rank 1 (phase rollout, episode 17): uncaught exception", "ZeroDivisionError: a bug"]),
    "exit": (3, ["status 3"]),
    "raise-exit": (1, ["rank 1 has ended while rank 0 waits for it"]),
    "os-exit": (3, ["rank 1"]),
    "kill": (137, ["rank 1 was killed by signal 9"]),
    "interrupt": (130, ["rank 1: interrupted"]),
    "fail": (1, ["train: reward is nan"]),
    "thread": (1, ["ZeroDivisionError"]),
    "return": (1, ["rank0_accum_batches: rank 1 has ended while rank 0 waits for it"]),
}


@pytest.mark.parametrize("how", CASES)
def test_a_rank_that_fails_ends_the_job(run_ranks, how):
    status, texts = CASES[how]
    token = f"{os.getpid()}-{time.time()}"
    finished = run_ranks("fail.py", 3, 1, how, timeout=SOON_S, status=status, env={"MPI_UTIL_TEST_TOKEN": token})
    for text in texts:
        assert text in finished.err
    assert finished.err.count("Traceback") == ("ZeroDivisionError" in finished.err)  # one report, of one rank
    assert not survivors(token)


def test_what_mpi_fork_changes_in_the_interpreter_can_be_undone(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import os, sys, threading
import numpy as np
import mpi_util
from mpi_util.host.process import process
from mpi_util.program.console import print0_once

def interpreter():
    return sys.excepthook, threading.excepthook, sys.exit, sys.meta_path[:], dict(os.environ)

before = interpreter()
for _ in range(2):
    assert mpi_util.mpi_fork(1) == "child" and mpi_util.all_sum(1) == 1
    assert all(new != old for new, old in zip(interpreter(), before))
    with mpi_util.during("rollout"):
        assert mpi_util.rank0_bcast_wts({"w": np.ones(3)}) == 1  # the first of a new channel
    print0_once("once in each")
    print0_once("once in each")
    process.reset()
    assert interpreter() == before
sys.exit(3)
""")
    done = run([sys.executable, program], SOON_S)
    assert done.status == 3 and done.err == "once in each\n" * 2


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


def test_more_ranks_than_files_may_be_open(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import resource, mpi_util\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\nmpi_util.mpi_fork(200)\n"
    )
    done = run([sys.executable, program], SOON_S, {"TMPDIR": str(tmp_path)})
    assert done.status == 1 and "LaunchError: cannot start 200 ranks: Too many open files; `ulimit -n`" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_a_program_that_goes_on_in_the_parent_does_not_run_once_more(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import mpi_util\nmpi_util.mpi_fork(2)\nprint('sum', mpi_util.all_sum(1))\n")
    done = run([sys.executable, program], SOON_S)
    assert done.status == 1 and done.out == "sum 2\nsum 2\n"
    assert "this process has started the ranks, which have ended, and has nothing to compute; write `if" in done.err


@pytest.mark.parametrize("who", [0, 2])
def test_any_rank_may_be_killed(run_ranks, who):
    finished = run_ranks("fail.py", 3, who, "kill", timeout=SOON_S, status=137)
    assert f"rank {who} was killed by signal 9" in finished.err


def test_rank_0_that_ends_early_is_told_from_a_slow_one(run_ranks):
    finished = run_ranks("fail.py", 3, 0, "return", timeout=SOON_S, status=1)
    assert "rank 0 has ended while rank 1 waits for it in rank0_accum_batches" in finished.err


@pytest.mark.parametrize(("mpi", "who"), [("mpich", 0), ("openmpi", 1)], indirect=["mpi"])
def test_the_watchdog_names_the_missing_rank_and_shows_its_stack(run_ranks, who):
    env = {"MPI_UTIL_WATCHDOG": "1"}
    finished = run_ranks("fail.py", 2, who, "hang", timeout=60, env=env)
    assert f"has waited 1 s for rank {who} in rank0_accum_batches" in finished.err
    program = (RANKS / "fail.py").read_text().splitlines()
    hangs = 1 + next(i for i, line in enumerate(program) if "time.sleep(4)" in line)
    assert f'fail.py", line {hangs} in <module>' in finished.err  # the other rank's stack
    assert f'fail.py", line {len(program)} in <module>' in finished.err  # where this one waits


@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_call_that_was_interrupted_leaves_no_answer_for_the_next(tmp_path, interrupted, mpi):
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys, time, mpi_util\n"
        "if mpi_util.mpi_fork(2) == 'parent': sys.exit()\n"
        f"if mpi_util.rank == {interrupted}:\n"
        "    signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "else:\n"
        "    time.sleep(1)\n"
        "for i in range(4):\n"
        "    try: print('sum', i, mpi_util.all_sum(100 * i), flush=True)\n"
        "    except (KeyboardInterrupt, mpi_util.MpiUtilError) as error: print(type(error).__name__, flush=True)\n"
    )
    done = run([sys.executable, program], SOON_S, mpi_environment(mpi))  # it must not hang
    sums = [line.split()[1:] for line in done.out.splitlines() if line.startswith("sum")]
    assert all(int(total) == 200 * int(i) for i, total in sums), done.out
    assert "KeyboardInterrupt" in done.out and (interrupted == 0 or len(sums) == 7), done.out


@pytest.mark.parametrize(("n", "slow"), [(2, 0), (3, 2)])
def test_a_message_that_came_at_the_end_of_the_last_round_is_about_this_one(tmp_path, n, slow, mpi):
    """A rank that is interrupted while it waits on the barrier page may receive what is sent in the next call."""
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
