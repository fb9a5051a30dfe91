"""Runs on several hosts: hosts.py ARGUMENTS [HOW RANK]. ARGUMENTS: of mpi_fork, as JSON. HOW: what that rank does then.

Without HOW the ranks only say where they are; with `work` they work until they are stopped.
"""

import json
import os
import socket
import sys
import time

import numpy as np

import mpi_util

if mpi_util.mpi_fork(**json.loads(sys.argv[1])) == "parent":
    sys.exit()
print(f"rank {mpi_util.rank} of {mpi_util.nworkers} is on {socket.gethostname()}", flush=True)
how, who = sys.argv[2] if len(sys.argv) > 2 else "", int(sys.argv[3]) if len(sys.argv) > 3 else 0
first = mpi_util.last_saved or 0
for i in range(first, 1_000_000):
    batch = mpi_util.rank0_accum_batches({"x": np.full(3, float(i))})
    if mpi_util.rank == 0 and i == first:
        print("started", file=sys.stderr, flush=True)
    if not how or (how == "count" and i == 300):
        break
    if mpi_util.rank == 0 and how == "count":
        mpi_util.saved(i)
    time.sleep(0.01)
    if i == 20 and mpi_util.rank == who:
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "segv":
            os.kill(os.getpid(), 11)
        if how == "raise":
            raise ZeroDivisionError("a bug")
        if how == "exit":
            sys.exit(3)
if mpi_util.rank == 0:
    print("sum", batch["x"].sum() / mpi_util.nworkers, flush=True)
