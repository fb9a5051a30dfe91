"""Shared memory: a small /dev/shm does not matter, and where there is none, MPI serves and one line says so."""

import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import RANKS, mpi_environment, run

from mpi_util.collectives import gather_transfer as collecting
from mpi_util.host.segments import Attached, Pool, Segment, attach


def test_a_small_dev_shm_is_no_limit(mpi):
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    allowed = os.geteuid() == 0 and shutil.which("unshare")
    if not allowed or subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting a small /dev/shm needs root and mount namespaces")
    program = f"{mount} && exec {sys.executable} {RANKS / 'fallback.py'} 3 none"
    done = run(["unshare", "--mount", "sh", "-c", program], 90, mpi_environment(mpi))
    assert done.status == 0, done.err
    assert "2 ranks share memory" in done.out and not done.err


@pytest.mark.parametrize("how", ["no-memfd", "one-way"])
def test_ranks_that_cannot_reach_each_other_use_mpi(run_ranks, how):
    done = run_ranks("fallback.py", 3, how)
    assert "0 ranks share memory" in done.out
    assert done.err.splitlines() == [
        "mpi_util: ranks [1, 2] cannot share memory with others of their machine; they use MPI, slower"
    ]


@pytest.mark.parametrize("machines", [1, 2])
def test_too_little_shared_memory(run_ranks, machines):
    done = run_ranks("fallback.py", 4, "small-files", env={"MPI_UTIL_MACHINES": str(machines)})
    assert f"{4 - machines} ranks share memory" in done.out
    assert len(done.err.splitlines()) == 1 and "no shared memory" in done.err


def test_what_a_machine_sends_is_put_together_and_taken_apart():
    rng = random.Random(1)
    for largest in (10, 1 << 16, 9 << 20):
        target = np.random.default_rng(1).integers(0, 256, 30 << 20, np.uint8)
        cuts, pieces = 0, {k: [] for k in (4, 7, 9)}
        while cuts < len(target) - largest - 10:
            n = rng.randrange(largest) * rng.randrange(2)
            pieces[rng.choice((4, 7, 9))].append((cuts, n))
            cuts += n + rng.choice((0, 0, 10))
            if largest == 10 and cuts > 1e5:
                break
        starts, runs = collecting._image(pieces)
        image = np.empty(sum(n for own in pieces.values() for _, n in own), np.uint8)
        owners = np.full(len(image), -1)
        for k, own in pieces.items():
            for (start, n), at in zip(own, starts[k]):
                image[at : at + n] = target[start : start + n]
                owners[at : at + n] = k
        at = 0
        messages = collecting._in_messages(runs)
        for message, owner in messages:
            assert 0 < sum(n for _, n in message) <= 4 << 20
            for start, n in message:
                assert (image[at : at + n] == target[start : start + n]).all()
                assert owner == -1 or (owners[at : at + n] == owner).all()
                at += n
        assert at == len(image) and len(messages) < 2 * sum((n >= 1 << 16) + n // (4 << 20) for (_, n), _ in runs) + 9


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
        Attached().map(ticket, frozenset())
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for fd in pipe:
        os.close(fd)
