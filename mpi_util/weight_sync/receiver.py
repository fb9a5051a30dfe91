"""The receiver's side of a scheme: applies updates, whole or not at all, while no thread reads the weights."""

import contextlib
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays.adapters.pytorch import forget
from ..arrays.frameworks import framework
from ..arrays.layout import Layout, Plan
from ..errors import SyncTimeoutError, UsageError, WeightsError, WorkerLeftError
from ..host.sections import Content
from .connection import Deadline, Kind
from .layout import Weights, unpacked
from .subscriber import Subscriber, Update

_JOIN_S = 5.0


class LockClosed(UsageError):
    """The weights cannot change after shutdown()."""


class ReadersWriterLock:
    """Any number of readers, or one writer. A waiting writer goes first: readers that hardly pause would starve it.

    So a thread that reads must not wait for another one that is about to: that one may be waiting for a writer.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()  # of a writer while it waits and writes, and of a reader that enters
        self._changed = threading.Condition()
        self._inside = Counter[int]()  # by thread: how often it has entered
        self._closed = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing is written inside. A thread that reads already may enter again."""
        me = threading.get_ident()
        with contextlib.nullcontext() if self._inside[me] else self._turn, self._changed:
            self._inside[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[me] -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """No other thread is inside. Yields True if it had to wait. UsageError: it reads. LockClosed: too late."""
        if self._inside[threading.get_ident()]:
            raise UsageError("inside frozen() the thread that called it cannot change the weights")
        with self._turn:
            with self._changed:
                waited = any(self._inside.values())
                self._changed.wait_for(lambda: self._closed or not any(self._inside.values()))
                if self._closed:
                    raise LockClosed("the weights cannot change after shutdown()")
            yield waited

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
        found = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        self._tensors = {name: tensor for named in found for name, tensor in named}
        for name, tensor in self._tensors.items():
            if tensor.device.type != "cpu":
                raise UsageError(f"share=True needs a module on the CPU; '{name}' is on {tensor.device}")

    def point_into(self, layout: Layout, block: np.ndarray) -> None:
        """Every tensor's values are those in `block`, which must stay as it is until the next call."""
        torch = framework("torch")
        forget(self._model)  # what the adapter remembers of it would keep its former memory
        tied = {name: other for other, name in layout.aliases}
        views: dict[Any, Any] = {}
        for entry in layout.entries:
            values = torch.from_numpy(entry.view(block))
            for tensor in (self._tensors.get(entry.name), self._tensors.get(tied.get(entry.name, ""))):
                if tensor is not None:
                    views.setdefault(tensor, values if values.dtype == tensor.dtype else values.view(tensor.dtype))
        for tensor, view in views.items():
            tensor.data = view

    def part(self) -> None:
        """Every tensor gets memory of its own."""
        for tensor in set(self._tensors.values()):
            tensor.data = tensor.data.clone()


class Receiver:
    """One worker's weights. Arguments and attributes as in `WeightSyncScheme` and its `init_on_receiver`."""

    def __init__(self, worker: int, name: str, model: Any, share: bool, on_update: Callable[[int], None] | None):
        self.worker, self.name, self.model = worker, name, model
        self.lock = ReadersWriterLock()
        self.version = 0
        self.failure: Exception | None = None
        self._subscriber: Subscriber | None = None  # from `connect` on
        self.thread: threading.Thread | None = None  # that receives
        self._on_update = on_update
        self._layout: Layout | None = None  # the sender's, which comes with the first update
        self._sharing = Sharing(model) if share else None
        self._held = contextlib.ExitStack()  # of the block that the model's tensors point into

    def connect(self, subscriber: Subscriber, timeout: float | None) -> None:
        """Compares the models, and applies the first weights. Errors as `WeightSyncScheme.connect`."""
        self._subscriber = subscriber
        if self.receive(Deadline(timeout)) is None:
            if subscriber.stopped:
                raise WorkerLeftError(f"worker {self.worker}: the sender of {self.name} has shut down")
            subscriber.close()
            raise SyncTimeoutError(f"worker {self.worker}: no weights of {self.name} within {timeout} s")

    def _plan(self, layout: Layout) -> Plan:
        return Weights.of(self.model).plan(layout, f"worker {self.worker}'s model", "the sender's")

    def receive(self, deadline: Deadline) -> int | None:
        """Applies weights newer than the model's. Returns their version; None: none came in time, or will come."""
        while self._subscriber is not None and (update := self._subscriber.next(deadline)) is not None:
            if self._take(update, self._subscriber):
                return self.version
        return None

    def _take(self, update: Update, subscriber: Subscriber) -> bool:
        """Applies an update, or what is newer by now, and answers; False if the model has it already."""
        if update.version <= self.version:
            subscriber.answer(Kind.ACK, self.version)
            return False
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
        except Exception:
            subscriber.answer(Kind.ERROR, update.version if self.version else 0, traceback.format_exc())
            raise
        subscriber.answer(Kind.ACK, self.version)
        return True

    def _apply(self, content: Content, update: Update) -> None:
        version, block = content.version, content.block
        if version < update.version:
            raise WeightsError(
                f"version {update.version} of {self.name} was overwritten: the sender failed while writing the next"
            )
        if self._layout is None:
            layout = unpacked(bytes(content.description), len(block))
            if self.model is None:
                self.model = {entry.name: np.zeros(entry.shape, entry.dtype) for entry in layout.entries}
            self._plan(layout)
            if self._sharing is not None and any(entry.narrow for entry in layout.entries):
                raise UsageError("share=True and wire_dtype= exclude each other: the model cannot hold what is sent")
            self._layout = layout
        if self._sharing is None:
            self._plan(self._layout).take(block, undo=True)
        else:
            self._sharing.point_into(self._layout, block)
        self.version = version

    def apply(self, weights: Any) -> None:
        """Sets the model's values to `weights`, whole or not at all; the version stays."""
        if self._layout is None:
            raise UsageError("apply_weights before connect()")
        block = np.empty(self._layout.nbytes, np.uint8)
        plan = Weights.of(weights).plan(self._layout, "the weights given", "the model", Weights.of(self.model))
        plan.write_all(block)
        with self.lock.writing():
            self._plan(self._layout).take(block, undo=True)

    def listen(self) -> None:
        """From now on a thread receives; it sleeps until something comes."""
        name = f"mpi_util weight sync: worker {self.worker}"
        self.thread = threading.Thread(target=self._listen, daemon=True, name=name)
        self.thread.start()

    def _listen(self) -> None:
        while self._subscriber is not None and not self._subscriber.stopped:
            try:
                self.receive(Deadline(None))
            except WorkerLeftError as error:
                self.failure = error
                return
            except Exception as error:  # the sender raises it too; the old weights stay in use
                self.failure = error

    def close(self) -> None:
        """Leaves in order, within `_JOIN_S` seconds."""
        self.lock.close()
        if self._subscriber is not None:
            self._subscriber.close()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_JOIN_S)
        if self._subscriber is not None and (self.thread is None or not self.thread.is_alive()):
            if self._sharing is not None and self.version:
                self._sharing.part()
            self._held.close()
            self._subscriber.release()
