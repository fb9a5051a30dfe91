"""What ranks bring and are answered, on machines in a chain of leaders, each of which sends on to the next."""

import sys

from harness import fork, raises

import mpi_util
from mpi_util.collectives import channel
from mpi_util.collectives.rings import LARGE

channel.FAN = 1
fork()
who = int(sys.argv[2])
rank, size, ours = mpi_util.rank, mpi_util.nworkers, channel.channel_of()
assert len(set(ours.machine)) == 3, ours.machine


def call(bring, op="a call"):
    """Each rank is answered by what the next one has brought."""
    return ours.agree(op, bring, lambda brought: brought[1:] + brought[:1])


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
raises((mpi_util.MpiUtilError, KeyError), "0", lambda: ours.agree("a call", int, lambda brought: {}[0]))
assert mpi_util.all_sum(rank) == 15
mpi_util.print0("passed")
if rank == who:
    sys.exit()
mpi_util.all_sum(rank)
