"""How one process gives weights to any number of others of its machine: the hub, and the port of each worker.

The bytes are written once, into shared memory; what goes to each worker is a note of some tens of bytes. A worker
connects whenever it is ready; a thread of the hub lets it in, asleep until then.
"""

import collections
import contextlib
import hmac
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..host.sections import Section
from .layout import Layout
from .port import Address
from .wire import Wire, close_in_forks, packed

_AGAIN_S = 0.05
_HELLO_S = 5.0  # for what is not a worker, and says nothing
_UNREAD = 64  # notes to one worker; a socket holds some 270 before it blocks
_SPARE = 2  # sections that are kept beside those in use

Fill = Callable[[np.ndarray], int]  # writes a version into a block of uint8, and returns its checksum


class Event(NamedTuple):
    """What a worker has told: "ready", "ack" (it has that version), "error" (with traceback), or "left" (why).

    "new": it has come, perhaps again, and waits for what is sent next. "back": it had left for a while.
    """

    kind: str
    worker: int
    version: int = 0
    text: str = ""


class Hub:
    """The hub of one model on one machine.

    Args:
        workers: indices that may connect.
        who: names the model in messages.
        slow: writing takes long: never into a section that a worker is about to read, who would wait for it.
    """

    def __init__(self, workers: list[int], who: str, slow: bool = False):
        self.workers, self._who, self._slow = frozenset(workers), who, slow
        self.address = Address(f"\0mpi_util-{secrets.token_hex(16)}", secrets.token_bytes(16))
        self._listener = close_in_forks(socket.socket(socket.AF_UNIX))
        self._listener.bind(self.address.name)
        self._listener.listen(128)
        self._lock = threading.RLock()
        self._epoll = select.epoll()
        self.pids: dict[int, int] = {}
        self._wires: dict[int, Wire] = {}
        self._by_fd: dict[int, int] = {}
        self._unread: dict[int, dict[int, Section]] = {}  # by worker: version -> section, told and not acknowledged
        self._untold: set[int] = set()
        self._events: collections.deque[Event] = collections.deque()
        self._sections: list[Section] = []
        self._layouts: dict[int, Layout] = {}
        self._latest: dict[int, Section] = {}  # by worker: where the newest is that was sent to it
        self._waiting: dict[int, Wire] = {}  # workers for whom there is nothing yet
        self._thread: threading.Thread | None = None
        self.closed = False

    def open(self) -> None:
        """Begins to let workers in."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._let_in, daemon=True, name="mpi_util weight sync: hub")
            self._thread.start()

    def _let_in(self) -> None:
        while not self.closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed; or no descriptor is free just now
                time.sleep(_AGAIN_S)
                continue
            wire = Wire(sock)
            try:
                self._greet(wire)
            except Exception:  # a stranger may say anything
                wire.close()

    def _greet(self, wire: Wire) -> None:
        if wire.peer()[1] != os.getuid():
            raise EOFError  # what it says is not even read: it would be unpickled
        end = time.perf_counter() + _HELLO_S
        hello: list[tuple[Any, ...]] = []
        while not hello:
            hello = wire.receive(max(0.0, end - time.perf_counter()))
            if not hello and time.perf_counter() > end:
                raise EOFError
        key, worker, who = hello[0]
        if wire.rings is None or not hmac.compare_digest(key, self.address.key):
            raise EOFError
        with self._lock:
            if self.closed or any(kind == "bye" for kind, *_ in hello[1:]):
                raise EOFError
            self._drop_dead(worker)
            if who != self._who:
                text = f"it asks for {who}, and the sender sends {self._who}; give both sides one model_id="
            elif worker not in self.workers:
                known = f"0 to {max(self.workers)}" if self.workers else "none"
                text = f"the sender knows the workers {known}; give it num_workers={worker + 1} or more"
            elif worker in self._wires or worker in self._waiting:
                text = f"another process ({self.pids[worker]}) is that worker already"
            else:
                self.pids[worker] = wire.peer()[0]
                self._waiting[worker] = wire
                self._welcome(worker)
                return
            wire.send("refused", f"worker {worker} is refused: {text}")
        wire.close()

    def _drop_dead(self, worker: int) -> None:
        """Notices that the process that was this worker has ended: another one may be it now, or soon."""
        dead = not alive(self.pids.get(worker, 0))
        if worker in self._wires:
            self._drop(worker, f"its process ({self.pids[worker]}) ended") if dead else self._hear(worker)
        elif worker in self._waiting:
            with contextlib.suppress(EOFError):
                if not dead and not self._waiting[worker].receive(0):  # else it has said goodbye
                    return
            self._waiting.pop(worker).close()

    def _welcome(self, worker: int) -> None:
        """A worker that waits gets the newest that was sent to it, if something was."""
        if worker not in self._latest:
            self._events.append(Event("new", worker))
            return
        wire = self._waiting.pop(worker)
        self._wires[worker], self._by_fd[wire.fd] = wire, worker
        self._unread[worker] = {}
        self._events.append(Event("ready", worker))
        try:
            self._epoll.register(wire.fd, select.EPOLLIN)
            wire.send("welcome", self._layouts[worker])
            self._tell(worker, self._latest[worker])
        except OSError as error:
            self._drop(worker, _why(error))

    def _note(self, section: Section) -> bytes:
        return packed("note", section.version, tuple(section.ticket), tuple(s.ticket.serial for s in self._sections))

    def _tell(self, worker: int, section: Section, note: bytes | None = None) -> None:
        """Tells a worker; where it is one of several who get the same note, the caller rings."""
        unread = self._unread[worker]
        unread[section.version] = section
        if len(unread) > _UNREAD:
            self._untold.add(worker)  # it is told when it has answered
            return
        self._untold.discard(worker)
        self._wires[worker].send_packed(note or self._note(section), ring=note is None)

    def publish(self, workers: list[int], version: int, layout: Layout, fill: Fill) -> Section:
        """Writes a version once, and tells these workers; those who are not there yet get it when they come.

        Args:
            fill: writes into the block, uint8 of the layout's size, and returns its checksum.

        Returns:
            Where it lies; valid until the next call, or as long as one of its `users` needs it.
        """
        with self._lock:
            section = self._claim(set() if self._slow else set(workers), layout.nbytes)
            block = section.block(layout.nbytes)
            try:
                checksum = fill(block)
            except BaseException:
                section.release()
                raise
            section.publish(version, checksum, layout.nbytes)
            note = self._note(section)
            try:
                for worker in workers:
                    self._layouts[worker], self._latest[worker] = layout, section
                    if worker in self._waiting:
                        self._drop_dead(worker)
                    if worker in self._waiting:
                        self._welcome(worker)
                    elif worker in self._wires:
                        try:
                            self._tell(worker, section, note)
                        except OSError as error:
                            self._drop(worker, _why(error))
            finally:
                for worker in workers:
                    if worker in self._wires:
                        self._wires[worker].ring()
            self._trim(section)
            return section

    def _claim(self, workers: set[int], nbytes: int) -> Section:
        """A section that nobody reads, or will read for another reason than to get the newest."""
        for section in self._sections:
            if section.holds(nbytes) and self._readers(section) <= workers and section.claim():
                return section
        section = Section(nbytes)
        section.claim()
        self._sections.append(section)
        return section

    def _readers(self, section: Section) -> set[int]:
        """Workers that will read what is there: they have been told, or will be when they come."""
        told = {worker for worker, unread in self._unread.items() if section in unread.values()}
        return told | {k for k, latest in self._latest.items() if latest is section and k not in self._wires}

    def _trim(self, newest: Section) -> None:
        needed = [newest, *self._latest.values()]
        for section in [s for s in self._sections[:-_SPARE] if s not in needed and not self._readers(s)]:
            if section.claim():
                self._sections.remove(section)
                section.close()

    def poll(self, timeout: float, of: int | None = None) -> list[Event]:
        """What workers have told, waiting for it up to `timeout` seconds.

        Args:
            of: wait for this worker's word: who needs the answers of several is then not woken by each.
        """
        with self._lock:
            timeout, wire = 0 if self._events else timeout, None if of is None else self._wires.get(of)
        if timeout and wire is not None:
            wire.wait(timeout)
            timeout = 0
        for fd, _ in self._epoll.poll(timeout):
            with self._lock:
                worker = self._by_fd.get(fd)
                if worker is not None:
                    self._hear(worker)
        with self._lock:
            events, self._events = list(self._events), collections.deque()
        return events

    def _hear(self, worker: int) -> None:
        try:
            messages = self._wires[worker].receive(0)
        except EOFError:
            return self._drop(worker, f"its process ({self.pids[worker]}) ended")
        for kind, version, text in messages:
            if kind == "bye":
                return self._drop(worker, "")
            told = self._unread[worker]
            for older in [v for v in told if v <= version]:
                del told[older]
            self._events.append(Event(kind, worker, version, text))
            if worker in self._untold and told:
                try:
                    self._tell(worker, told[max(told)])
                except OSError:
                    return self._drop(worker, f"its process ({self.pids[worker]}) ended")

    def _drop(self, worker: int, why: str) -> None:
        wire = self._wires.pop(worker)
        self._latest.pop(worker, None)  # should it come again, it waits for what is sent then
        del self._by_fd[wire.fd], self._unread[worker]
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(wire.fd)
        wire.close()
        self._events.append(Event("left", worker, 0, why))

    def check_alive(self) -> None:
        """Notices workers that died while a process which they had started holds their end of the socket open."""
        with self._lock:
            for worker in [k for k in self._wires if not alive(self.pids[k])]:
                self._drop(worker, f"its process ({self.pids[worker]}) ended")

    def close(self) -> None:
        """Tells the workers that nothing more comes, and gives everything back."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for wire in [*self._wires.values(), *self._waiting.values()]:
                with contextlib.suppress(OSError):
                    wire.sock.setblocking(False)  # one that reads no more is not waited for
                    wire.send("stop")
                wire.close()
            self._wires.clear()
            self._waiting.clear()
            self._epoll.close()
            for section in self._sections:
                section.close()
            self._sections.clear()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)


def _why(error: OSError) -> str:
    return "it does not read what it is told" if isinstance(error, BlockingIOError) else "its process ended"


def alive(pid: int) -> bool:
    """False for a process that has ended, whether its parent has noticed or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not os.path.exists("/proc/self")
