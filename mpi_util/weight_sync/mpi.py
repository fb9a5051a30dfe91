"""The scheme between the ranks of an MPI job, on one machine or several."""

import time
from collections.abc import Callable
from typing import Any

from ..channel import Channel
from ..comm import channel_of
from ..errors import SyncTimeoutError, UsageError
from ..waiting import wait_until
from .hub import Event, Hub
from .layout import Layout
from .port import Port
from .relay import CARD, DOWN, UP, Parcel, Relay, pass_on
from .scheme import WeightSyncScheme

_NAP_S = 1e-3
_PING_S = 1.0
_SILENT_S = 10.0  # a rank whose interpreter is held that long by one call counts as dead


class MPIWeightSyncScheme(WeightSyncScheme):
    """Collective: weights from one rank to the others. All ranks of `comm` make it, in the same order.

    Worker k is the k-th rank that is not the sender: with `sender=0`, worker k is rank k + 1. Only making it is
    collective; from then on each rank goes at its own pace. Ranks of one machine share memory; between machines an
    update goes along a tree, once to each machine. That needs an MPI with threads (MPI_THREAD_MULTIPLE, the default of
    mpi4py), and the lowest rank of each machine to go on until the sender shuts down.

    Args:
        comm: communicator; None: all ranks.
        sender: rank of the sender in it.
        others: see `WeightSyncScheme`. Under common launchers a rank that is killed ends the job, whatever `on_dead`.
    """

    def __init__(self, *args: Any, comm: Any = None, sender: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._channel = channel_of(comm)
        if not 0 <= sender < self._channel.size:
            raise UsageError(f"sender={sender}; there are {self._channel.size} ranks")
        self._root, self._relay = sender, None
        self._comm = _duplicate(self._channel)

    def __reduce__(self) -> Any:
        raise UsageError("an MPIWeightSyncScheme cannot be sent to another process; each rank makes its own")

    def _start_role(self, call: str) -> None:
        super()._start_role(call)
        is_sender = self._channel.rank == self._root
        if is_sender != (call == "init_on_sender"):
            raise UsageError(f"{call} on rank {self._channel.rank}: rank {self._root} is the sender (sender=)")

    def _default_workers(self) -> int:
        return self._channel.size - 1

    def _default_worker(self) -> int:
        return _worker_of(self._channel.rank, self._root)

    def _check_receiver(self, worker: int) -> None:
        if worker != self._default_worker():
            raise UsageError(f"worker_idx={worker}: rank {self._channel.rank} is worker {self._default_worker()}")

    def _open_transport(self, workers: list[int], who: str) -> "Ranks":
        if len(workers) != self._channel.size - 1:
            text = f"{len(workers)} workers, and {self._channel.size - 1} ranks beside the sender"
            raise UsageError(f"init_on_sender: {text}; each rank is one worker")
        return Ranks(self._channel, self._comm, self._root, who, self.timeout)

    def _make_port(self, worker: int, who: str) -> Port:
        channel, machine = self._channel, self._channel.machine
        here = machine[channel.rank]
        home = here == machine[self._root]
        address, senders_who = self._card(self._root if home or channel.rank == here else here, who)
        if not home and channel.rank == here:
            members = [k for k in range(channel.size) if machine[k] == here]
            workers = [_worker_of(k, self._root) for k in members]
            self._relay = Relay(self._comm, self._root, workers, senders_who)
            address = self._relay.hub.address
            for k in members:
                if k != here:
                    wait_until(self._comm.isend((address, senders_who), k, CARD).Test)
        return Port(address, worker, who)

    def _card(self, source: int, who: str) -> tuple:
        """Where the hub is; sleeps until `source` has said it."""
        end = None if self.timeout is None else time.perf_counter() + self.timeout
        message = wait_until(
            lambda: self._comm.improbe(source, CARD) or (end is not None and time.perf_counter() > end)
        )
        if message is True:
            raise SyncTimeoutError(f"rank {source} has not begun to send {who} within {self.timeout:g} s")
        return message.recv()


class Ranks:
    """The transport of a sender to the other ranks: its own machine's hub, and the relays of the other machines."""

    def __init__(self, channel: Channel, comm: Any, root: int, who: str, timeout: float | None):
        self._channel, self._comm, self._root, self._who, self._timeout = channel, comm, root, who, timeout
        machine = channel.machine
        ranks = [k for k in range(channel.size) if k != root]
        self._home = {_worker_of(k, root) for k in ranks if machine[k] == machine[root]}
        self._leader = {_worker_of(k, root): machine[k] for k in ranks if machine[k] != machine[root]}
        self._remote = sorted(set(self._leader.values()))
        self._layouts: dict[int, Layout] = {}
        self._up: set[int] = set()  # relays that have begun
        self._early: list[Event] = []
        self._pinged = 0.0
        self._heard: dict[int, float] = {}
        self._pending: list[Any] = []
        self.hub = Hub(sorted(self._home), who)
        for k in ranks:
            if machine[k] == machine[root]:
                self._tell(k, (self.hub.address, who), CARD)
        for k in self._remote:
            self._tell(k, (None, who), CARD)

    def _tell(self, rank: int, message: tuple, tag: int = DOWN) -> None:
        self._pending = [request for request in self._pending if not request.Test()]
        self._pending.append(self._comm.isend(message, rank, tag))

    def publish(self, workers: list[int], version: int, layout: Layout, fill: Callable) -> None:
        """Writes once into this machine's memory, and sends that along a tree to the machines of the other workers."""
        self.hub.open()
        total = 0

        def noted(block: Any) -> int:
            nonlocal total
            total = fill(block)
            return total

        block = self.hub.publish([k for k in workers if k in self._home], version, layout, noted)
        away = [k for k in workers if k not in self._home]
        if away:
            path = [self._root, *sorted({self._leader[k] for k in away})]
            new = {k: layout for k in away if self._layouts.get(k) is not layout}
            self._layouts |= new
            self._await_relays(path[1:])
            pass_on(self._comm, Parcel(version, total, len(block), away, path, new), block)

    def _await_relays(self, ranks: list[int]) -> None:
        """The bytes of a large update leave only when the other side takes them."""
        end = None if self._timeout is None else time.perf_counter() + self._timeout

        def up() -> bool:
            self._early += self._from_relays()
            return self._up.issuperset(ranks) or (end is not None and time.perf_counter() > end)

        wait_until(up)
        if late := [k for k in ranks if k not in self._up]:
            raise SyncTimeoutError(f"{self._who}: rank {late[0]} has not connected within {self._timeout:g} s")

    def poll(self, timeout: float) -> list[Event]:
        """What workers have told."""
        if self._early:
            early, self._early = self._early, []
            return early
        if not self._remote:
            events = self.hub.poll(timeout)
        else:
            events, end = self.hub.poll(0), time.perf_counter() + timeout
            while not (events := events + self._from_relays()) and (left := end - time.perf_counter()) > 0:
                self._ping()
                events = self.hub.poll(min(_NAP_S, left))
        if timeout and not events:
            self.hub.check_alive()
        return events

    def _from_relays(self) -> list[Event]:
        from mpi4py import MPI

        events, status = [], MPI.Status()
        while message := self._comm.improbe(MPI.ANY_SOURCE, UP, status):
            self._heard[status.source] = time.perf_counter()
            event = Event(*message.recv())
            if event.kind == "up":
                self._up.add(status.source)
            elif event.kind != "pong":
                events.append(event)
        for rank in [k for k, heard in self._heard.items() if self._pinged - heard > _SILENT_S]:
            del self._heard[rank]
            why = f"rank {rank}, which passes on the weights to its machine, has been silent for {_SILENT_S:g} s"
            events += [Event("left", worker, 0, why) for worker, leader in self._leader.items() if leader == rank]
        return events

    def _ping(self) -> None:
        """While it waits, the sender asks the relays once a second whether they live."""
        now = time.perf_counter()
        if now - self._pinged > _PING_S:
            if now - self._pinged > 2 * _PING_S:  # a new wait begins
                self._heard = dict.fromkeys(self._heard, now)
            self._pinged = now
            for rank in self._remote:
                self._tell(rank, ("ping",))

    def missing(self, workers: list[int]) -> dict[int, str]:
        """Those whose rank has ended its program."""
        if not workers:
            return {}
        ended = self._channel.ended()
        ranks = {worker: worker + (worker >= self._root) for worker in workers}
        return {
            worker: f"rank {rank} has ended with status {ended[rank]}"
            for worker, rank in ranks.items()
            if rank in ended
        }

    def close(self) -> None:
        """Lets the workers go."""
        if not self.hub.closed:
            for rank in self._remote:
                self._tell(rank, ("stop",))
        self.hub.close()


def _worker_of(rank: int, root: int) -> int:
    return rank - (rank > root)


def _duplicate(channel: Channel) -> Any:
    """Collective: a communicator of the scheme's own; None for a single process."""
    if channel.comm is None:
        return None
    from mpi4py import MPI

    if len(set(channel.machine)) > 1 and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UsageError("ranks on several machines need an MPI with threads: MPI_THREAD_MULTIPLE")
    duplicate, request = channel.comm.Idup()
    wait_until(request.Test)
    return duplicate
