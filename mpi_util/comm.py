"""Who the ranks are, and the channel of each communicator."""

import os
import sys
import time
from typing import TYPE_CHECKING, TypeAlias

from . import failure, threads
from .channel import Channel, open_channels
from .launch import check_no_parent, env_rank, env_size, in_child_of_rank, under_launcher

if TYPE_CHECKING:
    from mpi4py import MPI

# What launchers tell each rank of the number of ranks on its machine: hydra (MPICH, Intel MPI), Open MPI.
_LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")

Comm: TypeAlias = "MPI.Comm | None"  # what comm= takes; None: the world


def world() -> Comm:
    """MPI.COMM_WORLD if this process is a rank of an MPI job or has started MPI itself; None in a single process."""
    started = sys.modules.get("mpi4py.MPI")
    if (under_launcher() and not in_child_of_rank()) or (started is not None and started.Is_initialized()):
        from mpi4py import MPI

        return MPI.COMM_WORLD
    return None


def rank() -> int:
    """This process's rank in the world; 0 in a single process. Does not start MPI."""
    return env_rank() if under_launcher() else (comm.Get_rank() if (comm := world()) else 0)


def nworkers() -> int:
    """Number of ranks in the world; 1 in a single process. Does not start MPI."""
    return env_size() if under_launcher() else (comm.Get_size() if (comm := world()) else 1)


def local_size() -> int:
    """Number of ranks on this machine, as the launcher tells it; else all count. Does not start MPI."""
    return next((int(os.environ[name]) for name in _LOCAL_SIZE_VARIABLES if name in os.environ), nworkers())


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
