"""Rank 1 ends above mpi_fork, as told: early.py N HOW FILE, where it writes the time."""

import os
import sys
import time

import mpi_util

if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    with open(sys.argv[3], "w") as file:
        file.write(str(time.time()))
    if sys.argv[2] == "import":
        import no_such_module  # noqa: F401
    if sys.argv[2] == "kill":
        time.sleep(0.1)  # of FIFOs that open and close before the waiting process looks, epoll has no order
        os.kill(os.getpid(), 9)
    sys.exit(int(sys.argv[2]))

if mpi_util.mpi_fork(int(sys.argv[1])) == "parent":
    sys.exit()
mpi_util.all_sum(1)
