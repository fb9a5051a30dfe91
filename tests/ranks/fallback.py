"""Large calls with little shared memory: fallback.py N none | no-memfd | one-way | small-files."""

import os
import resource
import sys

import numpy as np
from harness import fork

import mpi_util
from mpi_util.collectives.channel import channel_of
from mpi_util.host.waiting import WakePipe

how = sys.argv[2]
if how == "no-memfd":
    del os.memfd_create
if how == "one-way" and mpi_util.rank == 0:  # as in a container: rank 0 is seen by the others and does not see them

    def refuse(pid, fd):
        raise PermissionError(f"/proc/{pid}/fd/{fd}")

    WakePipe.open = staticmethod(refuse)
fork()
mpi_util.all_sum(0)
if how == "small-files":  # nothing above 1 MB can be had from here on; MPI itself has what it needs
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

rank, size = mpi_util.rank, mpi_util.nworkers
for iteration in range(2):
    own = np.full(20_000_000 // size, 10.0 * iteration + rank)
    got = mpi_util.rank0_accum_batches({"x": own})
    if rank == 0:
        assert np.array_equal(got["x"], np.repeat(np.arange(size) + 10.0 * iteration, len(own)))
    weights = {"w": np.full(20_000_000, float(rank))}
    mpi_util.rank0_bcast_wts(weights)
    assert (weights["w"] == 0).all()
    assert (mpi_util.all_sum(np.full(3_000_000, float(rank))) == sum(range(size))).all()
machine = channel_of().machine
shared = sum(k != lowest for k, lowest in enumerate(machine))  # beside the lowest of each machine
mpi_util.print0(f"{shared} ranks share memory")
