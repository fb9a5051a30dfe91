"""What ranks contribute to an agreement and are answered, on one machine or several: agree.py 6 WHO."""

import sys

from harness import fork, raises

import mpi_util
from mpi_util.collectives.channel import channel_of

LARGE = 1 << 17  # more bytes than MPI sends before it knows that they are received

fork()
who = int(sys.argv[2])
rank, size, ours = mpi_util.rank, mpi_util.nworkers, channel_of()


def call(contribute, op="a call"):
    """Each rank is answered by what the next one has contributed."""
    return ours.agree(op, contribute, lambda contributed: contributed[1:] + contributed[:1])


for i in range(100):
    n = (7 * rank + 13 * i) % 50 * 400  # bytes; small and large messages in turn overtake each other nowhere
    assert call(lambda mine=(rank, i, b"x" * n): mine)[:2] == ((rank + 1) % size, i)
assert call(lambda: [rank] * LARGE) == [(rank + 1) % size] * LARGE
raises((mpi_util.MpiUtilError, ZeroDivisionError), "ivision", lambda: call(lambda: 1 / (rank - who)))
raises(
    mpi_util.RankMismatchError,
    f"rank {who}: another call at",
    lambda: call(lambda: 0, "another call" if rank == who else "a call"),
)
assert mpi_util.all_sum(rank) == 15
raises((mpi_util.MpiUtilError, KeyError), "0", lambda: ours.agree("a call", int, lambda contributed: {}[0]))
assert mpi_util.all_sum(rank) == 15
mpi_util.print0("passed")
if rank == who:
    sys.exit()
mpi_util.all_sum(rank)
