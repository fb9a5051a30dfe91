"""What fails amid a call between machines: amid.py 4 gather | broadcast. Rank 2 leads the second machine, to rank 3."""

import sys

import numpy as np
from harness import fork

import mpi_util
from mpi_util.cluster import forwarding
from mpi_util.collectives import channel

fork()
rank, ours = mpi_util.rank, channel.channel_of()


def fails(call, who) -> None:
    """Requires that the call raises on that rank and on rank 0; others may be done with it before they hear of it."""
    try:
        call()
    except Exception as error:
        assert "no room" in str(error), error
    else:
        assert rank not in (0, who), "nothing was raised"


def no_room(*_):
    raise MemoryError("no room")


def gather():
    return mpi_util.rank0_accum_batches({"x": np.full(3_000_000, rank, np.float32)})


def broadcast():
    mpi_util.rank0_bcast_wts({"w": np.zeros(3_000_000, np.float32)})


def replaced(module, name, who):
    """Within the next call that function fails on that rank."""
    if rank == who:
        kept = getattr(module, name)
        setattr(module, name, lambda *given: (setattr(module, name, kept), no_room()))


if sys.argv[2] == "gather":
    for module, name, who in ((channel, "write_rows", 3), (forwarding, "send", 2), (channel, "write_rows", 0)):
        replaced(module, name, who)
        fails(gather, who)
        found = gather()
        assert rank or np.array_equal(found["x"], np.repeat(np.arange(4), 3_000_000))
else:
    replaced(forwarding, "broadcast", 2)
    fails(broadcast, 2)
    for _ in range(2):  # leaders may be out of step
        try:
            mpi_util.all_sum(1)
        except mpi_util.MpiUtilError as error:
            assert "the program must be started again" in str(error)
        else:
            raise AssertionError("the channel is used on")
print("done", flush=True)
