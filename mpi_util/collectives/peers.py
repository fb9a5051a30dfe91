"""Which ranks share a machine, and how they wake each other; in the process of each rank."""

import contextlib
import os
from typing import Any, NamedTuple

import numpy as np

from ..host.segments import Ticket, attach
from ..host.waiting import WakePipe, wait_until
from ..ranks.state import state
from ..ranks.watchdog import Watchdog


class PeerInfo(NamedTuple):
    """What a rank sends to the others of its machine when a channel is made."""

    pid: int
    wake_fd: int  # of its wake-up pipe: /proc/<pid>/fd/<wake_fd>
    ticket: Ticket | None  # of its note, which only ranks of its machine can attach; None: no shared memory


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
        self._ticket = state(Watchdog).ticket
        rows = all_of(together, [rank, os.getpid(), self.pipe.write_fd, *(self._ticket or Ticket(0, 0, 0, 0))])
        # of the ranks of this machine, as MPI knows it
        self.infos = {k: PeerInfo(pid, fd, Ticket(*rest) if rest[0] else None) for k, pid, fd, *rest in rows}
        ranks = [row[0] for row in all_of(here, [rank])]
        lowest = ranks[0]
        reach = np.array(all_of(here, [k == rank or self._open(k) for k in ranks]), bool)
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

    def _open(self, k: int) -> bool:
        info = self.infos[k]
        if info.ticket is None or self._ticket is None:
            return False
        with contextlib.suppress(OSError):
            os.close(attach(info.ticket)[0])
            self.wake_fds[k] = WakePipe.open(info.pid, info.wake_fd)
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
