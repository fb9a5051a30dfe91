"""Prints the cores that each bound rank may use, then ends with the status that argv[2] gives."""

import os
import sys

from mpi_util_spinup.mpi_tools import mpi_fork, mpi_sum, num_procs, proc_id

mpi_fork(int(sys.argv[1]), bind_to_core=True)
print(f"rank {proc_id()} of {num_procs()} on {sorted(os.sched_getaffinity(0))}", flush=True)
mpi_sum(1)
sys.exit(int(sys.argv[2]))
