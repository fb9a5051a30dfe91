"""Shared memory: a small /dev/shm does not matter, and where there is none, MPI serves and one line says so."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import RANKS, mpi_environment, run

from mpi_util.host.segments import Pool


def test_a_small_dev_shm_is_no_limit(mpi):
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    allowed = os.geteuid() == 0 and shutil.which("unshare")
    if not allowed or subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting a small /dev/shm needs root and mount namespaces")
    program = f"{mount} && exec {sys.executable} {RANKS / 'fallback.py'} 3 none"
    done = run(["unshare", "--mount", "sh", "-c", program], 90, mpi_environment(mpi))
    assert done.status == 0, done.err
    assert "2 ranks share memory" in done.out and not done.err


def test_a_system_without_memfd(run_ranks):
    done = run_ranks("fallback.py", 3, "no-memfd")
    assert "0 ranks share memory" in done.out
    assert done.err.splitlines() == [
        "mpi_util: ranks [1, 2] cannot share memory with others of their machine; they use MPI, slower"
    ]


def test_too_little_shared_memory(run_ranks):
    done = run_ranks("fallback.py", 3, "small-files")
    assert "2 ranks share memory" in done.out
    assert len(done.err.splitlines()) == 1 and "no shared memory" in done.err


def test_a_segment_is_lent_once_and_reused_when_nothing_refers_to_it():
    pool = Pool()
    first, ticket = pool.lease(1000)
    second, other = pool.lease(1000)
    assert ticket != other
    view = first[10:20].view("f2").reshape(5, 1)
    del first
    assert pool.lease(1000)[1] not in (ticket, other)  # the view keeps it
    del view, second
    assert pool.lease(1000)[1] in (ticket, other)
    pool.lease(1 << 23)
    assert len(pool.live) == 1  # the free ones were too small, and are gone
