"""Fails in one of many ways: fail.py N RANK HOW. The others work on, or wait for it."""

import os
import sys
import time

import numpy as np
from harness import fork

import mpi_util

fork()
who, how = int(sys.argv[2]), sys.argv[3]
mpi_util.rank0_accum_batches({"x": np.zeros(3)})
mpi_util.print0("started", flush=True)

if mpi_util.rank == who:
    with mpi_util.during("rollout", episode=17):
        if how == "raise":
            raise ZeroDivisionError("a bug")
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "exit":
            sys.exit(3)
        if how == "raise-exit":
            raise SystemExit(3)
        if how == "os-exit":
            os._exit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "fail":
            mpi_util.fail("train: reward is nan", 1)
        if how == "thread":
            import threading

            threading.Thread(target=lambda: 1 / 0).start()
            time.sleep(30)
        if how == "hang":
            time.sleep(4)
        if how == "return":
            sys.exit(0)
if how.endswith("compute"):
    time.sleep(60)  # the others do not wait in a call of this package
mpi_util.rank0_accum_batches({"x": np.zeros(3)})
