"""In a receiver's process: gets the newest update, applies it to the model, whole or not at all, and answers."""

import contextlib
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpi_util.arrays.adapters.pytorch import from_array
from mpi_util.arrays.layout import Layout, ModelCopier
from mpi_util.errors import MpiUtilError, SyncTimeoutError, UsageError, WeightsError, WorkerLeftError
from mpi_util.host.segments import Ticket

from .connection import Address, Connection, Deadline, Kind, ProtocolError, left
from .layout import Weights, unpacked
from .readers_writer_lock import LockClosed, ReadersWriterLock
from .sections import Content, Reader

_CONNECT_S = 10  # for a process that listens at the address and accepts no connection
_JOIN_S = 5.0
_MESSAGES = (Kind.UPDATE, Kind.REFUSED, Kind.STOP)


class Update(NamedTuple):
    version: int
    ticket: Ticket
    live: tuple[int, ...]  # serial numbers of all sections that the publisher has


class Subscriber:
    """Connects to the publisher at `address`. WorkerLeftError: no process listens there, or another process does.

    Args: link: the `SenderLink` to a publisher on another machine. It is both the connection and the reader.
    Attributes: reader: gives the content of an update, or of a newer one that has replaced it.
    """

    def __init__(self, address: Address, worker: int, name: str, link: Any = None):
        self._worker, self._name = worker, name
        self._newest: Update | None = None
        self.stopped = False  # True if no more updates come: this side or the sender has shut down
        self.reader = link or Reader()
        self._connection = link or self._connect(address)
        self._connection.send(Kind.HELLO, address.key, worker, name)

    def _connect(self, address: Address) -> Connection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _CONNECT_S, 0))
            sock.connect(address.name)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
            connection = Connection(sock)
            if connection.pid != address.pid:
                raise PermissionError(f"process {connection.pid} has taken its address")
            connection.patient = True
            return connection
        except OSError as error:
            sock.close()
            raise left(f"worker {self._worker} finds no sender of {self._name}: it has ended ({error})") from None

    def next(self, deadline: Deadline) -> Update | None:
        """The newest update that was not returned yet; None if none comes in time, or ever (`stopped`).

        Raises: UsageError: the publisher refuses this worker. WorkerLeftError: the sender has died, or is no sender.
        """
        while self._newest is None and not self.stopped:
            self._receive(deadline.left)
            if not deadline.left:
                break
        update, self._newest = self._newest, None
        return update

    def _receive(self, timeout: float) -> None:
        try:
            messages = self._connection.receive(timeout, _MESSAGES)
        except (EOFError, OSError):
            if self.stopped:
                return
            raise left(f"the sender of {self._name} has ended without shutdown()") from None
        except ProtocolError as error:
            self._connection.close()
            raise WorkerLeftError(f"worker {self._worker}: the sender of {self._name} sent {error}") from None
        for kind, *content in messages:
            if kind is Kind.UPDATE:
                version, fd, serial, size, live = content
                self._newest = Update(version, Ticket(self._connection.pid, fd, serial, size), live)
            elif kind is Kind.REFUSED:
                raise UsageError(content[0])
            else:
                self.stopped = True

    def answer(self, kind: Kind, *content: object) -> None:
        with contextlib.suppress(OSError):  # the sender has ended; the next `next` raises it
            self._connection.send(kind, *content)

    def close(self) -> None:
        """Leaves in order. Wakes a thread that waits in `next`."""
        self.answer(Kind.BYE)
        self.stopped = True
        self._connection.close()


class ZeroCopyModule:
    """A torch module on the CPU whose tensors point into a block, and later into the next one.

    The objects (Parameter, buffer) stay the same, so every reference to them sees the new values. Tied ones stay tied.
    """

    def __init__(self, model: Any):
        if not hasattr(model, "named_parameters"):
            raise UsageError(f"zero_copy=True needs a torch module, not a {type(model).__name__}")
        self._tensors = dict(model.named_parameters(remove_duplicate=False))
        self._tensors |= model.named_buffers(remove_duplicate=False)
        for name, tensor in self._tensors.items():
            if tensor.device.type != "cpu":
                raise UsageError(f"zero_copy=True needs a module on the CPU; '{name}' is on {tensor.device}")

    def point_into(self, layout: Layout, block: np.ndarray) -> None:
        """Every tensor's values are those in `block`, which must stay as it is until the next call."""
        entries = {entry.name: entry for entry in layout.entries}
        entries |= {alias: entries[name] for alias, name in layout.aliases if name in entries}
        arrays = {tensor: entries[name].view(block) for name, tensor in self._tensors.items() if name in entries}
        for tensor, array in arrays.items():
            tensor.data = from_array(array, like=tensor)

    def detach(self) -> None:
        """Every tensor gets memory of its own, with the same values."""
        for tensor in set(self._tensors.values()):
            tensor.data = tensor.data.clone()


class Receiver:
    """One worker's weights. Arguments and attributes: as of `WeightSyncScheme` and its `init_on_receiver`."""

    def __init__(self, worker: int, name: str, model: Any, zero_copy: bool, on_update: Callable[[int], None] | None):
        self.worker, self.name, self.model = worker, name, model
        self.lock = ReadersWriterLock()
        self.version = 0
        self.failure: Exception | None = None
        self.ended = threading.Event()
        self._subscriber: Any = None  # a Subscriber, from `connect` on
        self.thread: threading.Thread | None = None  # that receives
        self._on_update = on_update
        self._layout: Layout | None = None  # the sender's, which comes with the first update
        self._zero_copy = ZeroCopyModule(model) if zero_copy else None
        self._held = contextlib.ExitStack()  # of the block that the model's tensors point into

    def connect(self, subscriber: Subscriber, timeout: float | None, background: bool) -> None:
        """Compares the models, and applies the first weights. See `WeightSyncScheme.connect`."""
        self._subscriber = subscriber
        try:
            if self.receive(Deadline(timeout)) is None:
                if subscriber.stopped:
                    raise WorkerLeftError(f"worker {self.worker}: the sender of {self.name} has shut down")
                raise SyncTimeoutError(f"worker {self.worker}: no weights of {self.name} within {timeout} s")
        except BaseException:  # it may connect once more
            subscriber.close()
            self._let_go()
            self._subscriber, self._layout, self.version = None, None, 0
            self.ended.clear()
            raise
        if background:  # a thread receives, asleep until something comes
            name = f"mpi_util weight sync: worker {self.worker}"
            self.thread = threading.Thread(target=self._listen, daemon=True, name=name)
            self.thread.start()

    def _copier(self, layout: Layout, model: Any) -> ModelCopier:
        return Weights.of(model).copier(layout, f"worker {self.worker}'s model", "the sender's")

    def receive(self, deadline: Deadline) -> int | None:
        """Applies weights newer than the model's. Returns their version; None: none came in time, or none will come."""
        try:
            while (update := self._subscriber.next(deadline)) is not None:
                if self._take(update):
                    return self.version
        except WorkerLeftError:
            self.ended.set()
            with contextlib.suppress(MpiUtilError):  # in order: its word came before the memory was given back
                self._subscriber.next(Deadline(0))
            if not self._subscriber.stopped:
                raise
        if self._subscriber.stopped:
            self.ended.set()
        return None

    def _take(self, update: Update) -> bool:
        """Applies an update, or a newer one that has replaced it, and answers; False if the model has it already."""
        subscriber = self._subscriber
        if update.version <= self.version:
            subscriber.answer(Kind.ACK, self.version)
            return False
        before = self.version
        try:
            with self.lock.writing() as waited:
                if waited:
                    update = subscriber.next(Deadline(0)) or update
                subscriber.reader.keep(update.live)
                with contextlib.ExitStack() as held:
                    content = subscriber.reader.reading(update.ticket, discard=self._zero_copy is not None)
                    self._apply(held.enter_context(content), update)
                    if self._zero_copy is not None:
                        self._held.close()
                        self._held = held.pop_all()
            if self._on_update is not None:
                self._on_update(self.version)
        except LockClosed:
            return False
        except BaseException as error:
            failed, has = (update.version, self.version) if before else (0, 0)
            known = isinstance(error, MpiUtilError)
            text = f"{type(error).__name__}: {error}" if known else traceback.format_exc()
            subscriber.answer(Kind.ERROR, failed, has, text)
            raise
        subscriber.answer(Kind.ACK, self.version)
        return True

    def _apply(self, content: Content, update: Update) -> None:
        version, block = content.version, content.block
        if version < update.version:
            what = f"version {update.version} of {self.name}"
            raise WeightsError(f"{what} was overwritten: the sender failed while writing the next")
        if self._layout is None:
            self._layout = layout = unpacked(bytes(content.description), len(block))
            if self.model is None:
                if lacking := next((entry for entry in layout.entries if entry.kind), None):
                    kind = f"{lacking.kind}, which NumPy lacks; give model="
                    raise WeightsError(f"the sender's '{lacking.name}' is {kind}")
                self.model = {entry.name: np.zeros(entry.shape, entry.dtype) for entry in layout.entries}
            self._copier(layout, self.model)
        if self._zero_copy is None:
            self._write(self._copier(self._layout, self.model), block)
        else:
            self._zero_copy.point_into(self._layout, block)
        self.version = version

    def _write(self, copier: ModelCopier, block: Any) -> None:
        """Sets the model's values; all of them, or none where a device or a framework fails."""
        if all(slot.on_host for _, slot in copier.pairs):
            return copier.write(block)
        copier.read(former := np.empty(len(block), np.uint8))
        try:
            copier.write(block)
        except BaseException:
            copier.write(former)
            raise

    def replace(self, model: Any) -> None:
        with self.lock.writing():
            zero_copy = ZeroCopyModule(model) if self._zero_copy is not None else None
            if self._layout is not None:
                self._copier(self._layout, model)
            if self._zero_copy is not None and self.version:
                self._zero_copy.detach()
            self.model, self._zero_copy = model, zero_copy

    def _listen(self) -> None:
        try:
            while not self.ended.is_set():
                try:
                    self.receive(Deadline(None))
                except Exception as error:  # the sender raises it too; the old weights remain
                    self.failure = error
        except BaseException as error:  # such as SystemExit in on_update
            self.failure = UsageError(f"on_update has ended the thread that receives: {error!r}")
            self._subscriber.close()
            self.ended.set()

    def _let_go(self) -> None:  # of the sender's memory
        if self._zero_copy is not None and self.version:
            self._zero_copy.detach()
        self._held.close()
        self._subscriber.reader.keep(())

    def close(self) -> None:
        """Leaves in order, within twice `_JOIN_S` seconds."""
        at_rest = self.lock.close(_JOIN_S)
        if self._subscriber is not None:
            self._subscriber.answer(Kind.ACK, self.version)  # the thread that applied it may not have come so far
            self._subscriber.close()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_JOIN_S)
        self.ended.set()
        if self._subscriber is not None and at_rest:
            self._let_go()
