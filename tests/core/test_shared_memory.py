"""Shared memory: a small /dev/shm does not matter, and where there is none, MPI serves and one line says so."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import RANKS, mpi_environment, run

from mpi_util.host.segments import BlockAddress, Pool, Segment, attach


def test_a_small_dev_shm_is_no_limit(mpi):
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    allowed = os.geteuid() == 0 and shutil.which("unshare")
    if not allowed or subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting a small /dev/shm needs root and mount namespaces")
    program = f"{mount} && exec {sys.executable} {RANKS / 'fallback.py'} 3 none"
    done = run(["unshare", "--mount", "sh", "-c", program], 90, mpi_environment(mpi))
    assert done.status == 0, done.err
    assert "2 ranks share memory" in done.out and not done.err


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi", how="one-way")
@pytest.mark.parametrize("how", ["no-memfd", "one-way"])
def test_ranks_that_cannot_reach_each_other_use_mpi(run_ranks, how):
    done = run_ranks("fallback.py", 3, how)
    assert "0 ranks share memory" in done.out
    assert done.err.splitlines() == [
        "mpi_util: ranks [1, 2] cannot share memory with others of their machine; they use MPI, slower"
    ]


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi", machines=1)
@pytest.mark.parametrize("machines", [1, 2])
def test_too_little_shared_memory(run_ranks, machines):
    done = run_ranks("fallback.py", 4, "small-files", env={"MPI_UTIL_MACHINES": str(machines)})
    assert f"{4 - machines} ranks share memory" in done.out
    assert len(done.err.splitlines()) == 1 and "no shared memory" in done.err


def test_a_segment_is_reused_when_nothing_refers_to_it():
    pool = Pool()
    first, (ticket, _) = pool.lease(1000)
    second, (other, _) = pool.lease(1000)
    assert ticket != other
    view = first[10:20].view("f2").reshape(5, 1)
    del first
    assert pool.lease(1000)[1].ticket not in (ticket, other)  # the view keeps it
    del view, second
    assert pool.lease(1000)[1].ticket in (ticket, other)
    assert len(pool.lease(1 << 23)[1].live) == 1  # the free ones were too small, and are gone


def test_a_segment_is_attached_shared_or_private():
    segment = Segment(1000)
    segment.map[:4] = b"data"
    (shared_file, shared), (private_file, private) = attach(segment.ticket), attach(segment.ticket, private=True)
    shared[0:1], private[1:2] = b"D", b"A"
    assert segment.map[:4] == b"Data" and private[:4] == b"DAta" and len(shared) == 1000
    for fd in (shared_file, private_file):
        os.close(fd)


@pytest.mark.parametrize("wrong", ["size", "serial", "reused", "pipe", "closed"])
def test_what_has_come_in_a_segments_place_is_not_attached(wrong):
    """The process id, or its descriptor, may belong to something else by the time that another process opens it."""
    segment = Segment(1000)
    ticket, pipe = segment.ticket, os.pipe()
    if wrong == "size":
        ticket = ticket._replace(size=1008)
    elif wrong == "serial":
        ticket = ticket._replace(serial=ticket.serial ^ 1)
    elif wrong == "reused":
        segment.close()
        segment = Segment(1000)
        assert segment.ticket.fd == ticket.fd
    elif wrong == "pipe":
        ticket = ticket._replace(fd=pipe[0])
    else:
        segment.close()
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        Pool().map(BlockAddress(ticket, frozenset()))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for fd in pipe:
        os.close(fd)
