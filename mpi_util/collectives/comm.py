"""The channel of each communicator."""

import time

from ..errors import LaunchError
from ..host import threads
from ..host.process import process
from ..launch import failure
from ..launch.identity import Comm, check_launcher, check_no_parent, world
from ..launch.watchdog import Watchdog
from .channel import Channel, OpenChannels


class _Channels:
    """The channels of this process that live as long as it does, and where others are kept."""

    alone: Channel | None = None
    world: Channel | None = None
    keyval: int | None = None  # the attribute under which a user's communicator keeps its channel until it is freed


def channel_of(comm: Comm = None) -> Channel:
    """Collective at its first call for a communicator: its channel. None: the world, or without MPI this process."""
    try:
        return _channel_of(comm)
    except LaunchError:
        failure.install()  # so that it is reported in one line
        raise


def _channel_of(comm: Comm) -> Channel:
    check_no_parent()
    comm = comm if comm is not None else world()
    kept = process.of(_Channels)
    if comm is None:
        kept.alone = kept.alone or Channel()
        return kept.alone
    from mpi4py import MPI

    process.of(failure.Rank).leave = _leave_all
    if comm == MPI.COMM_WORLD:
        if (whole := kept.world) is None:
            check_launcher(MPI.Get_library_version(), comm.Get_size())
            whole = kept.world = Channel(comm)
            infos = []
            if whole.size > 1:
                infos = whole.peers.infos
                process.of(Watchdog).join(whole.rank, whole.peers.note, [(info.pid, info.ticket) for info in infos])
            others = [infos[k].pid for k in whole.here() if k != whole.rank]
            threads.start(whole.rank == 0, others)
        return whole
    if kept.keyval is None:
        kept.keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, channel: channel.close())
    channel = comm.Get_attr(kept.keyval)
    if not isinstance(channel, Channel):
        channel = Channel(comm)
        comm.Set_attr(kept.keyval, channel)
    return channel


def _leave_all(status: int, reason: str, seconds: float | None) -> bool:
    """This process ends: announces it on every channel, and waits for the others there."""
    process.of(Watchdog).at_end()
    channels = process.of(OpenChannels)
    for channel in channels:
        channel.messages.announce_end(status, reason)
    end = None if seconds is None else time.perf_counter() + seconds
    together = process.of(_Channels).world is not None and all(each.messages.wait_for_ends(end) for each in channels)
    process.of(Watchdog).at_end()
    return together
