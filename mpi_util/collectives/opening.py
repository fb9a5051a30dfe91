"""Opens the channel of a communicator at its first collective call, and closes all at the end, in each rank's process.

Where ranks lie on several machines, or cannot share memory, `cluster` is loaded here, and nowhere else in collectives/.
"""

import importlib
import os
import time
from typing import Any

from ..errors import LaunchError, MpiUtilError, UsageError
from ..host.cores import take_cores, update_threads
from ..ranks import failure, threads
from ..ranks.identity import Comm, check_launcher, check_no_parent, world
from ..ranks.state import state
from ..ranks.watchdog import Watchdog
from .agreement import Before
from .channel import Channel, Kept
from .peers import Peers, all_of


def open_channel(comm: Comm) -> Channel:
    """Collective at its first call for a communicator: `channel_of`, whichever it is, and whatever may be wrong."""
    try:
        return _find_or_open(comm)
    except MpiUtilError:
        failure.install()  # so that it is reported in one line
        raise


def _find_or_open(comm: Comm) -> Channel:
    check_no_parent()
    comm = comm if comm is not None else world()
    kept = state(Kept)
    if comm is None:
        kept.alone = kept.alone or Channel()
        return kept.alone
    from mpi4py import MPI

    state(failure.FailureState).leave = _leave_all
    if comm == MPI.COMM_WORLD:
        if kept.world is None:
            check_launcher(MPI.Get_library_version(), comm.Get_size())
            kept.world = _open(comm)
            _prepare_rank(kept.world)
        return kept.world
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise UsageError(f"comm must be a communicator of one group that this rank is in (MPI.Intracomm); got {comm!r}")
    if kept.keyval is None:
        kept.keyval = MPI.Comm.Create_keyval(delete_fn=_close)
    channel = comm.Get_attr(kept.keyval)
    if not isinstance(channel, Channel):
        channel = _open(comm)
        comm.Set_attr(kept.keyval, channel)
    return channel


def _open(comm: Any) -> Channel:
    """Collective: a new channel, for one machine or for several."""
    if comm.Get_size() == 1:
        return Channel(comm)
    failure.install()
    failure.register_mpi()
    peers = Peers(comm, rank := comm.Get_rank())
    if peers.apart and rank == 0:
        slower = "cannot share memory with others of their machine; they use MPI, slower"
        failure.print_line(f"mpi_util: ranks {peers.apart} {slower}")
    kind = _cluster_channel(rank, peers) if any(peers.machine) else Channel
    state(Kept).open.append(channel := kind(comm, peers))
    return channel


def _cluster_channel(rank: int, peers: Peers) -> type[Channel]:
    """The class of channels for several machines. LaunchError on every rank: the folder was not copied."""
    try:
        module = importlib.import_module("..cluster.channel", __package__)
    except ModuleNotFoundError as missing:
        if ".cluster" not in (missing.name or ""):
            raise
        where = "share no memory" if peers.apart else "are on several machines"
        error = LaunchError(f"the ranks {where}, and the folder mpi_util/cluster, which serves them then, is missing")
        error.silent = rank > 0
        raise error from None
    return module.ClusterChannel  # type: ignore[no-any-return]


def _close(comm: Any, keyval: int, channel: Channel) -> None:
    """Collective: the user's communicator is freed."""
    channel.close()
    kept = state(Kept)
    kept.open = [each for each in kept.open if each is not channel]


def _prepare_rank(world: Channel) -> None:
    """Collective, once in a job: the watchdog reads the notes of all ranks here, and rank 0 may use all their cores."""
    infos = world.peers.infos if world.size > 1 else {}
    notes = [(infos[k].pid, infos[k].ticket) if k in infos else (0, None) for k in range(world.size)]
    state(Watchdog).join(world.rank, world.peers.note if infos else None, notes)
    if world.rank == 0 and "MPI_UTIL_BOUND" not in os.environ:
        take_cores([infos[k].pid for k in infos if k != 0 and world.machine[k] == 0])
    threads.start(world.rank == 0, all_of(world.comm, [update_threads()])[0][0] if infos else 0)


def _leave_all(status: int, reason: str, seconds: float | None) -> bool:
    """This process ends: announces it on every channel, and waits for the others there."""
    state(Watchdog).at_end()
    kept = state(Kept)
    if not status:
        state(Before).run()
    for channel in kept.open:
        channel.messages.announce_end(status, reason)
    end = None if seconds is None else time.perf_counter() + seconds
    together = kept.world is not None and all(each.messages.wait_for_ends(end) for each in kept.open)
    state(Watchdog).at_end()
    return together
