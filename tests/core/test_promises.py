"""The three promises, with NumPy and MPI alone: same bits at any size, no core wasted, no hang and one report."""

import json
import os
import time

import pytest

SOON_S = 10  # the promise is a second or two; shared machines stall


def test_same_bits_at_any_size(run_ranks):
    weights = [run_ranks("promises.py", n).out.splitlines()[:4] for n in (1, 2, 3, 4)]
    assert len(weights[0]) == len(set(weights[0])) == 4
    assert weights[1:] == weights[:1] * 3


def test_waiting_ranks_sleep_and_rank_0_has_all_cores(run_ranks):
    found = json.loads(run_ranks("promises.py", 3).out.splitlines()[-1])
    assert len(found["used"]) == 2 and max(found["used"]) < 0.02, found
    assert found["cores"] == len(os.sched_getaffinity(0))


@pytest.mark.left_out(mpi="openmpi", who=0)
@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize(
    ("how", "status", "report"),
    [
        ("raise", 1, "rank {}: uncaught exception"),
        ("kill", 137, "rank {} was killed by signal 9"),
        ("leave", 1, "rank {} has ended while"),
    ],
    ids=["raise", "kill", "leave"],
)
def test_a_rank_that_fails_ends_the_job_with_one_report(run_ranks, how, status, report, who):
    began = time.monotonic()
    done = run_ranks("promises.py", 3, how, who, status=status)
    assert time.monotonic() - began < SOON_S
    assert done.err.count("Traceback") == (how == "raise") and report.format(who) in done.err, done.err
