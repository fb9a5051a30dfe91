"""What is shown of ranks other than 0: `mpi_fork(n, output="rank0")`, `on_rank0`."""

import os
import re
import select
import subprocess
import sys

import pytest
from conftest import LAUNCHER, RANKS, mpi_environment, run
from launching import CLEAN_ENVIRONMENT, TIMEOUT_S

from mpi_util.launch.launcher import ENVIRONMENT

BY_EACH = {f"{what} by {{}}" for what in ("printed", "echoed")}  # to stdout
MORE_RANKS_THAN_CORES = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def lines_by(text: str, rank: int) -> set[str]:
    """The kinds of lines of tests/ranks/output.py that a rank has printed."""
    return {each for each in BY_EACH if re.search(rf"^(\[\d\] )?{each.format(rank)}$", text, re.M)}


def assert_shown(text: str, *ranks: int) -> None:
    for rank in range(3):
        assert lines_by(text, rank) == (BY_EACH if rank in ranks else set()), text


@pytest.mark.parametrize(("by_hand", "how"), [(False, "end"), (False, "raise"), (True, "end"), (True, "text")])
def test_only_rank_0_prints_to_stdout(mpi, run_ranks, by_hand, how):
    if by_hand:
        command = [LAUNCHER[mpi], "-n", 3, sys.executable, "-u", RANKS / "output.py", 3, how, "rank0"]
        done = run(command, TIMEOUT_S, ENVIRONMENT | MORE_RANKS_THAN_CORES | mpi_environment(mpi))
    else:
        done = run_ranks("output.py", 3, how, "rank0", status=how == "raise")
    assert_shown(done.out + done.err, 0)
    assert all(f"logged by {rank}\n" in done.err for rank in range(3))
    assert ("by print0" in done.out) and ("[rank 1] meant" in done.err)
    assert (f"bad in {how}\n" in done.err) == (how != "end") == bool(done.status)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "fork", "child", "hook", "text", "caught", "fail"])
def test_errors_of_other_ranks_are_shown(how):
    status = how not in ("fork", "child")
    done = run([sys.executable, RANKS / "output.py", 3, how, "rank0"], TIMEOUT_S)
    said_by_rank = re.sub("^mpi_util: .*\n", "", done.err, flags=re.M)
    assert done.status == status and f"bad in {how}" in said_by_rank and "not shown" not in done.out
    assert lines_by(done.out, 1) == lines_by(done.out, 2) == set()


@pytest.mark.slow
def test_a_crash_and_the_watchdog_are_shown():
    done = run([sys.executable, RANKS / "output.py", 3, "crash", "rank0"], TIMEOUT_S)
    assert done.status == 139 and "Fatal Python error: Segmentation fault" in done.err and "string_at" in done.err
    done = run([sys.executable, RANKS / "output.py", 3, "watchdog", "rank0"], TIMEOUT_S)
    assert done.status == 1 and "stack of rank 0" in done.err and "the watchdog ends the job" in done.err
    assert_shown(done.out + done.err, 0)


def test_files_have_what_the_terminal_does_not_show(run_ranks, tmp_path):
    done = run_ranks("output.py", 3, "raise", "rank0", tmp_path, status=1)
    assert_shown(done.out + done.err, 0)
    assert "[1] ValueError: bad in raise\n" in done.err and "[rank 1] meant\n" in done.err
    assert all(f"[{rank}] logged by {rank}\n" in done.err for rank in range(3))
    for rank in range(3):
        text = (tmp_path / f"rank-{rank}.txt").read_text()
        assert all((f"printed by {k}\n" in text) == (k == rank) for k in range(3))
        assert ("ValueError: bad" in text) == (rank == 1)


def test_all_is_shown_otherwise(run_ranks):
    done = run_ranks("output.py", 3, "end")
    assert_shown(done.out + done.err, 0, 1, 2)
    assert "[rank 1] meant\n" in done.out
    done = run_ranks("output.py", 1, "end", "rank0")
    assert_shown(done.out + done.err, 0)


def test_a_progress_bar_is_passed_on_as_it_moves(tmp_path):
    """Also where each line begins with its rank."""
    program = "import sys, mpi_util; mpi_util.mpi_fork(2, tag_output=True) == 'parent' and sys.exit()\n"
    program += "if mpi_util.rank == 0:\n    for k in range(3):\n        print(f'\\r{k}', end='', flush=True)\n"
    program += "        input()\nmpi_util.all_sum(1)\n"
    (tmp_path / "bar.py").write_text(program)
    bar = subprocess.Popen([sys.executable, tmp_path / "bar.py"], stdin=-1, stdout=-1, env=CLEAN_ENVIRONMENT)
    seen = b""
    for expected in (b"[0] \r[0] 0", b"[0] \r[0] 0\r[0] 1", b"[0] \r[0] 0\r[0] 1\r[0] 2"):
        while len(seen) < len(expected):
            assert select.select([bar.stdout], [], [], TIMEOUT_S)[0], seen
            seen += os.read(bar.stdout.fileno(), 99)
        assert seen == expected
        bar.stdin.write(b"\n")
        bar.stdin.flush()
    assert bar.communicate(timeout=TIMEOUT_S)[0] == b"" and bar.returncode == 0


def test_another_output_is_refused():
    program = "import mpi_util; mpi_util.mpi_fork(2, output='rank1')"
    done = run([sys.executable, "-c", program], TIMEOUT_S)
    assert done.status == 2 and done.err.endswith("""UsageError: mpi_fork: output is "all" or "rank0"; got 'rank1'\n""")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("n", [1, 3])
def test_on_rank0(run_ranks, n):
    assert run_ranks("on_rank0.py", n).out == "well\n" * n


@pytest.mark.parametrize("call", ["gather", "batch", "sum", "class"])
def test_what_on_rank0_has_made_is_not_gathered(call):
    done = run([sys.executable, RANKS / "on_rank0.py", 2, call], TIMEOUT_S)
    assert done.status and done.err.count("\n") == 2
    assert ("on_rank0(SummaryWriter," if call == "class" else "what on_rank0 has made is on rank 0 alone") in done.err
