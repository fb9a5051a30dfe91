"""Who is on this rank's machine, and how ranks there wake each other."""

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..host.segments import STORES_IN_ORDER, Segment, Ticket, attach
from ..host.waiting import WakePipe, wait_until
from ..ranks.watchdog import NOTE_BYTES
from .rings import Rings, size_of


class PeerInfo(NamedTuple):
    """What a rank sends to the others of its machine when a channel is made."""

    pid: int
    wake_fd: int  # of its wake-up pipe: /proc/<pid>/fd/<wake_fd>
    ticket: Ticket | None  # of its memory, which only ranks of its machine can attach; None: no shared memory


class Peers:
    """Collective: this rank's view of the ranks on its machine.

    Attributes:
        machine: for each rank of the communicator its leader: the lowest rank of its machine, with which it shares
            memory. A rank that cannot share it counts as a machine of its own.
        apart: the ranks of which that is so.
        infos: of the ranks of this machine, as MPI knows it, by rank.
        rings: to and from the ranks with which this one exchanges messages in shared memory.
    """

    def __init__(self, comm: Any, rank: int):
        from mpi4py import MPI

        self._comm, self._rank = comm, rank
        self.pipe = WakePipe()  # by which this rank is woken
        self.wake_fds: dict[int, int] = {}  # by rank, the pipes of those that this rank can wake
        self._segment: Segment | None = None
        together = comm.Split_type(MPI.COMM_TYPE_SHARED)
        # to test or to measure what ranks on several machines do: as if they were spread over them in equal blocks
        pretended = int(os.environ.get("MPI_UTIL_MACHINES", "0"))
        everyone = MPI.COMM_WORLD
        here = together.Split(everyone.Get_rank() * pretended // everyone.Get_size())
        n = here.Get_size()
        with contextlib.suppress(OSError):
            self._segment = Segment(NOTE_BYTES + (size_of(n) if here.Get_rank() == 0 else 0))
        ticket = self._segment.ticket if self._segment else Ticket(0, 0, 0, 0)
        rows = _all_of(together, [rank, os.getpid(), self.pipe.write_fd, *ticket])
        self.infos = {k: PeerInfo(pid, fd, Ticket(*rest) if rest[0] else None) for k, pid, fd, *rest in rows}
        self._here: list[int] = [row[0] for row in _all_of(here, [rank])]
        # memory for this rank's note (launch/watchdog.py), which all on its machine may read; None: there is none
        self.note: Any = self._segment.map if self._segment else None
        lowest = self._here[0]
        tried = self._here if rank == lowest else [lowest]
        reached = {k for k in tried if k == rank or self._open(k)}
        both = np.array(_all_of(here, [k in reached for k in self._here]), bool)
        shared = [k for i, k in enumerate(self._here) if both[0, i] and both[i, 0]]  # the two reach each other
        here.Free()
        together.Free()
        leader = lowest if rank in shared else rank
        leaders = np.array(_all_of(comm, [leader, lowest]))
        self.machine: list[int] = leaders[:, 0].tolist()
        self.apart: list[int] = np.flatnonzero(leaders[:, 0] != leaders[:, 1]).tolist()
        self.keep([k for k in shared if rank in shared])
        if rank in shared and self._segment is not None and STORES_IN_ORDER:
            self.rings = Rings(self._memory_of(lowest), self._here, rank, shared)
        else:
            self.rings = Rings(memoryview(bytearray(size_of(1))), [rank], rank, [rank])

    def _memory_of(self, lowest: int) -> memoryview:
        """For the rings, with the machine's lowest rank."""
        if self._segment is not None and self._rank == lowest:
            return self._segment.lend(self._segment.ticket.size).data[NOTE_BYTES:]
        fd, memory = attach(self.infos[lowest].ticket or Ticket(0, 0, 0, 0))
        os.close(fd)
        return memoryview(memory)[NOTE_BYTES:]

    def of_rank_0(self, own: int) -> int:
        """Collective: rank 0's integer."""
        return _all_of(self._comm, [own])[0][0]

    def keep(self, here: list[int]) -> None:
        """Closes the pipes of the ranks that are not in `here`."""
        for k in self.wake_fds.keys() - set(here):
            os.close(self.wake_fds.pop(k))

    def open_all(self, here: list[int]) -> None:
        """Opens the pipes of all ranks in `here`; before, only a leader and each of its members wake each other."""
        for k in here:
            if k != self._rank and k not in self.wake_fds:
                self._open(k)  # if that fails, the other one wakes up by itself

    def _open(self, k: int) -> bool:
        info = self.infos[k]
        if info.ticket is None or self._segment is None:
            return False
        try:
            os.close(attach(info.ticket)[0])
            self.wake_fds[k] = WakePipe.open(info.pid, info.wake_fd)
        except OSError:
            return False
        return True

    def wake(self, k: int) -> None:
        """Wakes rank `k`, if it sleeps and can be woken from here; else it polls."""
        if k in self.wake_fds and self.rings.wakes(k):
            WakePipe.wake(self.wake_fds[k])

    def sleep(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sleeps until woken, unless `ready`. True if it is worth looking again at once.

        Others see whether this rank sleeps: no rank wakes one that is awake.
        """
        self.rings.sleeps(True)
        try:
            if ready() or self.pipe.sleep(seconds):
                return True
        finally:
            self.rings.sleeps(False)
        self._comm.Iprobe()  # MPI moves nothing of the program's, or of other channels', unless it is called
        return False

    def close(self) -> None:
        """Gives memory and file descriptors back."""
        self.keep([])
        self.pipe.close()
        if self._segment is not None:
            self._segment.close()


def _all_of(comm: Any, own: list[int]) -> list[list[int]]:
    """Collective: the integers of all ranks, as many of each."""
    found = np.empty((comm.Get_size(), len(own)), np.int64)
    request = comm.Iallgather(np.array(own, np.int64), found)
    wait_until(request.Test)
    rows: list[list[int]] = found.tolist()
    return rows
