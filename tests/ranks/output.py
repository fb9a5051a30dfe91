"""Prints in all the ways there are, and then ends as told: output.py N HOW [output [log_dir]]. Rank 1 is the one."""

import ctypes
import logging
import multiprocessing
import subprocess
import sys
import threading
import traceback
import warnings

logging.basicConfig(format="logged by %(message)s")  # its handler has the stream from above mpi_fork

import mpi_util  # noqa: E402

N, HOW, *OUTPUT = sys.argv[1:]
more = dict(zip(("output", "log_dir"), OUTPUT))
if mpi_util.mpi_fork(int(N), tag_output="log_dir" in more, **more) == "parent":
    sys.exit()
rank = mpi_util.rank
print("printed by", rank)
ctypes.CDLL(None).system(f"echo echoed by {rank}".encode())
logging.error(rank)
warnings.warn(f"warned by {rank}", stacklevel=1)
print(f"\r 50% by {rank}", end="", file=sys.stderr, flush=True)
sys.stderr.buffer.write(b"\nbytes by %d\n" % rank)
sys.stderr.flush()
assert sys.stderr.fileno() == 2 and sys.stdout.fileno() == 1
mpi_util.print0("by print0")


def bad():
    raise ValueError(f"bad in {HOW}")


if HOW == "watchdog":
    mpi_util.watchdog(0.5 if rank else 0, kill=True)
    mpi_util.all_sum(1) if rank else threading.Event().wait()
if rank == 1:
    mpi_util.msg("meant")
    if HOW == "raise":
        bad()
    if HOW == "thread":
        threading.Thread(target=bad).start()
    if HOW == "fork":
        child = multiprocessing.get_context("fork").Process(target=bad)
        child.start()
        child.join()
    if HOW == "child":
        subprocess.run(["sh", "-c", "echo bad in child >&2; echo not shown"], check=True)
    if HOW == "hook":
        sys.excepthook = lambda *error: traceback.print_exception(*error)
        bad()
    if HOW == "text":
        sys.exit("bad in text")
    if HOW == "caught":  # as hydra does
        print("bad in caught", file=sys.stderr)
        sys.exit(1)
    if HOW == "fail":
        mpi_util.fail("bad in fail")
    if HOW == "crash":
        import faulthandler

        faulthandler.enable()
        ctypes.string_at(0)
mpi_util.all_sum(1)
