"""The channel of each communicator."""

import time

from ..host import threads
from ..host.process import process
from ..launch import failure
from ..launch.identity import Comm, check_no_parent, world
from . import leaving
from .channel import Channel, OpenChannels


class _Channels:
    """The channels of this process that live as long as it does, and where others are kept.

    Attributes:
        keyval: the attribute under which a communicator of the user's keeps its channel until it is freed.
    """

    alone: Channel | None = None
    world: Channel | None = None
    keyval: int | None = None


def channel_of(comm: Comm = None) -> Channel:
    """Collective at its first call for a communicator: its channel.

    Args:
        comm: an mpi4py communicator; None: the world, or this process alone where there is no MPI.
    """
    check_no_parent()
    comm = comm if comm is not None else world()
    kept = process.of(_Channels)
    if comm is None:
        kept.alone = kept.alone or Channel()
        return kept.alone
    from mpi4py import MPI

    failure.on_leave(_leave_all)
    if comm == MPI.COMM_WORLD:
        if kept.world is None:
            kept.world = Channel(comm)
            threads.start(kept.world.rank == 0, kept.world.pids_here())
        return kept.world
    if kept.keyval is None:
        kept.keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, channel: channel.close())
    channel = comm.Get_attr(kept.keyval)
    if not isinstance(channel, Channel):
        channel = Channel(comm)
        comm.Set_attr(kept.keyval, channel)
    return channel


def _leave_all(status: int, seconds: float | None) -> bool:
    """This process ends: says so on every channel, and waits for the world."""
    for channel in process.of(OpenChannels):
        leaving.announce(channel.messages, status)
    world = process.of(_Channels).world
    end = None if seconds is None else time.perf_counter() + seconds
    return world is not None and leaving.wait_for_others(world.messages, end)
