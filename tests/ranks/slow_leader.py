"""Rank 0 ends before the leader of another machine has passed on its last answer: slow_leader.py 4."""

import time

from harness import fork

import mpi_util
from mpi_util.collectives.channel import channel_of
from mpi_util.collectives.messages import REPLY

fork()
messages = channel_of().messages
post_all = messages.post_all


def late(found, *end):
    if any(message[0] == REPLY for message in found.values()):
        time.sleep(0.5)
    post_all(found, *end)


if mpi_util.rank == 2:
    messages.post_all = late
assert mpi_util.all_sum(1) == 4
print("done", flush=True)
