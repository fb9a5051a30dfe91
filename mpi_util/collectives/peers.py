"""Which ranks share a machine, and how they wake each other; in the process of each rank."""

import contextlib
import os
from typing import Any

import numpy as np

from ..host.segments import Ticket, attach
from ..host.waiting import WakePipe, wait_until
from ..ranks.state import state
from ..ranks.watchdog import Watchdog


class Peers:
    """Collective: this rank's view of the ranks on its machine."""

    def __init__(self, comm: Any, rank: int):
        from mpi4py import MPI

        self.pipe = WakePipe()  # by which this rank is woken
        self.wake_fds = dict[int, int]()  # rank -> its pipe, of the other ranks with which this one shares memory
        together = comm.Split_type(MPI.COMM_TYPE_SHARED)
        # to test or to measure what ranks on several machines do: as if they were spread over them in equal blocks
        pretended = int(os.environ.get("MPI_UTIL_MACHINES", "0"))
        everyone = MPI.COMM_WORLD
        here = together.Split(everyone.Get_rank() * pretended // everyone.Get_size())
        rows = all_of(together, [rank, self.pipe.write_fd, *(state(Watchdog).ticket or Ticket(0, 0, 0, 0))])
        # of the notes of the ranks of this machine, as MPI knows it, but for those that have no shared memory
        self.tickets = {k: Ticket(*its) for k, _, *its in rows if any(its)}
        pipes = {k: fd for k, fd, *_ in rows}
        lowest, *_ = ranks = [row[0] for row in all_of(here, [rank])]
        reaches: list[int] = [k == rank or (rank in self.tickets and self._open(k, pipes[k])) for k in ranks]
        reach = np.array(all_of(here, reaches), bool)
        shared = [k for i, k in enumerate(ranks) if reach[0, i] and reach[i, 0]]  # it and the lowest reach each other
        here.Free()
        together.Free()
        leaders = np.array(all_of(comm, [lowest if rank in shared else rank, lowest]))
        # for each rank of the communicator the lowest rank of its machine, with which it shares memory
        self.machine: list[int] = leaders[:, 0].tolist()
        # the ranks that cannot share it; each counts as a machine of its own
        self.apart: list[int] = np.flatnonzero(leaders[:, 0] != leaders[:, 1]).tolist()
        for k in self.wake_fds.keys() - set(shared if rank in shared else []):
            os.close(self.wake_fds.pop(k))

    def _open(self, k: int, pipe: int) -> bool:
        with contextlib.suppress(OSError):
            if ticket := self.tickets.get(k):
                os.close(attach(ticket)[0])
                self.wake_fds[k] = WakePipe.open(ticket.pid, pipe)
                return True
        return False

    def close(self) -> None:
        while self.wake_fds:
            os.close(self.wake_fds.popitem()[1])
        self.pipe.close()


def all_of(comm: Any, own: list[int]) -> list[list[int]]:
    """Collective: the integers of all ranks, as many of each."""
    found = np.empty((comm.Get_size(), len(own)), np.int64)
    request = comm.Iallgather(np.array(own, np.int64), found)
    wait_until(request.Test)
    rows: list[list[int]] = found.tolist()
    return rows


def members_of(comm: Any) -> list[int]:
    """The rank in the world of each rank of a communicator; negative: it is in another world."""
    from mpi4py import MPI

    group = comm.Get_group()
    return [*group.Translate_ranks([*range(group.Get_size())], MPI.COMM_WORLD.Get_group())]
