"""Adds up numbers; the last rank fails as told: restarts.py N HOW [MAX_RESTARTS]. HOW ends in 2: at each start."""

import os
import sys
import time

import mpi_util

n, how, max_restarts = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 3
if mpi_util.mpi_fork(n, max_restarts=max_restarts) == "parent":
    sys.exit()

state = mpi_util.last_saved or {"i": 0, "sum": 0}
mpi_util.print0(f"start {mpi_util.restarts} from {state['i']}", flush=True)
while state["i"] < 5:
    state = {"i": state["i"] + 1, "sum": state["sum"] + mpi_util.all_sum(state["i"] * (mpi_util.rank == 0))}
    if mpi_util.rank == 0 and not (how.endswith("2") and state["i"] == 3):
        mpi_util.saved(state)
    mpi_util.all_sum(0)  # what is below comes after the saving
    at_once = how.endswith("2") or mpi_util.restarts == 0
    fails = mpi_util.rank == n - 1 and (state["i"] == 3 if at_once else how == "progress" and state["i"] > 3)
    if fails and how.startswith("raise"):
        with mpi_util.during("sum", i=state["i"], start=mpi_util.restarts):  # details may differ
            raise ZeroDivisionError("a bug")
    if fails and how.startswith(("kill", "progress")):
        os.kill(os.getpid(), 9)
    if fails and how == "helper":
        os.kill(os.getppid(), 9)
        time.sleep(20)
    if fails and how == "usage":
        mpi_util.fail("a bad setting", status=2)
    if fails and how == "signal":
        os.kill(os.getpid(), 15)
if how == "together":
    sys.exit(4)
mpi_util.print0(f"sum {state['sum']}")
