"""The ranks on this rank's machine: which they are, with whom it can share memory, and how they wake each other."""

import contextlib
import os
from typing import Any, NamedTuple

from ..host.segments import Segment, Ticket, attach
from ..host.waiting import WakePipe
from ..launch.watchdog import NOTE_BYTES


class PeerInfo(NamedTuple):
    """What a rank sends to all others when a channel is made."""

    pid: int
    wake_fd: int  # of its wake-up pipe: /proc/<pid>/fd/<wake_fd>
    ticket: Ticket | None  # of its note, which only ranks of its machine can attach; None: no shared memory
    lowest: int  # the lowest rank on its machine, as MPI knows it


class Peers:
    """Collective: this rank's view of the ranks on its machine."""

    def __init__(self, comm: Any, rank: int):
        self._rank = rank
        self.pipe = WakePipe()  # by which this rank is woken
        self.wake_fds: dict[int, int] = {}  # by rank, the pipes of those that this rank can wake
        self.infos: list[PeerInfo] = []  # of all ranks, once they are known
        self._segment: Segment | None = None
        with contextlib.suppress(OSError):
            self._segment = Segment(NOTE_BYTES)
        ticket = self._segment.ticket if self._segment else None
        # memory for this rank's note (launch/watchdog.py), which all on its machine may read; None: there is none
        self.note: Any = self._segment.map if self._segment else None
        self.own = PeerInfo(os.getpid(), self.pipe.write_fd, ticket, _lowest_rank_here(comm, rank))

    def reach(self) -> set[int]:
        """Those that can be reached of the lowest rank of this machine or, if this rank is that one, of all others.

        Reached is a rank whose memory can be attached and whose pipe can be opened from here.
        """
        lowest = self.own.lowest
        members = [k for k, info in enumerate(self.infos) if info.lowest == lowest]
        return {k for k in (members if self._rank == lowest else [lowest]) if k == self._rank or self._open(k)}

    def machines(self, reached: list[set[int]]) -> list[int]:
        """What all ranks have reached -> for each rank its leader: the lowest rank of its machine, or the rank itself.

        The two must reach each other. A rank that they do not counts as a machine of its own, and uses MPI.
        """
        lowest = [info.lowest for info in self.infos]
        return [low if low in reached[k] and k in reached[low] else k for k, low in enumerate(lowest)]

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
        """Wakes rank `k`, if it can be woken from here; else it polls."""
        if k in self.wake_fds:
            WakePipe.wake(self.wake_fds[k])

    def close(self) -> None:
        """Gives memory and file descriptors back."""
        self.keep([])
        self.pipe.close()
        if self._segment is not None:
            self._segment.close()


def _lowest_rank_here(comm: Any, own_rank: int) -> int:
    """Collective: the lowest rank of `comm` on this rank's machine.

    MPI_UTIL_MACHINES=k pretends that the ranks are spread over k machines in equal blocks, to test or to measure what
    ranks on several machines do.
    """
    from mpi4py import MPI

    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    pretended = int(os.environ.get("MPI_UTIL_MACHINES", "0"))
    if pretended:
        whole, here = here, here.Split(own_rank * pretended // comm.Get_size())
        whole.Free()
    lowest: int = here.bcast(own_rank)
    here.Free()
    return lowest
