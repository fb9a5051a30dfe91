"""Which ranks run on one machine: those that can open each other's memory, and so can share it and ring each other."""

import os
import secrets
from typing import Any, NamedTuple

from .segments import Segment
from .waiting import Doorbell

_TOKEN_PAGE = 4096  # bytes


class Card(NamedTuple):
    """What a rank tells the others about itself."""

    pid: int
    bell_fd: int
    token_fd: int
    token: bytes  # proves that /proc/<pid> is that rank, and not a namesake on another machine


class Presence:
    """What this rank lets others of its machine see.

    Attributes:
        bell: by which they wake it.
        card: by which they find it.
    """

    def __init__(self) -> None:
        self.bell = Doorbell()
        self._token: Segment | None = None
        token = secrets.token_bytes(16)
        try:
            self._token = Segment(_TOKEN_PAGE)
        except OSError:
            self.card = Card(os.getpid(), -1, -1, token)
            return
        self._token.map[: len(token)] = token
        self.card = Card(os.getpid(), self.bell.write_fd, self._token.ticket.fd, token)

    def reach(self, card: Card) -> int | None:
        """The descriptor of that rank's bell; None if it is on another machine, or memory cannot be shared with it."""
        if self._token is None:
            return None
        try:
            with open(f"/proc/{card.pid}/fd/{card.token_fd}", "rb") as file:
                if file.read(len(card.token)) != card.token:
                    return None
            return Doorbell.open(card.pid, card.bell_fd)
        except OSError:
            return None

    def close(self) -> None:
        """Gives memory and descriptors back."""
        self.bell.close()
        if self._token is not None:
            self._token.close()


def lowest_rank_here(comm: Any, own_rank: int) -> int:
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
