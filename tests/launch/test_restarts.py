"""A job that fails is started again: a user's program, and train.py, to the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import RANKS, ROOT, mpi_environment, run, without_note_of_cores
from launching import survivors
from training import TIME_COLUMNS

KILLED = "was killed by signal 9 (SIGKILL)"
BUG = "ended with status 1 (ZeroDivisionError: a bug)"


def start(n, how, mpi, *arguments):
    return run([sys.executable, RANKS / "restarts.py", n, how, *arguments], 60, mpi_environment(mpi))


def lines(done):
    return [line for line in done.err.splitlines() if line.startswith("mpi_util: ") and "uncaught" not in line]


@pytest.mark.slow_if(n=1)
@pytest.mark.slow_if(how="helper")
@pytest.mark.left_out(mpi="openmpi", n=1)  # without MPI
@pytest.mark.left_out(how="helper", n=1)
@pytest.mark.parametrize(
    ("how", "line"), [("kill", KILLED), ("raise", BUG), ("helper", f"a helper process of the launcher {KILLED}")]
)
@pytest.mark.parametrize("n", [1, 3])
def test_after_a_failure_the_program_goes_on(n, how, line, mpi):
    if how == "helper" and mpi == "openmpi":
        line = f"the launcher {KILLED}"
    done = start(n, how, mpi)
    assert done.status == 0 and done.out == "start 0 from 0\nstart 1 from 3\nsum 10\n", done.out + done.err
    (ours,) = lines(done)
    assert line in ours and ours.endswith("; restart 1 of 3")


def test_a_note_is_what_json_can_hold(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, pathlib, numpy as np, mpi_util\n"
        "if mpi_util.mpi_fork(1, max_restarts=1) == 'parent': sys.exit()\n"
        "if mpi_util.last_saved: sys.exit(print(mpi_util.last_saved))\n"
        "mpi_util.saved({'path': pathlib.Path('a/b'), 'n': np.int64(3), 4: np.ones(2)})\n"
        "try: mpi_util.saved('x' * 200_000)\n"
        "except mpi_util.UsageError as error: print(error)\n"
        "try: mpi_util.saved(object())\n"
        "except mpi_util.UsageError as error: print(error)\n"
        "1 / 0\n"
    )
    done = run([sys.executable, program], 60)
    too_long, refused, saved = done.out.splitlines()
    assert too_long.endswith("it has 200,002 characters, and 100,000 is the most")
    assert saved == f"{{'path': '{Path.cwd() / 'a/b'}', 'n': 3, '4': [1.0, 1.0]}}"
    assert refused.startswith("saved: the note must be what JSON can hold: ") and "object" in refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "how", "status", "starts", "end"),
    [
        (2, "kill2", 137, 2, "not restarted: it has failed in the same way twice, without progress"),
        (1, "raise2", 1, 2, "not restarted: it has failed in the same way twice, without progress"),
        (2, "progress", 0, 4, "restart 3 of 3"),
        (2, "usage", 2, 1, " has ended the job; all 2 ranks were stopped"),
        (2, "signal", 143, 1, "rank 1 was killed by signal 15 (SIGTERM); all 2 ranks were stopped"),
        (2, "together", 4, 1, ""),
        (1, "together", 4, 1, ""),
    ],
)
def test_how_often_it_is_started_again(n, how, status, starts, end):
    done = start(n, how, "mpich")
    assert done.status == status, done.err
    assert done.out.count("start") == starts
    assert (lines(done) or [""])[-1].endswith(end)


@pytest.mark.slow
def test_a_signal_from_the_user_ends_it():
    process = subprocess.Popen(
        [sys.executable, "-c", "import mpi_util, time; mpi_util.mpi_fork(2, max_restarts=3); mpi_util.all_sum(1)\n"
         "mpi_util.print0('READY', flush=True)\ntime.sleep(30)"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout.readline() == "READY\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (143, "")
    assert err == "mpi_util: signal 15 (SIGTERM); all 2 ranks were stopped\n"


@pytest.mark.slow
def test_without_restarts_it_says_nothing_of_them():
    (line,) = lines(start(2, "kill", "mpich", 0))
    assert line == f"mpi_util: rank 1 {KILLED}; all 2 ranks were stopped"


@pytest.mark.parametrize("count", [-1, 1.5, "3"])
def test_a_bad_number_of_restarts(count):
    done = run([sys.executable, "-c", f"import mpi_util; mpi_util.mpi_fork(2, max_restarts={count!r})"], 20)
    assert done.status == 2 and len(done.err.splitlines()) == 1
    assert "UsageError: mpi_fork: max_restarts is a whole number of at least 0" in done.err


# ---- train.py

RUN = ["tests.envs:Uneven-v0", "-n", 120, "-b", 8, "--eval_every", 1000, "--eval_episodes", 2]


def results(folder):
    rows = [line.split("\t") for line in (folder / "progress.txt").read_text().splitlines()]
    kept = [[value for name, value in zip(rows[0], row) if name not in TIME_COLUMNS] for row in rows]
    return kept, [(folder / name).read_bytes() for name in ("policy.safetensors", "best.safetensors")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run([sys.executable, "train.py", *RUN, "--run_dir", folder], 120).status == 0
    return results(folder)


def victim(token, who):
    """A process of the job: a random rank, or the process that has started the ranks."""
    ranks = [p for p in survivors(token) if "MPI_UTIL_RESTARTS" in p.environ() and p.cmdline()[0] == sys.executable]
    return random.choice(ranks) if who == "rank" else ranks[0].parent()


@pytest.mark.slow
@pytest.mark.left_out(n=1, who="launcher")
@pytest.mark.left_out(mpi="openmpi", who="rank")
@pytest.mark.parametrize("who", ["rank", "launcher"])
@pytest.mark.parametrize("n", [1, 3])
def test_train_goes_on_to_the_same_bits(undisturbed, tmp_path, n, who, mpi):
    token, folder = f"{os.getpid()}-{time.time()}", tmp_path / "run"
    command = ["train.py", *RUN, "--nprocs", n, "--max_restarts", 2, "--run_dir", folder]
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, stdin=subprocess.DEVNULL,
        env=os.environ | mpi_environment(mpi) | {"MPI_UTIL_TEST_TOKEN": token},
    )  # fmt: skip
    wanted = random.randrange(2, 12)
    while process.poll() is None:
        time.sleep(0.01)
        try:
            if len((folder / "progress.txt").read_text().splitlines()) > wanted:
                victim(token, who).kill()
                break
        except (FileNotFoundError, IndexError, psutil.NoSuchProcess):
            continue
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    assert err.count("restart 1 of 2") == 1 and len(without_note_of_cores(err).splitlines()) == 1, err
    assert results(folder) == undisturbed
    assert not survivors(token)


@pytest.mark.slow
def test_an_exception_that_comes_once(undisturbed, tmp_path):
    folder = tmp_path / "run"
    env = {"MPI_UTIL_TEST_RAISE_ONCE": str(tmp_path / "raised")}
    done = run([sys.executable, "train.py", *RUN, "--nprocs", 2, "--max_restarts", 1, "--run_dir", folder], 90, env)
    assert done.status == 0 and "(RuntimeError: a flaw); all 2 ranks were stopped; restart 1 of 1" in done.err, done.err
    assert results(folder) == undisturbed
