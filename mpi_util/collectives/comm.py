"""The channel of each communicator."""

import time

from ..host import threads
from ..launch import failure
from ..launch.identity import Comm, check_no_parent, world
from .channel import Channel, open_channels

_keyval: int | None = None  # under which a communicator of the user's keeps its channel until it is freed
_kept: dict[str, Channel] = {}  # the channels that live as long as the process


def channel_of(comm: Comm = None) -> Channel:
    """Collective at its first call for a communicator: its channel.

    Args:
        comm: an mpi4py communicator; None: the world, or this process alone where there is no MPI.
    """
    check_no_parent()
    comm = comm if comm is not None else world()
    if comm is None:
        if "alone" not in _kept:
            _kept["alone"] = Channel()
        return _kept["alone"]
    from mpi4py import MPI

    failure.on_leave(_leave_all)
    if comm == MPI.COMM_WORLD:
        if "world" not in _kept:
            world_channel = _kept["world"] = Channel(comm)
            threads.start(world_channel.rank == 0, world_channel.pids_here())
        return _kept["world"]
    global _keyval
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, channel: channel.close())
    channel = comm.Get_attr(_keyval)
    if not isinstance(channel, Channel):
        channel = Channel(comm)
        comm.Set_attr(_keyval, channel)
    return channel


def _leave_all(status: int, seconds: float | None) -> bool:
    """This process ends: says so on every channel, and waits for the world."""
    for channel in open_channels:
        channel.say_leave(status)
    world = _kept.get("world")
    end = None if seconds is None else time.perf_counter() + seconds
    return world is not None and world.await_leaves(end)
