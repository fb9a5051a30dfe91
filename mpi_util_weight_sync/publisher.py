"""In the sender's process: accepts workers, in a thread, and gives versions to any number of them on its machine."""

import contextlib
import enum
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from mpi_util.arrays.layout import Layout
from mpi_util.errors import UsageError

from .connection import Address, Connection, Kind, ProtocolError
from .layout import packed
from .sections import Section

_ACCEPT_AGAIN_S = 0.05
_HELLO_S = 10.0  # for a process that connects and sends nothing; others are accepted meanwhile
_BACKLOG = 4096  # workers that connect before the sender does
_SPARE = 2  # sections that are kept besides those in use
ANSWERS = (Kind.ACK, Kind.ERROR, Kind.BYE)


class State(enum.Enum):
    ABSENT = "absent"  # it has not connected, or there is no update for it yet
    READY = "ready"  # it gets updates
    LEFT = "it has shut down"
    DEAD = "dead"


def name_of(model_id: str | None) -> str:
    return f"the model '{model_id}'" if model_id is not None else "the model"


@dataclass(eq=False)
class Worker:
    """The record of one worker: its state, what was sent to it, and what it has answered.

    ABSENT --first update--> READY --ended--> LEFT or DEAD --connected--> ABSENT

    Another process that replaces a worker connects as it. An ABSENT worker whose process or rank ends becomes DEAD.
    """

    index: int
    state: State = State.ABSENT
    died: str = ""  # how, in the state DEAD
    layout: Layout | None = None  # of what it gets
    sent: int = 0  # the last version
    acked: int = 0  # the last version that it has acknowledged
    answered: int = 0  # the last version that it has acknowledged or reported as failed
    pid: int = 0
    connection: Any = None  # a Connection, or a WorkerLink to another machine; None: not connected
    unread: dict[int, Section] = field(default_factory=dict)  # version that it has not answered -> where that is
    waiting: Section | None = None  # what it gets when it connects, or when it answers

    @property
    def gone(self) -> bool:
        """True if nothing is sent to it."""
        return self.state in (State.LEFT, State.DEAD)

    def connected(self, connection: Any) -> None:
        """A process is this worker from now on. It owes no answer to what was sent before."""
        self.pid, self.connection, self.state, self.died = connection.pid, connection, State.ABSENT, ""
        self.answered = self.sent if self.waiting is None else self.answered

    def ended(self, died: str = "") -> None:
        """It has died (how), or shut down in order."""
        self.state, self.died = State.DEAD if died else State.LEFT, died


class Publisher:
    """Sends one model (`name`) to its workers, and updates their records. `open` starts to accept them."""

    def __init__(self, workers: dict[int, Worker], name: str):
        self.workers, self.name = workers, name
        self.address = Address(secrets.token_bytes(32), os.getpid(), f"\0mpi_util-{secrets.token_hex(16)}")
        self.turned_away = ""  # the last process that was, and why
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address.name)
        self._listener.listen(_BACKLOG)
        self._lock = threading.RLock()
        self._selector = selectors.EpollSelector()  # of descriptors, each with its worker
        self._guests: set[Connection] = set()  # connections that have not sent HELLO
        # (worker, version that it could not apply, traceback), which the sender has not raised yet
        self.failures: list[tuple[int, int, str]] = []
        self.refusals: list[str] = []
        self._changed = False  # a worker's record, since the last `poll`
        self._sections: list[Section] = []
        self._thread: threading.Thread | None = None
        self.newest = 0  # version
        self._publishing = self.closed = False
        self._children: dict[int | None, BaseProcess] = {}  # processes that this one has started, by their ids
        self._others = weakref.WeakSet(_processes())  # processes that it had started before

    def open(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._accept, daemon=True, name="mpi_util weight sync: publisher")
            self._thread.start()

    def _accept(self) -> None:
        while not self.closed:
            try:
                connection = Connection(self._listener.accept()[0])
                self._guests.add(connection)
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
            except PermissionError as error:
                self.turned_away = str(error)
            except (OSError, RuntimeError):  # closed; or no descriptor or thread is free just now
                time.sleep(_ACCEPT_AGAIN_S)

    def _greet(self, connection: Connection) -> None:  # in a thread of its own
        try:
            if not (messages := connection.receive(_HELLO_S, (Kind.HELLO,), 1)):
                raise ProtocolError(f"it sent nothing within {_HELLO_S:g} s")
            _, key, index, name = messages[0]
            if not secrets.compare_digest(key, self.address.key):
                raise ProtocolError("it does not have the key")
            self._admit(connection, index, name)
        except Exception as error:  # a stranger may send anything
            self.turned_away = f"process {connection.pid}: {str(error) or type(error).__name__}"
            connection.close()
        finally:
            self._guests.discard(connection)

    def _admit(self, connection: Any, index: int, name: str) -> None:
        with self._lock:
            if self.closed or connection.receive(0, ANSWERS):
                raise EOFError("it has left")
            self._changed = True
            if refusal := self._refusal(index, name):
                connection.send(Kind.REFUSED, f"worker {index} is refused: {refusal}")
                self.refusals.append(f"worker {index} was refused: {refusal}")
                raise ProtocolError(refusal)
            worker = self.workers[index]
            worker.connected(connection)
            for fd in connection.fds:
                self._selector.register(fd, selectors.EVENT_READ, worker)
            self._receive(worker)

    def _refusal(self, index: int, name: str) -> str | None:
        if name != self.name and self.name != name_of(None):
            return f"it asks for {name}, and the sender sends {self.name}; give both sides one model_id="
        if (worker := self.workers.get(index)) is None:
            known = f"0 to {max(self.workers)}" if self.workers else "none"
            return f"the sender knows the workers {known}; give it num_workers={index + 1} or more"
        self._receive(worker)
        return f"another process ({worker.pid}) is that worker already" if worker.connection is not None else None

    def _disconnect(self, worker: Worker, died: str = "") -> None:
        """Args: died: how it died; "": it has shut down in order."""
        if worker.connection is None:
            return
        connection, worker.connection = worker.connection, None
        worker.unread, worker.waiting = {}, None  # a process that replaces it waits for the next
        for fd in connection.fds:
            self._selector.unregister(fd)
        if worker.state is State.READY or died:
            worker.ended(died)
        self._changed = True
        connection.close()

    def publish(self, workers: list[Worker], version: int, layout: Layout, fill: Callable[[np.ndarray], None]) -> int:
        """Writes a version (0: a new one) once, sends it to these workers, and returns it.

        Those who have not connected get it when they do; those who have a newer one by now are left out.

        Args: layout: of the block. fill: writes the values into a block, uint8, shape (layout.nbytes,).
        """
        self.open()
        with self._lock:  # of several threads that send
            self._check_open()
            if self._publishing:
                raise UsageError("send within send: by a signal's handler, or while the weights are read")
            try:
                self._publishing = True
                version = version or self.newest + 1
                self.newest = max(version, self.newest)  # it is not used again, even if this is interrupted
                workers = [worker for worker in workers if worker.sent < version]
                description = packed(layout)
                section = self._claim(set(workers), layout.nbytes + len(description))
                fill(section.memory[: layout.nbytes])
                section.publish(version, layout.nbytes, description)
                for worker in workers:
                    if worker.state is State.ABSENT:
                        self._receive(worker)
                    worker.layout = layout
                    self._send(worker, section)
                    worker.sent = version  # not before: if a signal interrupts this, it owes no answer
                for old in self._sections[:-_SPARE]:
                    if old is not section and not self._readers(old) and old.claim():
                        self._sections.remove(old)
                        old.close()
            except BaseException:  # also a signal's, anywhere
                for section in self._sections:
                    section.release()
                raise
            finally:
                self._publishing = False
        return version

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError(f"{self.name}: another thread has called shutdown() meanwhile")

    def _send(self, worker: Worker, section: Section) -> None:
        """Sends an update, which waits while the worker is absent, or has no room for it."""
        worker.waiting = section
        if worker.connection is None:
            return
        if worker.state is State.ABSENT:
            worker.state, worker.acked, worker.answered = State.READY, 0, 0
        unread = len(worker.unread)
        worker.waiting = None
        worker.unread[section.version] = section
        try:
            worker.connection.send_update(section, [other.ticket.serial for other in self._sections], unread)
        except BlockingIOError:
            worker.waiting = worker.unread.pop(section.version)
        except OSError:
            self._receive(worker)  # it has closed its end: in order, if it has sent BYE

    def _claim(self, workers: set[Worker], nbytes: int) -> Section:
        """A section that no reader has locked, and that was announced to `workers` alone, which now get a newer one."""
        for section in self._sections:
            if self._readers(section) <= workers and section.claim(nbytes):
                return section
        section = Section(nbytes)
        section.claim(nbytes)
        self._sections.append(section)
        return section

    def _readers(self, section: Section) -> set[Worker]:
        """The workers that will read this section: it was announced to them, or will be when they connect."""
        return {w for w in self.workers.values() if section is w.waiting or section in w.unread.values()}

    def poll(self, timeout: float) -> None:
        """Updates the workers' records. Waits up to `timeout` seconds if none has changed since the last call."""
        if timeout and not self._changed:
            with contextlib.suppress(OSError, ValueError):  # it is closed
                self._sleep(timeout)
        with self._lock:
            self._check_open()
            for key, _ in self._selector.select(0):
                self._receive(key.data)
            self._changed = False

    def _sleep(self, timeout: float) -> None:
        """Sleeps up to `timeout` seconds, until one of the workers sends something."""
        self._selector.select(timeout)

    def _receive(self, worker: Worker) -> None:
        """Takes what a worker has sent, and sends it the update that waits for it."""
        if (connection := worker.connection) is None:
            return
        self._check_open()
        try:
            for kind, *answer in connection.receive(0, ANSWERS):
                self._changed = True
                if kind is Kind.BYE:
                    return self._disconnect(worker)
                self._answered(worker, *answer)
        except EOFError:
            return self._disconnect(worker, f"its process ({worker.pid}) ended")
        except ProtocolError as error:
            return self._disconnect(worker, f"its process ({worker.pid}) sent {error}")
        if worker.waiting is not None:
            self._send(worker, worker.waiting)

    def _answered(self, worker: Worker, version: int, has: int = 0, error: str | None = None) -> None:
        if not 0 <= max(version, has) <= self.newest or min(version, has) < 0:
            raise ProtocolError(f"an answer to version {version}; {self.newest} is the last")
        worker.unread = {v: section for v, section in worker.unread.items() if v > version}
        if error is None:
            has = version
        elif worker.answered < (version or worker.sent):  # one for each version, because they are kept
            worker.answered = version or worker.sent
            self.failures.append((worker.index, version or 1, error))
        worker.acked, worker.answered = max(has, worker.acked), max(has, worker.answered)

    def check_absent(self, workers: list[Worker]) -> None:
        """Marks absent workers, whose processes are not known yet, as dead when fewer children than these are left."""
        connected = {worker.pid for worker in self.workers.values()}
        known = _processes()
        self._children |= {child.pid: child for child in known - {*self._others} if child.pid}
        strangers = [child for pid, child in self._children.items() if pid not in connected and child in known]
        ended = [child for child in strangers if not child.is_alive()]
        if ended and len(strangers) - len(ended) < len(workers):
            text = ", ".join(f"{child.name} with status {child.exitcode}" for child in ended)
            why = f"it has not connected, and fewer started processes are alive than workers are missing; ended: {text}"
            for worker in workers:
                worker.ended(why)

    def close(self) -> None:
        """Disconnects the workers, and gives everything back. Not in a process that was forked from this one."""
        if self.closed or self.address.pid != os.getpid():
            return
        with self._lock:
            self.closed = True
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for guest in list(self._guests):
                guest.close()
            for connection in [worker.connection for worker in self.workers.values() if worker.connection is not None]:
                with contextlib.suppress(OSError):
                    connection.send(Kind.STOP)
                connection.close()
            self._selector.close()
            for section in self._sections:
                section.close()
            self._sections.clear()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)


def _processes() -> set[BaseProcess]:
    """The Process objects of this program; `multiprocessing.active_children` would leave out those that have ended."""
    found: Any = getattr(sys.modules["multiprocessing.process"], "_dangling", ())
    return {child for child in found if not child._closed}  # else it has no id any more
