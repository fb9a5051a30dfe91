"""The scheme between the ranks of an MPI job, on one machine or several."""

import atexit
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..collectives.channel import Channel
from ..collectives.comm import channel_of
from ..errors import SyncTimeoutError, UsageError
from ..host.sections import Section
from ..host.waiting import wait_until
from ..launch.identity import Comm
from .hub import Event, Fill, Hub
from .layout import Layout
from .port import Address, Port
from .relay import CARD, DOWN, LEFT, PING, UP, Parcel, Relay, keep_until_sent, pass_on
from .scheme import WeightSyncScheme

_NAP_S = 1e-3
_PING_S = 1.0
_PATIENCE_S = 1.0  # with a rank that does not take what is sent to it
_SILENT_S = 10.0  # a rank whose interpreter is held that long by one call counts as dead


class MPIWeightSyncScheme(WeightSyncScheme):
    """Collective: weights from one rank to the others. All ranks of `comm` make it, in the same order.

    Worker k is the k-th rank that is not the sender: with `sender=0`, worker k is rank k + 1. Only making it is
    collective; from then on each rank goes at its own pace. Ranks of one machine share memory; between machines an
    update goes along a tree, once to each machine. That needs an MPI with threads (MPI_THREAD_MULTIPLE, the default of
    mpi4py), and the lowest rank of each machine to go on until the sender shuts down. A receiver on another machine
    that comes after something was sent to it gets that at the sender's next call.

    Args:
        comm: communicator; None: all ranks.
        sender: rank of the sender in it.
        others: see `WeightSyncScheme`. Under common launchers a rank that is killed ends the job, whatever `on_dead`.
    """

    def __init__(self, *args: Any, comm: Comm = None, sender: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._channel = channel_of(comm)
        if not 0 <= sender < self._channel.size:
            raise UsageError(f"sender={sender}; there are {self._channel.size} ranks")
        self._root = sender
        self._relay: Relay | None = None
        self._address: Address | None = None
        self._comm = _duplicate(self._channel)
        if self._channel.rank != sender:
            atexit.register(_say_left, os.getpid(), self._comm, sender)

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
        return Ranks(self._channel, self._comm, self._root, who)

    def _make_port(self, worker: int, who: str) -> Port:
        self._address = self._address or self._find_sender(who)  # the sender says it once
        return Port(self._address, worker, who)

    def _find_sender(self, who: str) -> Address:
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
        return address

    def _card(self, source: int, who: str) -> tuple[Address, str]:
        """Where the hub is; sleeps until `source` has said it."""
        end = None if self.timeout is None else time.perf_counter() + self.timeout
        message = wait_until(
            lambda: self._comm.improbe(source, CARD) or (end is not None and time.perf_counter() > end)
        )
        if isinstance(message, bool):
            raise SyncTimeoutError(f"rank {source} has not begun to send {who} within {self.timeout:g} s")
        card: tuple[Address, str] = message.recv()
        return card


class Ranks:
    """The transport of a sender to the other ranks: its own machine's hub, and the relays of the other machines."""

    def __init__(self, channel: Channel, comm: Any, root: int, who: str):
        self._comm, self._root = comm, root
        machine = channel.machine
        ranks = [k for k in range(channel.size) if k != root]
        self._home = {_worker_of(k, root) for k in ranks if machine[k] == machine[root]}
        self._leader = {_worker_of(k, root): machine[k] for k in ranks if machine[k] != machine[root]}
        self._remote = sorted(set(self._leader.values()))
        self._layouts: dict[int, Layout] = {}
        self._up: set[int] = set()  # relays that have begun
        self._owed: dict[int, tuple[Section, Layout]] = {}  # by worker: the newest, until its relay has begun
        self._pinged = 0.0
        self._heard: dict[int, float] = {}
        self._silent: set[int] = set()
        self._last: tuple[Section | None, Any, int, list[int]] = None, None, 0, []  # that went to other machines
        self._pending: list[Any] = []
        self._ended: set[int] = set()
        self.hub = Hub(sorted(self._home), who)
        for k in ranks:
            if machine[k] == machine[root]:
                self._tell(k, (self.hub.address, who), CARD)
        for k in self._remote:
            self._tell(k, (None, who), CARD)

    def _tell(self, rank: int, message: Any, tag: int = DOWN) -> None:
        self._pending = [request for request in self._pending if not request.Test()]
        self._pending.append(self._comm.isend(message, rank, tag))

    def publish(self, workers: list[int], version: int, layout: Layout, fill: Fill) -> None:
        """Writes once into this machine's memory, and sends that along a tree to the machines of the other workers."""
        self.hub.open()
        section = self.hub.publish([k for k in workers if k in self._home], version, layout, fill)
        ready = []
        for worker in [k for k in workers if k not in self._home]:
            if self._leader[worker] in self._up:
                ready.append(worker)
            else:
                self._owed[worker] = section, layout
                section.users.append(partial(self._owes, worker, section))
        if ready:
            self._last = section, layout, version, ready
            under_way = self._pass_on(section, layout, ready)
            end = time.perf_counter() + _PATIENCE_S
            wait_until(lambda: not any(needs() for needs in under_way) or time.perf_counter() > end)

    def _owes(self, worker: int, section: Section) -> bool:
        return self._owed.get(worker, (None,))[0] is section

    def _pass_on(self, section: Section, layout: Layout, workers: list[int]) -> list[Callable[[], bool]]:
        path = [self._root, *sorted({self._leader[k] for k in workers})]
        new = {k: layout for k in workers if self._layouts.get(k) is not layout}
        self._layouts |= new
        block = section.block(layout.nbytes)
        parcel = Parcel(section.version, section.checksum, layout.nbytes, workers, path, new)
        under_way = pass_on(self._comm, parcel, block)
        section.users += under_way
        return under_way

    def _pay(self, leader: int) -> None:
        """A relay has begun: it gets what was sent to its workers before."""
        for worker in [k for k in self._owed if self._leader[k] == leader]:
            self._pass_on(*self._owed.pop(worker), [worker])

    def poll(self, timeout: float, of: int | None = None) -> list[Event]:
        """What workers have told."""
        if not self._remote:
            events = self.hub.poll(timeout, of)
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
            relay, event = status.source, Event(*message.recv())
            self._heard[relay] = time.perf_counter()
            if relay in self._silent:
                self._silent.remove(relay)
                events += [Event("back", worker) for worker in self._workers_of(relay)]
            if event.kind == "up":
                self._up.add(relay)
                self._pay(relay)
            elif event.kind != "pong":
                events.append(event)
        for relay in [k for k, heard in self._heard.items() if self._pinged - heard > _SILENT_S]:
            del self._heard[relay]
            self._silent.add(relay)
            why = f"rank {relay}, which passes on the weights to its machine, has been silent for {_SILENT_S:g} s"
            events += [Event("left", worker, 0, why) for worker in self._workers_of(relay)]
            self._go_round_silent()
        return events

    def _go_round_silent(self) -> None:
        """Those to whom a silent relay should have passed on the last version get it on another path, perhaps again."""
        section, layout, version, workers = self._last
        rest = [worker for worker in workers if self._leader[worker] not in self._silent]
        if rest and section is not None and section.version == version:
            self._pass_on(section, layout, rest)

    def _workers_of(self, relay: int) -> list[int]:
        return [worker for worker, leader in self._leader.items() if leader == relay]

    def _ping(self) -> None:
        """While it waits, the sender asks the relays once a second whether they live."""
        now = time.perf_counter()
        if now - self._pinged > _PING_S:
            if now - self._pinged > 2 * _PING_S:  # a new wait begins
                self._heard = dict.fromkeys(self._heard, now)
            self._pinged = now
            for rank in self._remote:
                self._tell(rank, None, PING)

    def missing(self, workers: list[int]) -> dict[int, str]:
        """Those whose rank has ended its program."""
        if not workers:
            return {}
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm is not None and (message := self._comm.improbe(MPI.ANY_SOURCE, LEFT, status)):
            message.recv()
            self._ended.add(status.source)
        ranks = {worker: worker + (worker >= self._root) for worker in workers}
        return {worker: f"rank {rank} has ended" for worker, rank in ranks.items() if rank in self._ended}

    def close(self) -> None:
        """Lets the workers go."""
        if not self.hub.closed:
            for rank in self._remote:
                self._tell(rank, ("stop",))
            end = time.perf_counter() + _PATIENCE_S
            wait_until(lambda: keep_until_sent([]) or time.perf_counter() > end)
        self.hub.close()


def _say_left(pid: int, comm: Any, sender: int) -> None:
    """At the end of the program: should the sender still wait for this rank, it need not."""
    if os.getpid() == pid:  # a process that was forked from a rank is none
        _farewells.append(comm.isend(None, sender, LEFT))


_farewells: list[Any] = []  # small, and on their way; nobody waits for them


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
