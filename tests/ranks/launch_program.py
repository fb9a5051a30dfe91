"""Run by test_launch.py: start N ranks, register each in the job's folder as mpi_util's ranks do, then end as told.

python launch_program.py N MODE
"""

import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpi_util.host import reap
from mpi_util.launch.api import start_ranks

FAILING_RANK = 1
WAIT_S = 30.0  # longer than any test waits: a rank that is not stopped makes its test fail


def register(rank, mpi_segments):
    """Writes rank-<k> in one step and opens alive-<k>; returns its descriptor, to be kept."""
    folder = Path(os.environ["MPI_UTIL_JOB"])
    draft = folder / f"draft-{rank}"
    draft.write_text(json.dumps({"pid": os.getpid(), "shm": mpi_segments}))
    draft.rename(folder / f"rank-{rank}")
    atexit.register((folder / f"ended-{rank}").write_text, "{}")
    return os.open(folder / f"alive-{rank}", os.O_WRONLY)


def fail(mode, comm, mpi):
    """Ends this rank badly, in one of the ways in which ranks do."""
    print(f"last words\n{'-' * 74}\nof a user\n{'-' * 74}", file=sys.stderr)
    time.sleep(0.1)  # hydra drops what it has not read from a rank when that rank calls MPI_Abort
    if mode.startswith("signal"):
        os.kill(os.getpid(), int(mode[6:]))
    if mode.startswith("leave"):
        os._exit(int(mode[5:]))
    if mode == "record":
        record = {"status": 3, "reason": "ValueError: no luck", "time": time.time()}
        Path(os.environ["MPI_UTIL_JOB"], f"failed-{comm.rank}").write_text(json.dumps(record))
        comm.Abort(77)
    if mode == "abort":
        comm.Abort(5)
    if mode == "exit_after_finalize":
        mpi.Finalize()
        sys.exit(4)


def end_in_order_on_signal(comm):
    """Rank 0 takes the signal and tells the others; all end with 128 + signal."""
    caught = []
    if comm.rank == 0:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda signum, _: caught.append(signum))
        print("READY")
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        signum = comm.bcast(caught[0] if caught else 0)
        if signum:
            if comm.rank == 0:
                print(f"rank 0 got signal {signum}")
            comm.Barrier()
            sys.exit(128 + signum)
        time.sleep(0.01)


def print_much(n_lines):
    print("\n".join(f"line {i} {'-' * 90}" for i in range(n_lines)))


def show_environment():
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MPI_UTIL_GPU_PCT", "MPI_UTIL_TTY", "COLUMNS", "LINES")
    facts = {name: os.environ.get(name) for name in names}
    facts["cores"] = sorted(os.sched_getaffinity(0))
    facts["optimize"], facts["xoptions"], facts["argv"] = sys.flags.optimize, sys._xoptions, sys.argv[1:]
    facts["folder_mode"] = oct(os.stat(os.environ["MPI_UTIL_JOB"]).st_mode & 0o777)
    print("FACTS " + json.dumps(facts))


def main():
    n, mode = int(sys.argv[1]), sys.argv[2]
    if start_ranks(n, gpu_pct=0.25) == "parent":
        print("PARENT")
        return
    if n == 1:
        print("CHILD", "mpi4py" in sys.modules)
        return
    if mode == "silent":
        print(f"JOB {os.environ['MPI_UTIL_JOB']} READY")
        time.sleep(WAIT_S)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if "MPI_UTIL_JOB" in os.environ:
        segments = sorted(reap.mpi_files(os.getpid()))
        alive = register(comm.rank, segments)
        comm.Barrier()
        time.sleep(0.15)  # the parent looks every 50 ms for ranks that have registered
        print(f"JOB {os.environ['MPI_UTIL_JOB']}")
        print(f"RANK {comm.rank} {os.getpid()} {os.getppid()} {' '.join(segments)}")
    comm.Barrier()
    if mode == "ok":
        print(f"rank {comm.rank} of {comm.size}")
    elif mode == "facts" and comm.rank == 0:
        show_environment()
    elif mode == "stdin" and comm.rank == 0:
        print("READ " + sys.stdin.readline().strip())
    elif mode == "lines":
        for i in range(300):
            print("line", i, "of rank", comm.rank, "ends")
    elif mode == "in_order":
        end_in_order_on_signal(comm)
    elif mode == "flood":
        if comm.rank == 0:
            signal.signal(signal.SIGINT, lambda *_: Path(sys.argv[3]).touch())
            print("READY")
            signal.pause()
        else:
            time.sleep(0.5)
            print_much(10_000)
        comm.Barrier()
        sys.exit(128 + signal.SIGINT)
    elif mode == "much":
        if comm.rank == 1:
            print_much(2000)
    elif mode == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("READY")
        time.sleep(WAIT_S)
    elif mode == "wait":
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
        print("READY")
        time.sleep(WAIT_S)
    elif mode not in ("facts", "stdin"):
        if comm.rank == FAILING_RANK:
            fail(mode, comm, MPI)
        if mode != "exit_after_finalize":
            time.sleep(WAIT_S)
        os.close(alive)


if __name__ == "__main__":
    main()
