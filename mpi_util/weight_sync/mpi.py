"""The scheme between the ranks of an MPI job, on one machine or several."""

import atexit
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..collectives.channel import Channel, channel_of
from ..collectives.transport import parts
from ..errors import SyncTimeoutError, UsageError
from ..host.sections import Section
from ..host.waiting import wait_until
from ..launch.identity import Comm
from .connection import Address, Deadline
from .publisher import Publisher
from .relay import ADDRESS, BULK, DOWN, LEFT, PING, TAGS, UP, Forwarding, Header, Relay, in_flight, keep
from .scheme import WeightSyncScheme
from .subscriber import Subscriber
from .worker import Event, RelayRecord, Report, State, Worker

_NAP_S = 1e-3
_PING_S = 1.0
_PATIENCE_S = 1.0  # with a rank that does not receive what is sent to it
_SILENT_S = 10.0  # a relay that does not respond for so long counts as dead


class MPIWeightSyncScheme(WeightSyncScheme):
    """Collective: weights from one rank to the others. All ranks of `comm` make it, in the same order.

    Worker k is the k-th rank that is not the sender: with `sender=0`, worker k is rank k + 1. Only making it is
    collective; from then on each rank runs at its own pace. Ranks of one machine share memory; between machines an
    update is sent along a tree, once to each machine. That needs an MPI with threads (MPI_THREAD_MULTIPLE, the default
    of mpi4py), and the lowest rank of each machine, its relay, to run until the sender shuts down. A relay whose
    interpreter is held for 10 s by one call counts as dead, and updates are routed around it. A receiver on another
    machine that connects after something was sent to it gets that at the sender's next call.

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
        self._root, self._ranks = sender, self._channel.size - 1
        self._address: Address | None = None
        self._comm: Any = _duplicate(self._channel) if self._channel.comm else None  # None: a single process
        if self._channel.rank != sender:
            atexit.register(_say_left, os.getpid(), self._comm, sender)

    def __reduce__(self) -> Any:
        raise UsageError("an MPIWeightSyncScheme cannot be sent to another process; each rank makes its own")

    def _start_role(self, call: str) -> None:
        super()._start_role(call)
        if (self._channel.rank == self._root) != (call == "init_on_sender"):
            raise UsageError(f"{call} on rank {self._channel.rank}: rank {self._root} is the sender (sender=)")

    def _worker_index(self, given: int | None) -> int:
        worker = _ranks_of_workers(self._channel, self._root).index(self._channel.rank)
        if given not in (None, worker):
            raise UsageError(f"worker_idx={given}: rank {self._channel.rank} is worker {worker}")
        return worker

    def _open_publisher(self, workers: dict[int, Worker], name: str) -> "Ranks":
        if (n := len(workers)) != self._ranks:
            raise UsageError(f"init_on_sender: {n} workers, and {self._ranks} ranks beside the sender: one worker each")
        return Ranks(self._channel, self._comm, self._root, workers, name)

    def _subscribe(self, worker: int, name: str) -> Subscriber:
        self._address = self._address or self._find_publisher(name)  # the sender sends it once
        return Subscriber(self._address, worker, name)

    def _find_publisher(self, name: str) -> Address:
        rank, machine = self._channel.rank, self._channel.machine
        here = machine[rank]
        address, name = self._receive_address(here if here not in (rank, machine[self._root]) else self._root, name)
        if here == rank and here != machine[self._root]:
            members = {i: k for i, k in enumerate(_ranks_of_workers(self._channel, self._root)) if machine[k] == here}
            address = Relay(self._comm, self._root, [*members], name).publisher.address
            for k in set(members.values()) - {here}:
                keep(self._comm.isend((address, name), k, ADDRESS))
        return address

    def _receive_address(self, source: int, name: str) -> tuple[Address, str]:
        """The publisher's address and the model's name at the sender; sleeps until `source` has sent them."""
        deadline = Deadline(self.timeout)
        message = wait_until(lambda: self._comm.improbe(source, ADDRESS) or not deadline.left)
        if isinstance(message, bool):
            raise SyncTimeoutError(f"rank {source} has not begun to send {name} within {self.timeout:g} s")
        found: tuple[Address, str] = message.recv()
        return found


class Ranks(Publisher):
    """A publisher whose workers are ranks: it sends to those of other machines through the relays of these."""

    def __init__(self, channel: Channel, comm: Any, root: int, workers: dict[int, Worker], name: str):
        super().__init__(workers, name)
        self._comm, self._root = comm, root
        self._relays: dict[int, RelayRecord] = {}
        self._pinged = 0.0
        self._forwarded = 0  # updates
        self._last: tuple[Section, int, list[Worker]] | None = None  # update that was forwarded: where, version, to
        self._ended: set[int] = set()  # ranks
        self._ranks = _ranks_of_workers(channel, root)
        for worker in workers.values():
            leader = channel.machine[rank := self._ranks[worker.index]]
            if leader == channel.machine[root]:
                keep(comm.isend((self.address, name), rank, ADDRESS))
            else:
                worker.relay = self._relays.setdefault(leader, RelayRecord(leader))
                worker.relay.workers.append(worker)
        for rank in self._relays:
            keep(comm.isend((None, name), rank, ADDRESS))

    def publish(
        self, workers: list[Worker], version: int, nbytes: int, layout: bytes, fill: Callable[[np.ndarray], None]
    ) -> Section:
        """Writes once into this machine's memory, and sends that along a tree to the machines of the other workers."""
        near = [worker for worker in workers if worker.relay is None]
        section = super().publish(near, version, nbytes, layout, fill)
        distant = [worker for worker in workers if worker.relay is not None]
        for worker in distant:
            worker.sent, worker.latest = version, section  # until its relay has it
        if forward := [worker for worker in distant if worker.relay and worker.relay.state is not State.ABSENT]:
            self._last = section, version, forward
            forwarding, deadline = self._forward(section, forward), Deadline(_PATIENCE_S)
            wait_until(lambda: not forwarding.busy() or not deadline.left)
        return section

    def _forward(self, section: Section, workers: list[Worker]) -> Forwarding:
        path = [self._root, *sorted({worker.relay.rank for worker in workers if worker.relay})]
        indices, layout = [worker.index for worker in workers], section.description
        self._forwarded += 1
        header = Header(BULK + self._forwarded % TAGS, section.version, section.nbytes, layout, indices, path)
        forwarding = Forwarding(self._comm, header)
        for part in parts(section.block(section.nbytes)):
            forwarding.send(part)
        section.users.append(forwarding.busy)
        for worker in workers:
            worker.latest = None
        return forwarding

    def poll(self, timeout: float, of: Worker | None = None) -> list[Report]:
        if not self._relays:
            return super().poll(timeout, of)
        deadline = Deadline(timeout)
        self._receive_reports()
        while not (reports := super().poll(min(_NAP_S, deadline.left))) and deadline.left:
            self._ping()
            self._receive_reports()
        return reports

    def _receive_reports(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        while message := self._comm.improbe(MPI.ANY_SOURCE, UP, status):
            self._hear(self._relays[status.source])
            if (report := message.recv()) is not None:
                event, index, *content = report
                self._report(self.workers[index], event, *content)
        for relay in self._relays.values():
            if relay.state is State.READY and self._pinged - relay.heard > _SILENT_S:
                self._give_up(relay)

    def _hear(self, relay: RelayRecord) -> None:
        """A relay has sent something. One that was absent gets what was sent to its workers before."""
        relay.state, relay.heard = State.READY, time.perf_counter()
        for worker in relay.cut_off:
            worker.apply(Event.RESUMED)
        relay.cut_off = []
        for worker in relay.workers:
            if worker.latest is not None:
                self._forward(worker.latest, [worker])

    def _give_up(self, relay: RelayRecord) -> None:
        """The others to which it should have passed on the last version get it on another path, perhaps again."""
        relay.state, relay.cut_off = State.DEAD, [worker for worker in relay.workers if not worker.gone]
        why = f"rank {relay.rank}, the relay of its machine, has not responded for {_SILENT_S:g} s"
        for worker in relay.cut_off:
            self._report(worker, Event.DIED, 0, why)
        if self._last is not None:
            section, version, workers = self._last
            rest = [worker for worker in workers if worker.relay and worker.relay.state is not State.DEAD]
            if rest and section.version == version:
                self._forward(section, rest)

    def _ping(self) -> None:
        """While it waits, the sender asks the relays once a second whether they are alive."""
        now = time.perf_counter()
        if now - self._pinged > _PING_S:
            if now - self._pinged > 2 * _PING_S:  # a new wait begins
                for relay in self._relays.values():
                    relay.heard = now
            self._pinged = now
            for rank in self._relays:
                keep(self._comm.isend(None, rank, PING))

    def check_absent(self, workers: list[Worker]) -> None:
        """Marks those whose rank has ended its program."""
        from mpi4py import MPI

        while message := self._comm.improbe(MPI.ANY_SOURCE, LEFT):
            self._ended.add(message.recv())
        for worker in workers:
            if (rank := self._ranks[worker.index]) in self._ended:
                worker.apply(Event.DIED, 0, f"rank {rank} has ended")

    def close(self) -> None:
        if self._relays and not self.closed and self.address.pid == os.getpid():  # not forked from the sender
            for rank in self._relays:
                keep(self._comm.isend(None, rank, DOWN))
            deadline = Deadline(_PATIENCE_S)
            wait_until(lambda: not in_flight() or not deadline.left)
        super().close()


def _say_left(pid: int, comm: Any, sender: int) -> None:
    """At the end of the program: a sender that still waits for this rank need not."""
    if os.getpid() == pid:  # a process that was forked from a rank is none
        keep(comm.isend(comm.Get_rank(), sender, LEFT))


def _ranks_of_workers(channel: Channel, root: int) -> list[int]:
    return [rank for rank in range(len(channel.machine)) if rank != root]


def _duplicate(channel: Channel) -> Any:
    """Collective: a communicator of the scheme's own."""
    from mpi4py import MPI

    if len(set(channel.machine)) > 1 and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UsageError("ranks on several machines need an MPI with threads: MPI_THREAD_MULTIPLE")
    duplicate, request = channel.comm.Idup()
    wait_until(request.Test)
    return duplicate
