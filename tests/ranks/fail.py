"""Fails in one of many ways: fail.py N RANK HOW. The others work on, or wait for it."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from harness import fork

import mpi_util
from mpi_util.host.waiting import WakePipe


class NoText(Exception):
    """An error without a message: its __str__ is wrong."""

    def __str__(self):
        return 1 / 0


fork()
who, how = int(sys.argv[2]), sys.argv[3]
mpi_util.watchdog(None, kill="KILL" in os.environ)
mpi_util.rank0_accum_batches({"x": np.zeros(3)})
mpi_util.print0("started", flush=True)
if how == "hang":
    mpi_util.watchdog(3)
if how == "hang" and mpi_util.rank == 2:  # it waits in another way than the others: in a module of Python's
    WakePipe.sleep = lambda pipe, seconds: threading.Event().wait(seconds)

if mpi_util.rank == who:
    with mpi_util.during("rollout", episode=17):
        if how == "folder-gone":
            os.chdir(tempfile.mkdtemp())
            os.rmdir(os.getcwd())
        if how == "hook":
            sys.excepthook = lambda *_: print("Traceback of its own", file=sys.stderr)
        if how in ("raise", "folder-gone", "hook"):
            raise ZeroDivisionError("a bug")
        if how == "kill-parent":  # of a process that has its output
            subprocess.Popen(["/bin/sleep", "60"])
        if how in ("kill", "kill-parent"):
            os.kill(os.getpid(), 9)
        if how == "exit":
            sys.exit(3)
        if how == "raise-exit":
            raise SystemExit(4)
        if how == "site-exit":
            exit(5)
        if how == "exit-text":
            sys.exit("no luck")
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "bus":
            os.kill(os.getpid(), signal.SIGBUS)
        if how == "long":
            raise ZeroDivisionError("a bug " * 500_000)
        if how == "no-str":
            raise NoText
        if how == "os-exit":
            os._exit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "fail":
            mpi_util.fail("train: reward is nan", 1)
        if how == "thread":
            threading.Thread(target=lambda: 1 / 0).start()
            time.sleep(30)
        if how == "hang":
            time.sleep(7)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "return":
            sys.exit(0)
if how.endswith("compute"):
    time.sleep(60)  # the others do not wait in a call of this package
if how == "lock":  # held, as by a rank that is stopped within deal
    numbers = mpi_util.deal(4)
    if mpi_util.rank == who:
        fcntl.flock(numbers._counter._file, fcntl.LOCK_EX)
    mpi_util.all_sum(1)
    if mpi_util.rank == who:
        time.sleep(4)
        fcntl.flock(numbers._counter._file, fcntl.LOCK_UN)
    list(numbers)
mpi_util.rank0_accum_batches({"x": np.zeros(3)})
