"""The scheme between the ranks of an MPI job, on one machine or several."""

import atexit
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..collectives.channel import Channel, channel_of
from ..errors import SyncTimeoutError, UsageError
from ..host.sections import Section
from ..host.waiting import wait_until
from ..launch.identity import Comm
from .connection import Address, Deadline
from .publisher import Publisher
from .relay import ADDRESS, BULK, DOWN, LEFT, PING, TAGS, UP, Forwarding, Header, Relay, in_flight, keep
from .scheme import WeightSyncScheme
from .worker import Event, Report, Worker

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
        self._comm: Any = None  # of the scheme's own; None: a single process
        if self._channel.comm:
            from mpi4py import MPI

            if any(self._channel.machine) and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                raise UsageError("ranks on several machines need an MPI with threads: MPI_THREAD_MULTIPLE")
            self._comm, request = self._channel.comm.Idup()
            wait_until(request.Test)
            if self._channel.rank != sender:
                atexit.register(_say_left, os.getpid(), self._comm, sender)

    def __reduce__(self) -> Any:
        raise UsageError("an MPIWeightSyncScheme cannot be sent to another process; each rank makes its own")

    def _start_role(self, call: str) -> None:
        super()._start_role(call)
        if (self._channel.rank == self._root) != (call == "init_on_sender"):
            raise UsageError(f"{call} on rank {self._channel.rank}: rank {self._root} is the sender (sender=)")

    def _worker_index(self, given: int | None) -> int:
        worker = _worker_of(rank := self._channel.rank, self._root)
        if given not in (None, worker):
            raise UsageError(f"worker_idx={given}: rank {rank} is worker {worker}")
        return worker

    def _open_publisher(self, workers: dict[int, Worker], name: str) -> "Ranks":
        return Ranks(self._channel, self._comm, self._root, workers, name)

    def _find_publisher(self, name: str) -> Address:
        if self._address.name:  # the sender sends it once
            return self._address
        rank, machine, deadline = self._channel.rank, self._channel.machine, Deadline(self.timeout)
        source = here if (here := machine[rank]) not in (rank, machine[self._root]) else self._root
        message: Any = wait_until(lambda: self._comm.improbe(source, ADDRESS) or not deadline.left)
        if isinstance(message, bool):
            raise SyncTimeoutError(f"rank {source} has not begun to send {name} within {self.timeout:g} s")
        address, name = message.recv()
        if address is None:  # this rank is the relay of its machine
            members = self._channel.members
            workers = [_worker_of(k, self._root) for k in (rank, *members)]
            address = Relay(self._comm, self._root, workers, name).publisher.address
            for k in members:
                keep(self._comm.isend((address, name), k, ADDRESS))
        self._address = address
        return self._address


class Ranks(Publisher):
    """A publisher whose workers are ranks: it sends to those of other machines through the relays of these."""

    def __init__(self, channel: Channel, comm: Any, root: int, workers: dict[int, Worker], name: str):
        super().__init__(workers, name)
        self._comm, self._root = comm, root
        self._relays: dict[int, list[Worker]] = {}  # by the rank of each: the workers of its machine
        self._heard: dict[int, float] = {}  # when each sent something last, or should have; before, it is not ready
        self._cut_off: dict[int, list[Worker]] = {}  # of those that do not respond: the workers marked dead with them
        self._pinged = 0.0
        self._tags = itertools.cycle(range(BULK, BULK + TAGS))  # of updates that are forwarded
        self._last: Section | None = None  # that was forwarded
        for rank, leader in enumerate(channel.machine):
            if rank == root:
                continue
            worker = workers[_worker_of(rank, root)]
            if leader != channel.machine[root]:
                worker.relay = leader
                self._relays.setdefault(leader, []).append(worker)
            if worker.relay in (None, rank):
                keep(comm.isend((None if worker.relay == rank else self.address, name), rank, ADDRESS))

    def publish(
        self, workers: list[Worker], version: int, nbytes: int, layout: bytes, fill: Callable[[np.ndarray], None]
    ) -> Section:
        """Writes once into this machine's memory, and sends that along a tree to the machines of the other workers."""
        section = super().publish(workers, version, nbytes, layout, fill)
        if forward := [worker for worker in workers if worker.relay in self._heard]:
            self._last = section
            forwarding, deadline = self._forward(section, forward), Deadline(_PATIENCE_S)
            wait_until(lambda: not forwarding.busy() or not deadline.left)
        return section

    def _forward(self, section: Section, workers: list[Worker]) -> Forwarding:
        path = [self._root, *sorted({worker.relay for worker in workers if worker.relay is not None})]
        indices, layout = [worker.index for worker in workers], section.description
        header = Header(next(self._tags), section.version, section.nbytes, layout, indices, path)
        forwarding = Forwarding(self._comm, header)
        forwarding.send(section.block(section.nbytes))
        section.users.append(forwarding.busy)
        for worker in workers:
            worker.waiting = None
        return forwarding

    def poll(self, timeout: float, of: Worker | None = None) -> list[Report]:
        if not self._relays:
            return super().poll(timeout, of)
        deadline = Deadline(timeout)
        self._receive_reports()
        while not (reports := super().poll(min(_NAP_S, deadline.left))) and deadline.left:
            now = time.perf_counter()
            if now - self._pinged > _PING_S:  # asks the relays whether they are alive
                if now - self._pinged > 2 * _PING_S:  # a new wait begins
                    self._heard = dict.fromkeys(self._heard, now)
                self._pinged = now
                for rank in self._relays:
                    keep(self._comm.isend(None, rank, PING))
            self._receive_reports()
        return reports

    def _receive_reports(self) -> None:
        while message := self._comm.improbe(tag=UP):
            relay, report = message.recv()
            self._hear(relay)
            if report is not None:
                event, index, *content = report
                self._report(self.workers[index], event, *content)
        for relay, heard in self._heard.items():
            if relay not in self._cut_off and self._pinged - heard > _SILENT_S:
                self._give_up(relay)

    def _hear(self, relay: int) -> None:
        """A relay has sent something. One that was absent gets what was sent to its workers before."""
        self._heard[relay] = time.perf_counter()
        for worker in self._cut_off.pop(relay, ()):
            worker.apply(Event.RESUMED)
        for worker in self._relays[relay]:
            if worker.waiting is not None:
                self._forward(worker.waiting, [worker])

    def _give_up(self, relay: int) -> None:
        """The others to which it should have passed on the last version get it on another path, perhaps again."""
        self._cut_off[relay] = [worker for worker in self._relays[relay] if not worker.gone]
        why = f"rank {relay}, the relay of its machine, has not responded for {_SILENT_S:g} s"
        for worker in self._cut_off[relay]:
            self._report(worker, Event.DIED, 0, why)
        if (last := self._last) is not None:
            reachable = self._heard.keys() - self._cut_off.keys()
            waiting = [w for w in self.workers.values() if w.answered < w.sent == last.version]
            if rest := [worker for worker in waiting if worker.relay in reachable]:
                self._forward(last, rest)

    def check_absent(self, workers: list[Worker]) -> None:
        """Marks those whose rank has ended its program."""
        for worker in workers:
            rank = worker.index + (worker.index >= self._root)
            if message := self._comm.improbe(rank, LEFT):
                message.recv()
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
        keep(comm.isend(None, sender, LEFT))


def _worker_of(rank: int, root: int) -> int:
    return rank - (rank > root)
