"""What fails amid a call between machines: amid.py 4 gather | broadcast. Rank 2 leads the second machine, to rank 3."""

import sys

import numpy as np
from harness import fork

import mpi_util
from mpi_util.collectives import channel
from mpi_util.collectives.messages import Messages

fork()
rank, ours = mpi_util.rank, channel.channel_of()


def fails(call, *ranks) -> None:
    """Requires that the call raises on those ranks; others may be done with it before they hear of it."""
    try:
        call()
    except Exception as error:
        assert "no room" in str(error), error
    else:
        assert rank not in ranks, "nothing was raised"


def no_room(*_):
    raise MemoryError("no room")


def gather():
    return mpi_util.rank0_accum_batches({"x": np.full(3_000_000, rank, np.float32)})


def broadcast():
    return mpi_util.rank0_bcast_wts({"w": np.full(3_000_000, rank)})


def replaced(module, name, who):
    """Within the next call that function fails on that rank."""
    if rank == who:
        kept = getattr(module, name)
        setattr(module, name, lambda *given: (setattr(module, name, kept), no_room()))


if sys.argv[2] == "gather":
    for module, name, who in ((channel, "write_rows", 1), (Messages, "send", 3), (channel, "write_rows", 0)):
        replaced(module, name, who)
        fails(gather, 0, who)
        found = gather()
        assert rank or np.array_equal(found["x"], np.repeat(np.arange(4), 3_000_000))
else:
    replaced(channel.Channel, "lease", 2)
    fails(broadcast, 2, 3)
    assert not broadcast()["w"].any()
print("done", flush=True)
