"""The receiver's side of a scheme: receives where the newest update is, and applies it, whole or not at all."""

import contextlib
import socket
import struct
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mpi_util.arrays.adapters.pytorch import forget
from mpi_util.arrays.frameworks import framework
from mpi_util.arrays.layout import Layout, Plan
from mpi_util.errors import MpiUtilError, SyncTimeoutError, UsageError, WeightsError, WorkerLeftError
from mpi_util.host.segments import Ticket

from .connection import Address, Connection, Deadline, Kind, ProtocolError, new_socket
from .extra import holding
from .layout import Weights, unpacked
from .sections import Content, Reader
from .worker import left

_CONNECT_S = 10  # for a process that listens at the address and accepts no connection
_JOIN_S = 5.0
_PATIENCE_S, _MOST_PATIENCE_S = 0.1, 20.0


class LockClosed(UsageError):
    """The weights cannot change after shutdown()."""


class ReadersWriterLock:
    """Any number of readers, or one writer. A waiting writer goes before new readers, who would starve it.

    But who is inside may wait for another thread that wants to enter: that may, while one is inside who was so before
    the writer came, for whom the writer has to wait anyway; and else after a time, which doubles until the writer's
    turn comes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = Counter[int]()  # by thread: how often it has entered
        self._before: set[int] = set()  # threads that were inside when the writer came
        self._waiting = 0  # writers
        self._patience = _PATIENCE_S
        self._closed = self._writing = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing is written inside. A thread that reads already may enter again."""
        me = threading.get_ident()
        with self._changed:
            patience = self._patience
            if not self._inside[me] and not self._changed.wait_for(self._may_read, patience):
                self._patience = min(max(self._patience, 2 * patience), _MOST_PATIENCE_S)
                self._before |= set(self._inside)  # the writer waits for these anyway
                self._changed.wait_for(lambda: not self._writing)
            self._inside[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[me] -= 1
                if not self._inside[me]:
                    del self._inside[me]
                    self._before.discard(me)
                self._changed.notify_all()

    def _may_read(self) -> bool:
        return not self._writing and (not self._waiting or bool(self._before))

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """No other thread is inside. Yields True if it had to wait. UsageError: it reads. LockClosed: too late."""
        with self._changed:
            if threading.get_ident() in self._inside:
                raise UsageError("inside frozen() the thread that called it cannot change the weights")
            if not self._waiting:
                self._before = set(self._inside)
            waited, self._waiting = bool(self._inside), self._waiting + 1
            try:
                self._changed.wait_for(lambda: self._closed or not (self._inside or self._writing))
                if self._closed:
                    raise LockClosed("the weights cannot change after shutdown()")
                self._writing, self._patience = True, _PATIENCE_S
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield waited
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def close(self) -> None:
        """From now on nothing is written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Sharing:
    """Lets the tensors of a torch module on the CPU point into a block, and from one block to the next.

    The objects (Parameter, buffer) stay the same: who holds them sees the new values. Tied ones stay tied.
    """

    def __init__(self, model: Any):
        if not hasattr(model, "named_parameters"):
            raise UsageError(f"share=True needs a torch module, not a {type(model).__name__}")
        self._model = model
        self._tensors = dict(model.named_parameters(remove_duplicate=False))
        self._tensors |= model.named_buffers(remove_duplicate=False)
        for name, tensor in self._tensors.items():
            if tensor.device.type != "cpu":
                raise UsageError(f"share=True needs a module on the CPU; '{name}' is on {tensor.device}")

    def point_into(self, layout: Layout, block: np.ndarray) -> None:
        """Every tensor's values are those in `block`, which must stay as it is until the next call."""
        forget(self._model)  # what the adapter remembers of it would keep its former memory
        entries = {entry.name: entry for entry in layout.entries}
        entries |= {alias: entries[name] for alias, name in layout.aliases if name in entries}
        arrays = {tensor: entries[name].view(block) for name, tensor in self._tensors.items() if name in entries}
        for tensor, array in arrays.items():
            view = framework("torch").from_numpy(array)
            tensor.data = view if view.dtype == tensor.dtype else view.view(tensor.dtype)

    def part(self) -> None:
        """Every tensor gets memory of its own."""
        for tensor in set(self._tensors.values()):
            tensor.data = tensor.data.clone()


class Update(NamedTuple):
    """Where a version is."""

    version: int
    ticket: Ticket
    live: tuple[int, ...]  # serial numbers of all sections that the publisher has


class Subscriber:
    """Connects to the publisher at `address`. WorkerLeftError: there is none, or another process has taken its place.

    Attributes: stopped: True if no more updates come: this side or the sender has shut down.
    """

    def __init__(self, address: Address, worker: int, name: str):
        self._worker, self._name = worker, name
        self._reader = Reader()
        self._newest: Update | None = None
        self.stopped = False
        sock = new_socket()
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _CONNECT_S, 0))
            sock.connect(address.name)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
            self._connection = Connection(sock)
            if self._connection.pid != address.pid:
                raise PermissionError(f"process {self._connection.pid} has taken its address")
            self._connection.send_hello(address.key, worker, name)
        except OSError as error:
            sock.close()
            raise left(f"worker {worker} finds no sender of {name}: it has ended ({error})") from None

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
            messages = self._connection.receive(timeout, (Kind.UPDATE, Kind.REFUSED, Kind.STOP))
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

    def reading(self, update: Update, discard: bool = False) -> contextlib.AbstractContextManager[Content]:
        """An update, or a newer one in its place. See `Reader.reading`."""
        self._reader.keep(update.live)
        return self._reader.reading(update.ticket, discard)

    def answer(self, kind: Kind, *content: object) -> None:
        """Sends ACK, ERROR or BYE."""
        with contextlib.suppress(OSError):  # the sender has ended; the next `next` raises it
            self._connection.send(kind, *content)

    def close(self) -> None:
        """Leaves in order. Wakes a thread that waits in `next`."""
        self.answer(Kind.BYE)
        self.stopped = True
        self._connection.close()

    def release(self) -> None:
        """Gives the memory back, once nothing reads it."""
        self._reader.keep(())


class Receiver:
    """One worker's weights. Arguments and attributes as in `WeightSyncScheme` and its `init_on_receiver`."""

    def __init__(self, worker: int, name: str, model: Any, share: bool, on_update: Callable[[int], None] | None):
        self.worker, self.name, self.model = worker, name, model
        self.lock = ReadersWriterLock()
        self.version = 0
        self.failure: Exception | None = None
        self.ended = threading.Event()
        self._subscriber: Subscriber | None = None  # from `connect` on
        self.thread: threading.Thread | None = None  # that receives
        self._on_update = on_update
        self._layout: Layout | None = None  # the sender's, which comes with the first update
        self._described = 0  # bytes that describe it
        self._extra = b""  # what else the sender's model had last
        self._sharing = Sharing(model) if share else None
        self._held = contextlib.ExitStack()  # of the block that the model's tensors point into

    def connect(self, subscriber: Subscriber, timeout: float | None, background: bool) -> None:
        """Compares the models, and applies the first weights. Arguments and errors as `WeightSyncScheme.connect`."""
        self._subscriber = subscriber
        try:
            if self.receive(Deadline(timeout)) is None:
                if subscriber.stopped:
                    raise WorkerLeftError(f"worker {self.worker}: the sender of {self.name} has shut down")
                raise SyncTimeoutError(f"worker {self.worker}: no weights of {self.name} within {timeout} s")
        except BaseException:  # it may connect once more
            subscriber.close()
            self._let_go(subscriber)
            self._subscriber, self._layout, self._described, self._extra, self.version = None, None, 0, b"", 0
            self.ended.clear()
            raise
        if background:  # a thread receives, asleep until something comes
            name = f"mpi_util weight sync: worker {self.worker}"
            self.thread = threading.Thread(target=self._listen, daemon=True, name=name)
            self.thread.start()

    def _plan(self, layout: Layout) -> Plan:
        return Weights.of(self.model).plan(layout, f"worker {self.worker}'s model", "the sender's")

    def receive(self, deadline: Deadline) -> int | None:
        """Applies weights newer than the model's. Returns their version; None: none came in time, or will come."""
        while self._subscriber is not None and (update := self._subscriber.next(deadline)) is not None:
            if self._take(update, self._subscriber):
                return self.version
        if self._subscriber is None or self._subscriber.stopped:
            self.ended.set()
        return None

    def _take(self, update: Update, subscriber: Subscriber) -> bool:
        """Applies an update, or what is newer by now, and answers; False if the model has it already."""
        if update.version <= self.version:
            subscriber.answer(Kind.ACK, self.version)
            return False
        before = self.version
        try:
            with self.lock.writing() as waited:
                if waited:
                    update = subscriber.next(Deadline(0)) or update
                with contextlib.ExitStack() as held:
                    self._apply(held.enter_context(subscriber.reading(update, self._sharing is not None)), update)
                    if self._sharing is not None:
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
            raise WeightsError(
                f"version {update.version} of {self.name} was overwritten: the sender failed while writing the next"
            )
        text = bytes(content.description[self._described :])
        if self._layout is None:
            described, _, text = text.partition(b"\n")
            layout = unpacked(described, len(block))
            if self.model is None:
                for entry in layout.entries:
                    if entry.kind:
                        raise WeightsError(
                            f"the sender's '{entry.name}' is {entry.kind}, which NumPy lacks; give model="
                        )
                self.model = {entry.name: np.zeros(entry.shape, entry.dtype) for entry in layout.entries}
            self._plan(layout)
            self._layout, self._described = layout, len(described) + 1
        parts = Weights.of(self.model).parts if text != self._extra else []  # or it would undo what these do here
        with holding(parts, text):
            if self._sharing is None:
                self._plan(self._layout).take(block, undo=True)
            else:
                self._sharing.point_into(self._layout, block)
        self.version, self._extra = version, text

    def apply(self, weights: Any) -> None:
        """Sets the model's values to `weights`, whole or not at all; the version stays."""
        if self._layout is None:
            raise UsageError("apply_weights before connect()")
        block = np.empty(self._layout.nbytes, np.uint8)
        plan = Weights.of(weights).plan(self._layout, "the weights given", "the model", Weights.of(self.model))
        plan.write_all(block)
        with self.lock.writing():
            self._plan(self._layout).take(block, undo=True)

    def replace(self, model: Any) -> None:
        """From now on `model` gets the weights."""
        with self.lock.writing():
            sharing = Sharing(model) if self._sharing is not None else None
            if self._sharing is not None and self.version:
                self._sharing.part()
            self.model, self._sharing = model, sharing

    def _listen(self) -> None:
        try:
            while self._subscriber is not None and not self._subscriber.stopped:
                try:
                    self.receive(Deadline(None))
                except WorkerLeftError as error:
                    self.failure = error
                    break
                except Exception as error:  # the sender raises it too; the old weights stay in use
                    self.failure = error
        except BaseException as error:  # such as sys.exit: of this thread, which is the end of it
            self.failure = UsageError(f"on_update has ended the thread that receives: {error!r}")
            if self._subscriber is not None:
                self._subscriber.close()
        finally:
            self.ended.set()

    def _let_go(self, subscriber: Subscriber) -> None:
        """Gives the sender's memory back."""
        if self._sharing is not None and self.version:
            self._sharing.part()
        self._held.close()
        subscriber.release()

    def close(self) -> None:
        """Leaves in order, within `_JOIN_S` seconds."""
        self.lock.close()
        if self._subscriber is not None:
            self._subscriber.close()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_JOIN_S)
        self.ended.set()
        if self._subscriber is not None and (self.thread is None or not self.thread.is_alive()):
            self._let_go(self._subscriber)
